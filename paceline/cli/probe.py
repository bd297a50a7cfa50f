"""`paceline probe gemm` and `context`: GEMM throughput and memory before any model."""

from __future__ import annotations

import sys
from typing import Annotated, Any, get_args

import typer

from paceline.cli.options import Device, DeviceKind, Json
from paceline.cli.output import TableForm, TableFormat, emit_json, emit_table
from paceline.cli.terminal import echo
from paceline.core.errors import SystemFaultError, UserError
from paceline.core.hardware import Dtype
from paceline.core.units import percent, si
from paceline.machines.placement import device_kind, find_device
from paceline.machines.probe.context import ContextProbe, probe_context
from paceline.machines.probe.gemm import GemmProbe
from paceline.machines.probe.inventory import inventory
from paceline.report.document import Column
from paceline.report.figures import format_value
from paceline.runs.flow import probe_this_machine


def gemm(
    dtypes: Annotated[
        str, typer.Option("--dtype", help="Comma-separated list of data types: fp32,bf16,fp16,fp8.")
    ] = ("fp32,bf16"),
    device: Device = DeviceKind.auto,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Measure again instead of using the cached result.")
    ] = False,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
) -> None:
    """Measure the GEMM throughput that torch reaches on this machine, by data type.

    Runs report their FLOP/s as a percentage of this throughput ("% of achievable"). The result is
    cached per machine, torch version and settings.

    Example: paceline probe gemm --dtype bf16 --no-cache
    """
    names = tuple(name.strip() for name in dtypes.split(",") if name.strip())
    wrong = [name for name in names if name not in get_args(Dtype)]
    if wrong or not names:
        raise UserError(
            "--dtype", f"{dtypes!r} is not a list of data types", allowed=", ".join(get_args(Dtype))
        )
    probe = probe_this_machine(names, device.value, no_cache)  # type: ignore[arg-type]
    for name, reason in probe.skipped.items():
        echo(f"note: {name} was skipped: {reason}", err=True)
    if not probe.rows:
        raise SystemFaultError("gemm probe", "measured nothing", remedy="choose another --dtype")
    form = TableFormat.json if as_json else form
    if form is TableFormat.json:
        emit_json(_document(probe))
    else:
        emit_table([_flat(row) for row in _document(probe)["rows"]], _columns(), form)


def _document(probe: GemmProbe) -> dict[str, Any]:
    rows = [
        {
            "dtype": r.dtype,
            "shape": [r.m, r.n, r.k],
            "flops_per_s": r.flops_per_s,
            "statistic": r.statistic,
            "n": r.repeats,
            "spread": r.spread,
            "cpu_share": r.cpu_share,
        }
        for r in probe.rows
    ]
    best: dict[str, Any] = {}
    for row in rows:
        if row["flops_per_s"] > best.get(row["dtype"], {"flops_per_s": 0.0})["flops_per_s"]:
            best[row["dtype"]] = row
    return {
        "probe": "gemm",
        "device": probe.device_name,
        "torch": probe.torch,
        "threads": probe.threads,
        "matmul_precision": probe.matmul_precision,
        "rows": rows,
        "best": best,
        "skipped": probe.skipped,
    }


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "shape": "x".join(map(str, row["shape"]))}


def _columns() -> list[Column]:
    return [
        Column("dtype", "dtype"),
        Column("shape", "m x n x k"),
        Column("flops_per_s", "FLOP/s", lambda v: si(v, "FLOP/s"), "right"),
        Column("statistic", "from the"),
        Column("n", "n", str, "right"),
        Column("spread", "spread", percent, "right"),
    ]


def context(
    device: Device = DeviceKind.auto,
    ranks: Annotated[
        int,
        typer.Option(
            min=1, help="Number of processes; with 2 or more the communicator is measured too."
        ),
    ] = 1,
    repeat: Annotated[
        int, typer.Option(min=1, help="Number of repeats, each in fresh processes.")
    ] = 3,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
) -> None:
    """Measure the memory that a device uses before any model is loaded.

    On a GPU: driver context, library handles and communicator, compared with the catalog. On a
    CPU: the resident set of the process after each of these.

    Example: paceline probe context --ranks 2
    """
    machine = inventory()
    kind, notices = device_kind(device.value, machine)
    if kind == "cuda" and ranks > len(machine["gpus"]):
        raise UserError(
            "--ranks",
            f"{ranks} ranks need as many GPUs; this machine has {len(machine['gpus'])}",
            allowed=f"1 to {len(machine['gpus'])}",
        )
    for notice in notices:
        echo(f"note: {notice}", err=True)
    document = _context_document(probe_context(sys.executable, kind, ranks, repeat), kind)
    form = TableFormat.json if as_json else form
    if form is TableFormat.json:
        emit_json(document)
        return
    emit_table(document["rows"], _context_columns(), form)
    if form is TableFormat.text and document["catalog"]:
        echo(document["catalog"]["sentence"])


def _context_document(probe: ContextProbe, kind: str) -> dict[str, Any]:
    rows = [row.model_dump(mode="json") for row in probe.rows]
    return {
        "probe": "context",
        "device": probe.device_name,
        "torch": probe.torch,
        "ranks": probe.ranks,
        "rows": rows,
        "best": rows[-1],
        "catalog": _catalog_context(probe) if kind == "cuda" else None,
    }


def _catalog_context(probe: ContextProbe) -> dict[str, Any] | None:
    """Return the catalog's context size next to the measured one, or None if unknown."""
    device, context = find_device(probe.device_name), probe.row("context")
    if device is None or device.context_bytes is None or context is None:
        return None
    ratio = context.bytes / device.context_bytes
    return {
        "device": device.name,
        "context_bytes": device.context_bytes,
        "ratio": ratio,
        "sentence": f"context {format_value(context.bytes, 'bytes')} here, "
        f"{format_value(device.context_bytes, 'bytes')} in the catalog for {device.name}: "
        f"{ratio:.2f} x",
    }


def _context_columns() -> list[Column]:
    def size(value: float) -> str:
        return format_value(value, "bytes")

    return [
        Column("stage", "after"),
        Column("what", "what it is"),
        Column("kind", "kind"),
        Column("bytes", "in use", size, "right"),
        Column("added_bytes", "added", size, "right"),
        Column("pool_bytes", "in torch's pool", size, "right"),
        Column("n", "n", str, "right"),
        Column("spread", "spread", percent, "right"),
    ]
