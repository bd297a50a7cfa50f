"""`paceline recipes devices`: list the hardware catalog."""

from __future__ import annotations

from typing import Annotated, Any, get_args

import typer

from paceline.cli.options import Json
from paceline.cli.output import (
    TableForm,
    TableFormat,
    WhereOption,
    emit_table,
    refuse_where,
    select_rows,
)
from paceline.cli.terminal import echo
from paceline.core.hardware import Device, Dtype, Link
from paceline.core.units import GIB
from paceline.files import catalog
from paceline.files.catalog import find_device
from paceline.report.document import Column

_FOR_PEOPLE = (TableFormat.text, TableFormat.md)


def devices(
    name: Annotated[
        str | None, typer.Argument(help="Device or link to show, e.g. H100 or 'NVIDIA H200'.")
    ] = None,
    links: Annotated[
        bool, typer.Option("--links", help="List interconnects instead of devices.")
    ] = False,
    where: WhereOption = None,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
) -> None:
    """List the hardware that Paceline knows, with the source of every figure.

    MFU is relative to these peaks. They are dense: vendors also print figures with 2:4 sparsity,
    which are twice as high and not reached in training. A data type without a figure is one that
    the vendor does not state.

    Names are matched loosely: h100-sxm, "NVIDIA H100 80GB HBM3" and H100-SXM5-80GB are one device.
    A name without the variant, like H100, takes the first device of its family and prints a note.

    Examples:

      paceline recipes devices                   all devices

      paceline recipes devices H100              one device, with the source of every figure

      paceline recipes devices --links           interconnects, per device and direction

      paceline recipes devices --where vendor=AMD --format csv
    """
    form = TableFormat.json if as_json else form
    if links:
        _show_links(name, where, form)
    elif name is None:
        _list_devices(where, form)
    else:
        refuse_where(where, name)
        _show_device(name, form)


def _list_devices(where: list[str] | None, form: TableFormat) -> None:
    dtypes: tuple[Dtype, ...] = get_args(Dtype)
    devices_by_name = {device.name: device for device in catalog.devices()}
    rows = select_rows([_summary(device, dtypes) for device in devices_by_name.values()], where)
    columns = [
        Column("name", "device"),
        *(Column(f"{dtype}_flops_per_s", dtype, _tera, "right") for dtype in dtypes),
        Column("memory_bytes", "GiB", _gib, "right"),
        Column("memory_bytes_per_s", "TB/s", _tera, "right"),
        Column("source", "source", lambda source: source.partition(":")[0]),
    ]
    if form in _FOR_PEOPLE:
        echo("Dense peak TFLOP/s by data type, memory in GiB, memory bandwidth in TB/s\n")
    document = [devices_by_name[row["name"]].model_dump(mode="json") for row in rows]
    emit_table(rows, columns, form, document=document)


def _summary(device: Device, dtypes: tuple[Dtype, ...]) -> dict[str, Any]:
    fields = {"name", "vendor", "family", "memory_bytes", "memory_bytes_per_s", "power_w"}
    peaks = {f"{dtype}_flops_per_s": device.peak_flops_per_s(dtype) for dtype in dtypes}
    main = device.peaks.get("bf16") or device.peaks.get("fp16")
    return {**device.model_dump(include=fields), **peaks, "source": main.source if main else None}


def _show_device(name: str, form: TableFormat) -> None:
    match = find_device(name)
    device = match.device
    if match.note:
        echo(f"note: {match.note}", err=True)
    if form in _FOR_PEOPLE:
        echo(f"{device.name} (vendor: {device.vendor}, family: {device.family})\n")
    document = {**device.model_dump(mode="json"), "exact": match.exact, "match_note": match.note}
    figures = _figures(device)
    if figures or form not in _FOR_PEOPLE:
        emit_table(figures, _figure_columns(form), form, document=document)
    if form in _FOR_PEOPLE:
        names = f"\nAlso known as: {', '.join(device.aliases)}" if device.aliases else None
        echo("\n".join(filter(None, (names, device.note))))


def _figures(device: Device) -> list[dict[str, Any]]:
    """Return one row per figure: value in base units, value to show, and source."""
    memory, sheet = device.memory_source, "as the peaks, unless the note says otherwise"
    figures = [
        (f"peak {dtype}", peak.flops_per_s, "FLOP/s", _tera, "TFLOP/s", peak.source)
        for dtype, peak in device.peaks.items()
    ] + [
        ("memory", device.memory_bytes, "B", _gib, "GiB", memory),
        ("memory bandwidth", device.memory_bytes_per_s, "B/s", _tera, "TB/s", memory),
        ("driver context", device.context_bytes, "B", _gib, "GiB", "measured, see the note"),
        ("power limit", device.power_w, "W", _number, "W", sheet),
    ]
    return [
        {
            "figure": figure,
            "value": value,
            "unit": unit,
            "source": source,
            "shown": f"{scale(value)} {shown_unit}",
        }
        for figure, value, unit, scale, shown_unit, source in figures
        if value is not None
    ]


def _figure_columns(form: TableFormat) -> list[Column]:
    value = [Column("shown", "value", justify="right")]
    if form is TableFormat.csv:
        value = [Column("value", "value"), Column("unit", "unit")]
    return [Column("figure", "figure"), *value, Column("source", "source", wraps=True)]


def _show_links(name: str | None, where: list[str] | None, form: TableFormat) -> None:
    if name is None:
        selected_links: tuple[Link, ...] = catalog.links()
    else:
        match = catalog.find_link(name)
        if match.note:
            echo(f"note: {match.note}", err=True)
        selected_links = (match.link,) if match.link else ()
    columns = [
        Column("name", "link"),
        Column("kind", "between", {"intra": "devices of a node", "inter": "nodes"}.__getitem__),
        Column("bytes_per_s", "GB/s", _giga, "right"),
        Column("source", "source", wraps=True),
    ]
    rows = select_rows(
        [link.model_dump(mode="json") for link in selected_links], where, tuple(Link.model_fields)
    )
    if form in _FOR_PEOPLE:
        echo("Nominal bandwidth of one device in one direction\n")
    emit_table(rows, columns, form)


def _tera(value: float) -> str:
    return _number(value / 1e12)


def _giga(value: float) -> str:
    return _number(value / 1e9)


def _gib(value: float) -> str:
    return f"{value / GIB:.1f}"


def _number(value: float) -> str:
    """Format with up to three decimals, without trailing zeros: `989.5`, `2250`, `15.754`."""
    return f"{value:.3f}".rstrip("0").rstrip(".")
