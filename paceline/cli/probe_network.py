"""`paceline probe network`: collectives among all devices, and every pair of hosts."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from paceline.cli import host_options as place
from paceline.cli import model_options as model
from paceline.cli.options import Device, DeviceKind, Json, RunsDir
from paceline.cli.output import OutputColumn, TableForm, TableFormat, emit_table
from paceline.cli.terminal import echo
from paceline.core.errors import UserError
from paceline.core.units import binary, percent, si
from paceline.files import catalog
from paceline.files.run_folder import runs_root
from paceline.scaling.network.measurement import (
    PAGE_FILE,
    MeasuredNetwork,
    NetworkRequest,
    measure_network,
)
from paceline.scaling.network.readings import OPERATIONS

SMALLEST, LARGEST = 4, 2**34


def network(
    device: Device = DeviceKind.auto,
    devices: place.DevicesOfEach = None,
    operations: Annotated[
        str, typer.Option("--ops", help=f"Comma list of {', '.join(OPERATIONS)}; all, none.")
    ] = "all",
    least: Annotated[
        int, typer.Option("--min-bytes", min=SMALLEST, max=LARGEST, help="Smallest payload.")
    ] = 1024,
    most: Annotated[
        int | None,
        typer.Option(
            "--max-bytes",
            min=SMALLEST,
            max=LARGEST,
            help="Largest payload and message; default 16 MiB, 256 MiB on GPUs.",
        ),
    ] = None,
    pairs: Annotated[
        bool,
        typer.Option("--pairs/--no-pairs", help="Latency and rate between all pairs of hosts."),
    ] = True,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=3600, help="For all collectives together.")
    ] = 10.0,
    limit: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="End the measurements after this.")
    ] = 600.0,
    wait: place.Wait = 600.0,
    cluster: Annotated[
        str | None,
        typer.Option(help="A cluster of the catalog, or a YAML file: its links, expected here."),
    ] = None,
    intra: model.Intra = None,
    inter: model.Inter = None,
    runs_dir: RunsDir = None,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
    *,
    location: place.HostOptions,
) -> None:
    """Measure every collective among all devices, and latency and rate between all hosts.

    Payload and bus rates are those of nccl-tests, and results are checked. All devices of a host
    send at once, so that a slow one shows. A page with log-log charts and maps of all pairs, and
    the JSON, lie under runs/networks. Beside it stands what the stated links carry.

    Examples:

      paceline probe network                                      devices of this machine

      paceline probe network --hosts hosts.txt --ops all_reduce   and all pairs of hosts

      paceline probe network --allocation 4711 --max-bytes 1073741824

      paceline probe network --hosts hosts.txt --inter 8x400Gb/s  and the share of it
    """
    placement = location.where()
    links = catalog.cluster(cluster) if cluster else None
    request = NetworkRequest(
        placement,
        device.value,
        devices,
        _operations(operations),
        least,
        most,
        seconds,
        pairs,
        limit,
        wait,
        intra or (links.intra_link if links else None),
        inter or (links.inter_link if links else None),
    )
    outcome = measure_network(
        request, runs_root(runs_dir), lambda what: echo(f"  {what}", err=True)
    )
    _show(outcome, TableFormat.json if as_json else form)
    if any(row.wrong for row in outcome.report.collectives):
        raise typer.Exit(3)


def _operations(text: str) -> tuple[str, ...]:
    if text in ("all", "none"):
        return tuple(OPERATIONS) if text == "all" else ()
    names = tuple(dict.fromkeys(name.strip().replace("-", "_") for name in text.split(",")))
    if unknown := [name for name in names if name not in OPERATIONS]:
        raise UserError(
            "--ops", f"{unknown[0]!r} is no collective", allowed=", ".join([*OPERATIONS, "all"])
        )
    return names


def _show(outcome: MeasuredNetwork, form: TableFormat) -> None:
    report = outcome.report
    for notice in outcome.notices:
        echo(f"note: {notice}", err=True)
    document = {**report.model_dump(mode="json"), "folder": str(outcome.folder)}
    rows = [row.model_dump(mode="json") for row in report.collectives]
    pairs = [pair.model_dump(mode="json") for pair in report.pairs]
    if rows or not pairs:
        emit_table(rows, _collective_columns(), form, document=document)
    else:
        emit_table(pairs, _pair_columns(), form, document=document)
    if form is TableFormat.text:
        echo()
        for line in (*report.sentences, *(f"failed: {fault}" for fault in report.faults)):
            echo(f"  {line}")
        echo(f"  {outcome.folder / PAGE_FILE}")


def _collective_columns() -> list[OutputColumn]:
    return [
        OutputColumn("operation", "operation", lambda value: OPERATIONS[value]),
        OutputColumn("bytes", "payload", binary, "right"),
        _time("latency_s", "time"),
        _time("slowest_s", "slowest rank"),
        _rate("bytes_per_s", "payload rate"),
        _rate("bus_bytes_per_s", "bus rate"),
        OutputColumn("n", "n", str, "right"),
        OutputColumn("spread", "spread", percent, "right"),
        OutputColumn("wrong", "wrong", str, "right"),
    ]


def _pair_columns() -> list[OutputColumn]:
    return [
        OutputColumn("source", "from"),
        OutputColumn("target", "to"),
        _time("latency_s", "one way"),
        _rate("bytes_per_s", "rate"),
        OutputColumn("n", "n", str, "right"),
    ]


def _time(key: str, title: str) -> OutputColumn:
    def shown(value: Any) -> str:
        return f"{1e6 * value:,.1f} us"

    return OutputColumn(key, title, shown, "right")


def _rate(key: str, title: str) -> OutputColumn:
    return OutputColumn(key, title, lambda value: si(value, "B/s"), "right")
