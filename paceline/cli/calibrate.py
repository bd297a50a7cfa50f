"""`paceline probe calibrate`: measure this machine for the time model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import Device, DeviceKind, RunsDir
from paceline.cli.output import TableOptions, emit
from paceline.cli.terminal import echo
from paceline.core.errors import UserError
from paceline.core.units import percent, pluralize, si, step_seconds
from paceline.estimate.calibrate.calibration import Calibration, calibration_path
from paceline.estimate.calibrate.measurement import calibrate as measure
from paceline.files.documents import refuse_unwritable, write_value
from paceline.files.run_folder import runs_root
from paceline.report.document import Column, Document, Table
from paceline.runs.machine_variation import estimate_machines, store_machines


def calibrate(
    recipes: Annotated[
        list[str] | None,
        typer.Argument(
            help="Recipes whose layer shapes are measured; default: a few small ones.",
            metavar="[RECIPE]...",
        ),
    ] = None,
    device: Device = DeviceKind.auto,
    dtype: Annotated[
        str | None,
        typer.Option(help="Data type: fp32, bf16 or fp16; default bf16 if the device supports it."),
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            help="Numbers of processes to measure; default 1, 2, 4, ... up to the size of this "
            "machine.",
        ),
    ] = None,
    calibration_file: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="File for the calibration; default: a file in the user's data folder.",
        ),
    ] = None,
    no_probes: Annotated[
        bool, typer.Option("--no-probes", help="Only read the stored runs.")
    ] = False,
    runs_dir: RunsDir = None,
    *,
    output: TableOptions,
) -> None:
    """Measure this machine, so that `estimate`, `sweep` and `tune` predict it better.

    Runs probes and short trainings of 2 and 4 layers, about two minutes on an otherwise idle
    machine, and adjusts the time model to them. The calibration is stored by device and data type.
    The run-to-run variation in the stored runs becomes that of the machine in `compare`.

    Examples:

      paceline probe calibrate

      paceline probe calibrate tiny-llama gpt-1b3-tiny --device cpu --dtype fp32
    """
    if dtype not in (None, "fp32", "bf16", "fp16"):
        raise UserError(f"--dtype {dtype}", "is not calibrated", allowed="fp32, bf16, fp16")
    counts = _counts(ranks)
    if calibration_file:
        refuse_unwritable(calibration_file)

    variation = _refresh_variation(runs_root(runs_dir))
    if no_probes:
        for sentence in variation:
            echo(sentence)
        return

    def tell(what: str) -> None:
        echo(f"calibrate: {what}", err=True)

    calibration = measure(recipes or (), device.value, dtype, tell, counts)
    path = calibration_file or calibration_path(calibration.device, calibration.dtype)
    write_value(path, calibration)
    rows = [
        step.model_dump(mode="json") | {"ratio": step.predicted_s / step.measured_s}
        for step in calibration.steps
    ]
    answer = Document(
        kind="calibration of the time model",
        title=f"{calibration.device} in {calibration.dtype}",
        sections=(Table(columns=_COLUMNS, rows=rows),),
        notes=(*_sentences(calibration), *variation),
        data=calibration.model_dump(mode="json") | {"file": str(path)},
    )
    emit(answer, output.output_format)
    echo(f"written: {path}", err=True)


def _refresh_variation(root: Path) -> list[str]:
    """Store the run-to-run variation of the runs, and return a sentence for each machine."""
    machines = estimate_machines(root)
    if not machines:
        return [f"run-to-run variation: no configuration has two runs in {root}"]
    store_machines(machines)
    return [f"run-to-run variation: {each.words}" for each in machines]


def _counts(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= 1024 for part in parts):
        raise UserError(
            f"--ranks {text}",
            "is not a list of process counts",
            allowed="1,2: each from 1 to 1024",
        )
    return tuple(dict.fromkeys(int(part) for part in parts))


def _sentences(calibration: Calibration) -> list[str]:
    lines = [
        f"{placement.ranks} x {pluralize(placement.threads, 'thread')}: "
        f"GEMM {si(placement.flops_per_s, 'FLOP/s')}, "
        f"memory copy {si(placement.memory_bytes_per_s, 'B/s')}"
        + (
            f", communication {si(placement.link_bytes_per_s, 'B/s')}"
            if placement.link_bytes_per_s
            else ""
        )
        + " each"
        for placement in calibration.placements
    ]
    lines.append(
        f"{pluralize(len(calibration.steps), 'short training run')} and "
        f"{pluralize(calibration.probes, 'probe')} of "
        f"{calibration.device} in {calibration.dtype}"
    )
    if calibration.inseparable_coefficients:
        pairs = ", ".join(" and ".join(pair) for pair in calibration.inseparable_coefficients)
        lines.append(f"not distinguishable: {pairs}")
    names = ", ".join(calibration.undetermined_coefficients)
    lines.append(f"coefficients that were not adjusted: {names or 'none'}")
    return lines


_COLUMNS = [
    Column("recipe", "recipe"),
    Column("layers", "layers", str, "right"),
    Column("layout", "layout"),
    Column("ranks", "ranks", str, "right"),
    Column("threads", "threads", str, "right"),
    Column("measured_s", "step", lambda v: f"{step_seconds(v)} s", "right"),
    Column("n", "n", str, "right"),
    Column("spread", "spread", percent, "right"),
    Column("predicted_s", "by the model", lambda v: f"{step_seconds(v)} s", "right"),
    Column("ratio", "ratio", lambda v: f"{v:.2f}", "right"),
]
