"""Share card of a run: title, main figures, hardware, software and date as a PNG of 1200x630."""

from __future__ import annotations

import textwrap
from pathlib import Path
from xml.sax.saxutils import escape

import vl_convert

from paceline import __version__
from paceline.core.errors import SystemFaultError, UserError
from paceline.core.run_report import RunReport
from paceline.core.text import one_line
from paceline.files.temporary import replaced_file
from paceline.report.document import UNKNOWN, Document
from paceline.report.run_document import run_document
from paceline.report.theme import FONT, LIGHT

WIDTH, HEIGHT, MARGIN = 1200, 630, 64
"""Pixels; the ratio 1.91:1 is what link previews show."""
TITLE_SIZE, TITLE_LINES = 52, 3
CHARACTER_WIDTH = 0.57
"""Width of a bold character in the widest of the usual fonts, in font sizes."""
MAX_FIGURES = 4
SOFTWARE = ("torch", "cuda", "nccl", "megatron_core", "nemo", "deepspeed", "transformers", "python")
"""Versions for the card in the order of preference."""


def save_card(report: RunReport, path: Path) -> Path:
    """Write the share card of a run as a PNG of 1200x630 pixels."""
    if path.suffix.lower() != ".png":
        raise UserError(str(path), "a share card is a PNG file", remedy="name a file *.png")
    try:
        with replaced_file(path.resolve()) as file:
            file.write(vl_convert.svg_to_png(card_svg(report), scale=1))
    except OSError as error:
        raise SystemFaultError(str(path), f"cannot be written: {error.strerror}") from error
    return path


def card_svg(report: RunReport) -> str:
    """Return the share card of a run as SVG."""
    document = run_document(report)
    date = (report.result.created or "")[:10]
    elements = [
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{LIGHT.page}"/>',
        f'<rect width="{WIDTH}" height="10" fill="{LIGHT.steady}"/>',
        *_title(document.headline),
        *_figures(document),
        _text(_fit(" · ".join(document.setup[1:]), 24), MARGIN, 516, 24, LIGHT.ink),
        _text(_fit(_software(report), 22), MARGIN, 550, 22, LIGHT.muted),
        _text(f"Measured with Paceline {__version__}", MARGIN, 594, 22, LIGHT.steady, bold=True),
        _text(date, WIDTH - MARGIN, 594, 22, LIGHT.muted, anchor="end"),
    ]
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(elements)}</svg>'


def _title(title: str) -> list[str]:
    columns = int((WIDTH - 2 * MARGIN) / (CHARACTER_WIDTH * TITLE_SIZE))
    lines = textwrap.wrap(one_line(title), columns, max_lines=TITLE_LINES, placeholder=" …")
    return [
        _text(line, MARGIN, 104 + 64 * number, TITLE_SIZE, LIGHT.ink, bold=True)
        for number, line in enumerate(lines)
    ]


def _figures(document: Document) -> list[str]:
    """Return the known figures as columns of label, value and interval."""
    figures = [each for each in document.figures if each.value not in ("none", UNKNOWN)]
    column = (WIDTH - 2 * MARGIN) // MAX_FIGURES
    elements: list[str] = []
    for number, figure in enumerate(figures[:MAX_FIGURES]):
        x, value = MARGIN + number * column, one_line(figure.value)
        size = min(40, int((column - 20) / (CHARACTER_WIDTH * max(len(value), 1))))
        colour = LIGHT.danger if figure.badge else LIGHT.steady
        interval = figure.badge or figure.interval
        elements += [
            _text(_fit(figure.label, 22, column), x, 340, 22, LIGHT.muted),
            _text(value, x, 390, size, colour, bold=True),
            _text(_fit(interval, 18, column), x, 422, 18, LIGHT.muted),
        ]
    return elements


def _software(report: RunReport) -> str:
    """Return the versions of the main software: `native, torch 2.13.0, python 3.11.7`."""
    versions = report.result.versions
    names = [f"{name} {versions[name]}" for name in SOFTWARE if name in versions]
    return ", ".join(filter(None, (report.facts.engine, *names[:4])))


def _fit(text: str, size: int, width: int = WIDTH - 2 * MARGIN) -> str:
    """Return a text on one line, cut to a width in pixels."""
    return textwrap.shorten(one_line(text), max(int(width / (0.56 * size)), 8), placeholder=" …")


def _text(
    text: str, x: int, y: int, size: int, colour: str, *, bold: bool = False, anchor: str = "start"
) -> str:
    weight = "bold" if bold else "normal"
    style = f'font-family="{FONT}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x}" y="{y}" {style} fill="{colour}">{escape(text)}</text>'
