"""`paceline probe memory`, `collective`, `attention` and `latency`: parts of one machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from paceline.cli.options import Device, DeviceKind, Json
from paceline.cli.output import TableForm, TableFormat, emit_table
from paceline.cli.terminal import echo
from paceline.core.errors import UserError
from paceline.core.units import binary, percent, si
from paceline.machines.placement import device_kind
from paceline.machines.probe.inventory import inventory
from paceline.machines.probe.rates import (
    attention_shapes,
    probe_attention,
    probe_collective,
    probe_latency,
    probe_memory,
)
from paceline.report.document import Column

Seconds = Annotated[float, typer.Option(min=0.1, max=60, help="Measurement time, in seconds.")]


def memory(
    device: Device = DeviceKind.auto,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; default: all usable cores.")
    ] = None,
    seconds: Seconds = 2.0,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
) -> None:
    """Measure the memory copy bandwidth of a device, reads plus writes.

    The largest size exceeds the caches; its bandwidth bounds optimizer steps and normalisations.

    Example: paceline probe memory
    """
    kind, cores, _ = _machine(device)
    probe = probe_memory(
        sys.executable, kind, threads or (cores if kind == "cpu" else None), seconds
    )
    about = {"probe": "memory", "device": probe.device_name, "threads": probe.threads}
    columns = [SIZE, _rate("bytes_per_s", "copied")]
    _emit(probe, about, columns, "bytes_per_s", TableFormat.json if as_json else form)


def collective(
    device: Device = DeviceKind.auto,
    ranks: Annotated[
        int | None,
        typer.Option(min=2, help="Number of processes; default: all GPUs, or 2 on a CPU."),
    ] = None,
    seconds: Seconds = 2.0,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
) -> None:
    """Measure all-reduce between the devices of this machine, by payload.

    The bus bandwidth is the payload bandwidth x 2 (n - 1) / n, which is the traffic of each link.
    `paceline check` measures the same between pairs of hosts.

    Example: paceline probe collective --ranks 2
    """
    kind, cores, gpus = _machine(device)
    processes = ranks or (gpus if kind == "cuda" else 2)
    if kind == "cuda" and not 2 <= processes <= gpus:
        raise UserError(
            "--ranks", f"{processes} ranks need as many GPUs, at least 2; this machine has {gpus}"
        )
    threads = max(1, cores // processes)
    probe = probe_collective(sys.executable, kind, processes, threads, seconds)
    about = {
        "probe": "collective",
        "device": probe.device_name,
        "ranks": probe.ranks,
        "backend": probe.backend,
    }
    columns = [
        SIZE,
        _rate("bytes_per_s", "payload"),
        _rate("bus_bytes_per_s", "bus"),
        _time("latency_s", "time"),
    ]
    _emit(probe, about, columns, "bus_bytes_per_s", TableFormat.json if as_json else form)


def attention(
    device: Device = DeviceKind.auto,
    recipe: Annotated[
        str, typer.Option(help="Recipe that supplies the number of heads and the sequence length.")
    ] = "tiny-llama",
    dtype: Annotated[str, typer.Option(help="Data type: fp32, bf16 or fp16.")] = "fp32",
    seconds: Seconds = 2.0,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
) -> None:
    """Measure the trainer's causal attention, forward and backward, with the shape of a recipe.

    FLOP/s count both GEMMs over the half that is not masked, and 2.5 times as many in the backward
    pass.

    Example: paceline probe attention --recipe tiny-llama --dtype bf16
    """
    kind, cores, _ = _machine(device)
    if dtype not in ("fp32", "bf16", "fp16"):
        raise typer.BadParameter("must be fp32, bf16 or fp16", param_hint="--dtype")
    shapes = attention_shapes(recipe)
    threads = cores if kind == "cpu" else None
    probe = probe_attention(sys.executable, kind, dtype, shapes, threads, seconds)
    about = {"probe": "attention", "device": probe.device_name, "dtype": dtype}
    columns = [
        Column("shape", "batch x tokens x heads x kv heads x width"),
        _time("forward_s", "forward"),
        _time("backward_s", "backward"),
        Column("flops_per_s", "FLOP/s", lambda value: si(value, "FLOP/s"), "right"),
    ]
    _emit(probe, about, columns, "flops_per_s", TableFormat.json if as_json else form)


def latency(
    device: Device = DeviceKind.auto,
    seconds: Seconds = 1.0,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
) -> None:
    """Measure the launch latency of one small operation, which limits tiny models.

    Example: paceline probe latency
    """
    kind, _, _ = _machine(device)
    probe = probe_latency(sys.executable, kind, seconds)
    about = {"probe": "latency", "device": probe.device_name}
    columns = [_time("latency_s", "one operation")]
    _emit(probe, about, columns, None, TableFormat.json if as_json else form)


def _machine(device: DeviceKind) -> tuple[str, int, int]:
    """Return the device type (cpu or cuda), usable cores and number of GPUs."""
    machine = inventory()
    kind, notices = device_kind(device.value, machine)
    for notice in notices:
        echo(f"note: {notice}", err=True)
    return kind, machine["cpu"]["usable_cores"], len(machine["gpus"])


def _emit(
    probe: Any,
    about: dict[str, Any],
    columns: Sequence[Column],
    best_by: str | None,
    form: TableFormat,
) -> None:
    """Print the rows of a probe; in JSON with `about` and the best row by `best_by`, or the first.

    The columns are followed by the number of repeats and their spread.
    """
    rows = [row.model_dump(mode="json") for row in probe.rows]
    best = max(rows, key=lambda row: row[best_by]) if best_by else rows[0]
    flat = [
        {**row, "shape": "x".join(map(str, row["shape"]))} if "shape" in row else row
        for row in rows
    ]
    document = {**about, "torch": probe.torch, "rows": rows, "best": best}
    emit_table(flat, [*columns, *REPEATS], form, document=document)


def _rate(key: str, title: str) -> Column:
    return Column(key, title, lambda value: si(value, "B/s"), "right")


def _time(key: str, title: str) -> Column:
    return Column(key, title, lambda value: f"{1e6 * value:,.1f} us", "right")


SIZE = Column("bytes", "size", binary, "right")
REPEATS = (Column("n", "n", str, "right"), Column("spread", "spread", percent, "right"))
