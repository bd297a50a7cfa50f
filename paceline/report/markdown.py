"""Documents and tables as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from paceline.core.text import printable
from paceline.report.document import (
    Column,
    Document,
    Figure,
    Notes,
    Preformatted,
    Row,
    Section,
    Table,
)


def markdown(document: Document) -> str:
    """Return the document as Markdown, paragraphs apart by an empty line."""
    return "\n\n".join(_blocks(document)) + "\n"


def markdown_table(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """Return a table in which no cell is markup."""
    table = Table(columns=columns, rows=rows)
    rule = ["---:" if column.justify == "right" else "---" for column in columns]
    body = [[md_text(cell) for cell in cells] for cells in table.cells()]
    return "\n".join(map(_table_line, [[column.title for column in columns], rule, *body]))


def md_text(text: str) -> str:
    """Return `text` as one line of Markdown in which nothing is markup."""
    flat = " ".join(printable(text).split())
    flat = re.sub(r"([\\`*_\[\]<>|~&$]|^#|^[-+](?=[ -]))", r"\\\1", flat)
    return re.sub(r"^([0-9]+)([.)])(?= )", r"\1\\\2", flat)


def _blocks(document: Document) -> Iterator[str]:
    setup = "".join(f" · {md_text(part)}" for part in document.setup)
    yield f"**{md_text(document.title)}**{setup}"
    if document.verdict and document.verdict.text:
        yield f"**{md_text(document.verdict.text)}**"
    if document.answer:
        yield "\n".join(f"- {md_text(sentence)}" for sentence in document.answer)
    sections = document.sections_for("markdown")
    for section in sections:
        if section.tone == "alert":
            yield from _section(section)
    if document.figures:
        yield _figures(document.figures)
    for section in sections:
        if section.tone != "alert":
            yield from _section(section)
    if document.notes:
        yield "\n".join(f"- {md_text(note)}" for note in document.notes)


def _figures(figures: Sequence[Figure]) -> str:
    rows = [
        (figure.label, figure.value, figure.interval, "; ".join(filter(None, figure.details)))
        for figure in figures
    ]
    lines = [_table_line(md_text(cell) for cell in row) for row in rows]
    return "\n".join(["| figure | value | interval | details |", "|---|---:|---|---|", *lines])


def _section(section: Section) -> Iterator[str]:
    if section.title:
        yield f"### {md_text(section.title)}"
    if isinstance(section, Table):
        yield markdown_table(section.rows, section.columns)
        if section.note:
            yield md_text(section.note)
    elif isinstance(section, Notes):
        yield "\n".join(f"- {md_text(line)}" for line in section.lines)
    elif isinstance(section, Preformatted):
        text = printable(section.text)
        fence = max(["``", *re.findall("`+", text)], key=len) + "`"
        yield f"{fence}\n{text}\n{fence}"


def _table_line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
