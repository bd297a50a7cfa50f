"""`paceline probe network`: measure collectives and pairs of hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import host_options as place
from paceline.cli import model_options as model
from paceline.cli import quantities
from paceline.cli.options import Device, DeviceKind, Json, Panel, RunsDir, refuse_unused
from paceline.cli.output import TableForm, TableFormat, emit
from paceline.cli.terminal import echo
from paceline.core.errors import UserError
from paceline.files import catalog
from paceline.files.run_folder import runs_root
from paceline.scaling.network.benchmark_output import read_benchmark
from paceline.scaling.network.measurement import NetworkRequest, measure_network
from paceline.scaling.network.readings import OPERATIONS
from paceline.scaling.network.report import NetworkReport, network_document

USED_BY_FROM = {"source", "cluster", "intra", "inter", "form", "as_json"}


def network(
    context: typer.Context,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="Read the output of nccl-tests, rccl-tests or perftest instead.",
            rich_help_panel=Panel.measurement,
        ),
    ] = None,
    device: Device = DeviceKind.auto,
    devices: place.DevicesOfEach = None,
    operations: Annotated[
        str,
        typer.Option(
            "--ops",
            help=f"Comma-separated list of {', '.join(OPERATIONS)}; or all, or none.",
            rich_help_panel=Panel.measurement,
        ),
    ] = "all",
    least: Annotated[
        int,
        typer.Option(
            "--min-bytes",
            parser=quantities.payload,
            metavar="SIZE",
            help="Smallest payload, e.g. 1KiB.",
            rich_help_panel=Panel.measurement,
        ),
    ] = 1024,
    most: Annotated[
        int | None,
        typer.Option(
            "--max-bytes",
            parser=quantities.payload,
            metavar="SIZE",
            help="Largest payload and message; default 16MiB, on GPUs 256MiB.",
            rich_help_panel=Panel.measurement,
        ),
    ] = None,
    pairs: Annotated[
        bool,
        typer.Option(
            "--pairs/--no-pairs",
            help="Measure latency and bandwidth between all pairs of hosts.",
            rich_help_panel=Panel.measurement,
        ),
    ] = True,
    seconds: Annotated[
        float,
        typer.Option(
            min=0.1,
            max=3600,
            help="Measurement time for all collectives together, in seconds.",
            rich_help_panel=Panel.measurement,
        ),
    ] = 10.0,
    time_limit: place.TimeLimit = 600.0,
    wait: place.Wait = 600.0,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Cluster of the catalog or YAML file. Its launcher is used, and its link "
            "bandwidths are expected.",
            rich_help_panel=Panel.hosts,
        ),
    ] = None,
    intra: model.Intra = None,
    inter: model.Inter = None,
    runs_dir: RunsDir = None,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
    *,
    location: place.HostOptions,
) -> None:
    """Measure all collectives, and the latency and bandwidth between all hosts.

    Payload and bus bandwidth are defined as in nccl-tests, and results are checked. All devices of
    a host send at the same time. An HTML page with charts and maps of all pairs, and the JSON, are
    stored in runs/networks. The bandwidth is compared with the stated one of the links.

    Examples:

      paceline probe network                                      devices of this machine

      paceline probe network --hosts hosts.txt --ops all_reduce   and all pairs of hosts

      paceline probe network --from all_reduce.txt --intra NVLink4

      paceline probe network --hosts hosts.txt --inter 8x400Gb/s  and the percentage of it
    """
    links = catalog.cluster(cluster) if cluster else None
    intra = intra or (links.intra_link if links else None)
    inter = inter or (links.inter_link if links else None)
    form = TableFormat.json if as_json else form
    if source is not None:
        refuse_unused(context, "--from", USED_BY_FROM)
        _show(read_benchmark(source, intra, inter), source, form)
        return
    request = NetworkRequest(
        where=location.where(),
        site=links,
        device=device.value,
        devices=devices,
        operations=_operations(operations),
        min_bytes=least,
        max_bytes=most,
        seconds=seconds,
        pairs=pairs,
        limit_s=time_limit,
        wait_s=wait,
        intra_link=intra,
        inter_link=inter,
    )
    outcome = measure_network(
        request, runs_root(runs_dir), lambda what: echo(f"  {what}", err=True)
    )
    for notice in outcome.notices:
        echo(f"note: {notice}", err=True)
    _show(outcome.report, outcome.folder, form)


def _show(report: NetworkReport, source: Path, form: TableFormat) -> None:
    emit(network_document(report, source), form)
    if any(row.wrong for row in report.collectives):
        raise typer.Exit(3)


def _operations(text: str) -> tuple[str, ...]:
    if text in ("all", "none"):
        return tuple(OPERATIONS) if text == "all" else ()
    names = tuple(dict.fromkeys(name.strip().replace("-", "_") for name in text.split(",")))
    if unknown := [name for name in names if name not in OPERATIONS]:
        raise UserError(
            "--ops", f"{unknown[0]!r} is not a collective", allowed=", ".join([*OPERATIONS, "all"])
        )
    return names
