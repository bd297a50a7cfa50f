"""`paceline probe`: what this machine really reaches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import Json
from paceline.cli.output import Column, TableForm, TableFormat, emit_json, emit_table

if TYPE_CHECKING:
    from paceline.probe.gemm import GemmProbe

app = typer.Typer(
    help="Measure what this machine reaches, apart from training.", no_args_is_help=True
)


@app.callback()
def _group() -> None:
    """Short measurements of one part of the machine each."""


@app.command()
def gemm(
    dtypes: Annotated[str, typer.Option("--dtype", help="Comma list of fp32,bf16,fp16,fp8.")] = (
        "fp32,bf16"
    ),
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure anew, not from the cache.")
    ] = False,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
) -> None:
    """Measure the dense matrix-product rate that torch reaches here, per dtype.

    Runs hold their FLOP/s against this rate ("of achievable"). It is kept per machine, torch
    version and setting.

    Example: paceline probe gemm --dtype bf16 --fresh
    """
    from typing import get_args

    from paceline.core.hardware import Dtype
    from paceline.errors import SystemFaultError, UserError
    from paceline.flow import probe_this_machine

    names = tuple(name.strip() for name in dtypes.split(",") if name.strip())
    wrong = [name for name in names if name not in get_args(Dtype)]
    if wrong or not names:
        raise UserError("--dtype", f"{dtypes!r} is no list of dtypes",
                        allowed=", ".join(get_args(Dtype)))  # fmt: skip
    probe = probe_this_machine(names, device, fresh)  # type: ignore[arg-type]
    for name, reason in probe.skipped.items():
        typer.echo(f"note: {name} was left out: {reason}", err=True)
    if not probe.rows:
        raise SystemFaultError("gemm probe", "measured nothing", remedy="choose another --dtype")
    form = TableFormat.json if as_json else form
    if form is TableFormat.json:
        emit_json(_document(probe))
    else:
        emit_table([_flat(row) for row in _document(probe)["rows"]], _columns(), form)


def _document(probe: GemmProbe) -> dict[str, Any]:
    rows = [
        {"dtype": r.dtype, "shape": [r.m, r.n, r.k], "flops_per_s": r.flops_per_s,
         "statistic": r.statistic, "n": r.repeats, "spread": r.spread, "cpu_share": r.cpu_share}
        for r in probe.rows
    ]  # fmt: skip
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
    from paceline.units import percent, si

    return [
        Column("dtype", "dtype"),
        Column("shape", "m x n x k"),
        Column("flops_per_s", "FLOP/s", lambda v: si(v, "FLOP/s"), "right"),
        Column("statistic", "from the"),
        Column("n", "n", str, "right"),
        Column("spread", "spread", percent, "right"),
    ]
