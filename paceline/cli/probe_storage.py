"""`paceline probe storage`: measure storage for loaders and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import host_options as place
from paceline.cli.model_options import DEVICES_PER_NODE
from paceline.cli.options import ClusterName, Device, DeviceKind, Json, Panel, RunsDir
from paceline.cli.output import TableForm, TableFormat, emit
from paceline.cli.terminal import echo
from paceline.core.errors import EXIT_INCOMPLETE, UserError
from paceline.core.hardware import Cluster
from paceline.core.quantity import BYTE_FORMS, parse_bytes
from paceline.core.result import finite_value
from paceline.core.units import binary, percent, pluralize, si
from paceline.estimate.calibrate.lookup import evidence_for, is_cpu
from paceline.estimate.request import EstimateRequest
from paceline.estimate.single_estimate import estimate
from paceline.files import catalog
from paceline.files.run_folder import find_run, read_record, runs_root
from paceline.report.document import Column, Document, Notes, Table, Verdict
from paceline.runs.outcome import evaluate
from paceline.scaling.storage.measurement import (
    REPORT_FILE,
    MeasuredStorage,
    StorageRequest,
    measure_storage,
)
from paceline.scaling.storage.report import OPERATIONS, StorageDemand, demand_of


def storage(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[PATH]...", help="Folders to measure; default: the current folder."
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="Recipe whose estimated storage demand is compared."),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="Run whose measured storage demand is compared.",
        ),
    ] = None,
    assume_devices: Annotated[
        str | None,
        typer.Option(
            "--assume-devices",
            metavar="DEVICE[:N]",
            help="Devices that --recipe is estimated for, over all hosts; default: the devices "
            "of these hosts.",
            rich_help_panel=Panel.hosts,
        ),
    ] = None,
    device: Device = DeviceKind.auto,
    devices: place.DevicesOfEach = None,
    processes: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            help="Numbers of concurrent processes; default: 1 and the number of devices per host.",
            rich_help_panel=Panel.measurement,
        ),
    ] = None,
    operations: Annotated[
        str,
        typer.Option(
            "--ops",
            help=f"Comma-separated list of {', '.join(OPERATIONS)}; or all.",
            rich_help_panel=Panel.measurement,
        ),
    ] = "all",
    size: Annotated[
        str,
        typer.Option(
            help="Total size of the files per host: 1GiB, 500MB.", rich_help_panel=Panel.measurement
        ),
    ] = "1GiB",
    sample: Annotated[
        int | None,
        typer.Option(
            "--sample-bytes",
            min=1,
            help="Bytes per sample; default: as in the recipe, else 8,194.",
            rich_help_panel=Panel.measurement,
        ),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            min=0.1,
            max=3600,
            help="Measurement time for all operations in a folder, in seconds.",
            rich_help_panel=Panel.measurement,
        ),
    ] = 10.0,
    wait: place.Wait = 600.0,
    cluster: ClusterName = None,
    runs_dir: RunsDir = None,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
    *,
    location: place.HostOptions,
) -> None:
    """Measure the storage bandwidth for data loading and checkpoints.

    Measures with one process and with as many as a host has devices: sequential reads, random
    samples of a mapped file as in the trainer's loader, writes, checkpoints with fsync, and small
    files. Results that may come from the page cache are marked. With a recipe or a run, it also
    reports whether steps would wait for data and how long a checkpoint takes.

    Examples:

      paceline probe storage /data --recipe tiny-llama

      paceline probe storage /scratch --hosts hosts.txt --devices 8     all hosts at the same time

      paceline probe storage /data --recipe llama31-8b --assume-devices H100:64 --size 20GiB
    """
    placement = location.where()
    if recipe and run:
        raise UserError("--recipe and --run", "exclude each other", remedy="leave one out")
    if assume_devices and not recipe:
        raise UserError("--assume-devices", "requires --recipe", remedy="--recipe R")
    request = StorageRequest(
        where=placement,
        site=catalog.cluster(cluster) if cluster else None,
        paths=tuple(dict.fromkeys(paths or [Path()])),
        device=device.value,
        devices=devices,
        operations=_operations(operations),
        processes=_counts(processes),
        size_bytes=_bytes(size),
        sample_bytes=sample,
        seconds=seconds,
        wait_s=wait,
    )
    outcome = measure_storage(
        request,
        runs_root(runs_dir),
        lambda what: echo(f"  {what}", err=True),
        _demand_function(recipe, run, assume_devices, runs_dir),
    )
    for notice in outcome.notices:
        echo(f"note: {notice}", err=True)
    emit(_document(outcome), TableFormat.json if as_json else form)
    if outcome.report.faults:
        raise typer.Exit(EXIT_INCOMPLETE)


def _operations(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip().replace("-", "_") for name in text.split(",")))
    if names == ("all",):
        return tuple(OPERATIONS)
    if unknown := [name for name in names if name not in OPERATIONS]:
        raise UserError(
            "--ops", f"{unknown[0]!r} is not an operation", allowed=", ".join([*OPERATIONS, "all"])
        )
    return names


def _counts(text: str | None) -> tuple[int, ...]:
    parts = text.split(",") if text else []
    if not all(part.strip().isdecimal() and 0 < int(part) <= 1024 for part in parts):
        raise UserError(
            "--processes", f"{text!r} is not a list of numbers", allowed="1,4,8 to 1024"
        )
    return tuple(sorted({int(part) for part in parts}))


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise UserError(f"--size {text[:40]!r}", "is not a size", allowed=BYTE_FORMS) from error


def _demand_function(
    recipe: str | None, run: str | None, on: str | None, runs_dir: Path | None
) -> Callable[[Cluster], StorageDemand] | None:
    """Return a function that gives the storage demand once the hosts are known, or None."""
    if run:
        demand = _run_demand(find_run(runs_root(runs_dir), run))
        return lambda _: demand
    return (lambda cluster: estimated_demand(recipe, on, cluster)) if recipe else None


def _run_demand(folder: Path) -> StorageDemand:
    """Return the storage demand of a run; raise UserError for a run without a recipe."""
    spec, report = read_record(folder).spec, evaluate(folder)
    if spec is None:
        raise UserError(str(folder), "is an imported log without a recipe", remedy="--recipe R")
    metric = report.result.metrics.get("samples_per_s")
    rate = finite_value(metric)
    notes = () if rate else ((metric.note if metric else None) or "it has no samples/s",)
    of = f", median of {pluralize(metric.n, 'step')}" if metric and metric.n else ""
    return demand_of(spec, f"run {folder.name}{of}", rate, notes=notes)


def estimated_demand(recipe: str, on: str | None, cluster: Cluster) -> StorageDemand:
    """Return the estimated storage demand of a recipe; samples/s may be unknown."""
    name, _, number = (on or "").partition(":")
    if number and not (number.isdecimal() and int(number)):
        raise UserError(f"--assume-devices {on}", "is not DEVICE:N", allowed="H100:64")
    total = int(number or cluster.world_size)
    per_node = cluster.devices_per_node
    if number and not is_cpu(name or cluster.device):  # processes need fill no hosts
        per_node = _devices_per_node(f"--assume-devices {on}", total, cluster)
    question = EstimateRequest(
        recipe=recipe, device=name or cluster.device, devices=total, devices_per_node=per_node
    )
    dtype = question.resolved_recipe.training.dtype
    source = f"the estimate for {total} x {question.device}"
    try:
        answer = estimate(question, evidence_for(question.device, dtype))
    except UserError as error:
        if on:
            raise
        notes = (
            f"the demand is unknown, because {error.where} {error.what}; {error.remedy}, or assume "
            "GPUs with --assume-devices, e.g. H100:8",
        )
        return demand_of(question.spec_of_any_layout, source, None, notes=notes)
    rate = answer.samples_per_s * answer.step_time_s
    interval = (rate / answer.high_s, rate / answer.low_s)
    return demand_of(question.spec, source, answer.samples_per_s, interval)


def _devices_per_node(what: str, total: int, cluster: Cluster) -> int:
    """Return the devices per host; one measured host stands for many full hosts."""
    if cluster.nodes == 1:
        whole, hosts = min(total, DEVICES_PER_NODE), f"{DEVICES_PER_NODE} devices per host"
    else:
        whole, hosts = cluster.nodes, f"the {pluralize(cluster.nodes, 'host')}"
    if total % whole:
        raise UserError(what, f"is not a multiple of {hosts}", allowed=f"{total + -total % whole}")
    return whole if cluster.nodes == 1 else total // cluster.nodes


def _document(outcome: MeasuredStorage) -> Document:
    report = outcome.report
    rows = [row.model_dump(mode="json") for row in report.rows]
    best = {
        operation: max(
            (row for row in rows if row["operation"] == operation),
            key=lambda row: row["bytes_per_s"],
        )
        for operation in dict.fromkeys(row["operation"] for row in rows)
    }
    places = [
        f"{each.host}:{each.path} is on {each.file_system or 'an unknown file system'}"
        f" ({each.source or 'device unknown'}), {binary(each.free_bytes)} free"
        for each in report.places
    ]
    problems = len(report.slow) + len(report.faults)
    return Document(
        kind=f"storage, {report.created}",
        title=pluralize(len(report.places), "folder"),
        setup=(f"measured in {report.elapsed_s:.0f} s",),
        verdict=Verdict(
            "parts failed" if report.faults else f"{len(report.slow) or 'nothing'} slow",
            "alert" if problems else "good",
        ),
        answer=report.sentences,
        sections=(
            Notes(title="Failed", tone="alert", lines=report.faults),
            Table(columns=_columns(), rows=[_flat(row) for row in rows]),
            Notes(title="Folders", lines=places),
        ),
        notes=(str(outcome.folder / REPORT_FILE),),
        data={
            "probe": "storage",
            "device": "cpu",
            **report.model_dump(mode="json"),
            "best": best,
            "folder": str(outcome.folder),
        },
    )


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    place_of = f"{row['host']}:{row['path']}"
    return {**row, "place": place_of, "cached": "*" if row["may_be_cached"] else ""}


def _columns() -> list[Column]:
    return [
        Column("place", "host:folder"),
        Column("operation", "operation", lambda value: OPERATIONS[value]),
        Column("processes", "at once", str, "right"),
        Column("bytes_per_s", "rate", lambda value: si(value, "B/s"), "right"),
        Column("cached", "*"),
        Column("units_per_s", "a second", lambda value: f"{value:,.4g}", "right"),
        Column("unit_bytes", "of", binary, "right"),
        Column("unit_s", "one takes", lambda value: f"{1e3 * value:,.3g} ms", "right"),
        Column("slow_unit_s", "99%", lambda value: f"{1e3 * value:,.3g} ms", "right"),
        Column("n", "n", str, "right"),
        Column("spread", "spread", percent, "right"),
        Column("method", "page cache"),
    ]
