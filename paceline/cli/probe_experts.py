"""`paceline probe experts`: measure token dispatch and expert GEMMs."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli import host_options as place
from paceline.cli.options import ClusterName, Device, DeviceKind, Json, Panel, RunsDir
from paceline.cli.output import TableForm, TableFormat, emit
from paceline.cli.terminal import echo
from paceline.files import catalog
from paceline.files.run_folder import runs_root
from paceline.scaling.experts.measurement import (
    DEFAULT_PROBLEMS,
    REPORT_FILE,
    ExpertsRequest,
    measure_experts,
)
from paceline.scaling.experts.report import ELEMENT_BYTES, experts_document


def _size(name: str, what: str) -> typer.models.OptionInfo:
    gpu, cpu = (getattr(DEFAULT_PROBLEMS[kind], name) for kind in ("cuda", "cpu"))
    return typer.Option(
        min=1,
        max=2**24,
        help=f"{what}; default {gpu:,}, on CPUs {cpu:,}.",
        rich_help_panel=Panel.measurement,
    )


def experts(
    device: Device = DeviceKind.auto,
    devices: place.DevicesOfEach = None,
    tokens: Annotated[int | None, _size("tokens", "Tokens per rank")] = None,
    hidden: Annotated[int | None, _size("hidden", "Hidden size")] = None,
    ffn: Annotated[int | None, _size("ffn", "Hidden size of one expert")] = None,
    num_experts: Annotated[
        int | None,
        typer.Option(
            "--experts",
            min=1,
            max=2**16,
            help="Number of experts; default 256, on CPUs 16.",
            rich_help_panel=Panel.measurement,
        ),
    ] = None,
    top_k: Annotated[int | None, _size("top_k", "Experts per token")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Data type: fp32 or bf16; default bf16, on CPUs fp32.",
            rich_help_panel=Panel.measurement,
        ),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            min=0.1,
            max=3600,
            help="Measurement time of each dispatcher, in seconds.",
            rich_help_panel=Panel.measurement,
        ),
    ] = 10.0,
    time_limit: place.TimeLimit = 600.0,
    wait: place.Wait = 600.0,
    cluster: ClusterName = None,
    runs_dir: RunsDir = None,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
    *,
    location: place.HostOptions,
) -> None:
    """Measure dispatch, expert GEMMs and combine of a layer with experts on all devices.

    The choice of experts is balanced, and results are checked. Times are those of the slowest rank.
    The JSON is stored in runs/experts.

    Examples:

      paceline probe experts                                  devices of this machine

      paceline probe experts --hosts hosts.txt --tokens 8192

      paceline probe experts --devices 4 --experts 8 --top-k 2 --hidden 512
    """
    if dtype is not None and dtype not in ELEMENT_BYTES:
        raise typer.BadParameter(f"must be {' or '.join(ELEMENT_BYTES)}", param_hint="--dtype")
    request = ExpertsRequest(
        where=location.where(),
        site=catalog.cluster(cluster) if cluster else None,
        device=device.value,
        devices=devices,
        tokens=tokens,
        hidden=hidden,
        ffn=ffn,
        experts=num_experts,
        top_k=top_k,
        dtype=dtype,
        seconds=seconds,
        limit_s=time_limit,
        wait_s=wait,
    )
    outcome = measure_experts(
        request, runs_root(runs_dir), lambda what: echo(f"  {what}", err=True)
    )
    for notice in outcome.notices:
        echo(f"note: {notice}", err=True)
    document = experts_document(outcome.report, outcome.folder / REPORT_FILE)
    emit(document, TableFormat.json if as_json else form)
    if outcome.report.wrong:
        raise typer.Exit(3)
