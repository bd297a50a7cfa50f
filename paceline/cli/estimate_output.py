"""Where estimates go: printed in a form, or on a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.cli.estimate_text import flat, text, trace_lines
from paceline.cli.output import Column, TableFormat, emit_table

if TYPE_CHECKING:
    from paceline.estimating import Estimate
    from paceline.tracing import Tracing


Ratio = tuple[float, float, float]


def emit(
    found: list[Estimate],
    ratios: list[Ratio],
    tracings: list[Tracing],
    form: TableFormat,
) -> None:
    """Print the estimates, and beside them what was compared and followed."""
    rows = [flat(one) for one in found]
    if form is TableFormat.json:
        documents = [one.model_dump(mode="json") for one in found]
        for document, one, step in zip(documents[1:], found[1:], ratios, strict=True):
            document |= {
                f"{name}_ratio": dict(zip(("value", "low", "high"), ratio, strict=True))
                for name, ratio in _against(found[0], one, step).items()
            }
        for document, tracing in zip(documents, tracings, strict=False):
            document["trace"] = tracing.model_dump(mode="json")
        emit_table(rows, [], form, document={"offers": documents} if ratios else documents[0])
        return
    if form is not TableFormat.text:
        emit_table(rows, [Column(key, key) for key in rows[0]], form)
        return
    for at, one in enumerate(found):
        typer.echo(text(one))
        typer.echo(
            "\n".join(
                f"  {line}" for tracing in tracings[at : at + 1] for line in trace_lines(tracing)
            )
        )
    for one, step in zip(found[1:], ratios, strict=True):
        typer.echo(_beside_line(found[0], one, step))


def _against(first: Estimate, one: Estimate, step: Ratio) -> dict[str, Ratio]:
    """What an offer is of the first, each (value, low, high): step time, tokens/s, and money if known.

    The step times' interval is that of all: offers may differ in their batch, which is no estimate.
    """
    value, low, high = step
    ratios = {"step_time": step}
    rate = one.tokens_per_s / first.tokens_per_s
    ratios["tokens_per_s"] = (rate, rate * value / high, rate * value / low)
    money = first.bill.cost if first.bill else None, one.bill.cost if one.bill else None
    if money[0] and money[1] is not None:
        cost = money[1] / money[0]
        ratios["cost"] = (cost, cost * low / value, cost * high / value)
    return ratios


def _beside_line(first: Estimate, one: Estimate, step: Ratio) -> str:
    """The ratios in a sentence; says so where a step is of another batch."""
    told = {
        name: f"{value:.2f} ({low:.2f}-{high:.2f})"
        for name, (value, low, high) in _against(first, one, step).items()
    }
    batches = [round(offer.samples_per_s * offer.step_time_s) for offer in (first, one)]
    other = f" with {batches[1] / batches[0]:.3g} of the batch" if batches[0] != batches[1] else ""
    money = f", money {told['cost']}" if "cost" in told else ""
    return (
        f"{one.devices} x {one.device} against {first.devices} x {first.device}: tokens/s "
        f"{told['tokens_per_s']}, step time {told['step_time']}{other}{money}"
    )


def write_page(found: list[Estimate], path: Path) -> None:
    """The page of one estimate or several offers; raises SystemFaultError where it cannot be written."""
    from paceline.errors import SystemFaultError
    from paceline.report.estimate_page import estimate_html
    from paceline.rundir import write_text

    setup = list(dict.fromkeys(f"{one.devices} x {one.device} · {one.dtype}" for one in found))
    offers = [(f"{one.devices} x {one.device}, {one.layout}", one.waterfall) for one in found]
    notes = [line.strip() for one in found for line in text(one).splitlines()]
    try:
        write_text(path, estimate_html(found[0].recipe, setup, offers, notes))
    except OSError as error:
        raise SystemFaultError(str(path), f"cannot be written: {error.strerror}") from error
    typer.echo(f"page: {path}", err=True)
