"""Where estimates go: printed in a form, or on a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.cli.estimate_text import flat, text, trace_lines
from paceline.cli.output import Column, TableFormat, emit_table

if TYPE_CHECKING:
    from paceline.estimate.estimate import Estimate
    from paceline.estimate.offers import Against, Ratio
    from paceline.estimate.trace import Tracing


def emit(
    found: list[Estimate],
    beside: list[Against],
    tracings: list[Tracing],
    form: TableFormat,
) -> None:
    """Print the estimates, and beside them what was compared and followed."""
    rows = [flat(one) for one in found]
    if form is TableFormat.json:
        documents = [one.model_dump(mode="json") for one in found]
        for document, offer in zip(documents[1:], beside, strict=True):
            document |= {
                f"{name}_ratio": getattr(offer, name)._asdict()
                for name in ("step_time", "tokens_per_s", "cost")
                if getattr(offer, name) is not None
            }
        for document, tracing in zip(documents, tracings, strict=False):
            document["trace"] = tracing.model_dump(mode="json")
        emit_table(rows, [], form, document={"offers": documents} if beside else documents[0])
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
    for one, offer in zip(found[1:], beside, strict=True):
        typer.echo(_beside_line(found[0], one, offer))


def _beside_line(first: Estimate, one: Estimate, offer: Against) -> str:
    """The ratios in a sentence; says so where a step is of another batch."""
    other = f" with {offer.batch:.3g} of the batch" if offer.batch != 1 else ""
    money = f", money {_told(offer.cost)}" if offer.cost else ""
    return (
        f"{one.devices} x {one.device} against {first.devices} x {first.device}: tokens/s "
        f"{_told(offer.tokens_per_s)}, step time {_told(offer.step_time)}{other}{money}"
    )


def _told(ratio: Ratio) -> str:
    return f"{ratio.value:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def write_page(found: list[Estimate], path: Path) -> None:
    """The page of one estimate or several offers; raises SystemFaultError where it cannot be written."""
    from paceline.core.errors import SystemFaultError
    from paceline.estimate.page import estimate_html
    from paceline.files.run_folder import write_text

    setup = list(dict.fromkeys(f"{one.devices} x {one.device} · {one.dtype}" for one in found))
    offers = [(f"{one.devices} x {one.device}, {one.layout}", one.waterfall) for one in found]
    notes = [line.strip() for one in found for line in text(one).splitlines()]
    try:
        write_text(path, estimate_html(found[0].recipe, setup, offers, notes))
    except OSError as error:
        raise SystemFaultError(str(path), f"cannot be written: {error.strerror}") from error
    typer.echo(f"page: {path}", err=True)
