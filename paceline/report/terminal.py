"""Documents and tables as terminal text.

On a terminal the text is wrapped to its width, with a bold headline, a coloured verdict and dim
notes (rich obeys NO_COLOR). A pipe or a file gets the same lines without style or
wrapping.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from paceline.core.secrets import clean
from paceline.report.document import (
    Column,
    Document,
    Figure,
    Notes,
    Preformatted,
    Row,
    Section,
    Table,
    Tone,
)

STYLES: dict[Tone, str] = {"good": "bold green", "alert": "bold red", "plain": "bold"}
MIN_LAST_WIDTH = 8
"""Minimum width in characters of a table's last column on a terminal."""
INDENT = 2


def print_document(document: Document, console: Console, *, headline: bool = True) -> None:
    """Print a document; `headline` False leaves out title and setup."""
    if headline:
        _print(console, Text(_line(" · ".join((document.title, *document.setup))), "bold"), 0)
    if document.verdict and document.verdict.text:
        _print(console, Text(_line(document.verdict.text), STYLES[document.verdict.tone]))
    for sentence in document.answer:
        _print(console, Text(_line(sentence)))
    sections = document.sections_for("terminal")
    for section in sections:
        if section.tone == "alert":
            _print_section(section, console)
    if document.figures:
        console.print()
        _print_figures(document.figures, console)
    for section in sections:
        if section.tone != "alert":
            _print_section(section, console)
    if document.notes:
        console.print()
    for note in document.notes:
        _print(console, Text(_line(note), "dim"))


def plain_text(document: Document) -> str:
    """Return a document as plain text, as printed to a pipe."""
    buffer = StringIO()
    print_document(document, Console(file=buffer, force_terminal=False))
    return buffer.getvalue()


def print_table(
    rows: Sequence[Row], columns: Sequence[Column], console: Console, indent: int = 0
) -> None:
    """Print a table; on a narrow terminal, the last column is wrapped or cut.

    If even that is not enough, the terminal wraps the lines and no value is cut.
    """
    cells = Table(columns=columns, rows=rows).cells()
    lines = _clean_lines([[column.title for column in columns], *cells])
    widths = [max(map(len, cells)) + 2 for cells in zip(*lines, strict=True)]
    if not console.is_terminal or sum(widths[:-1]) + MIN_LAST_WIDTH + indent > console.width:
        _print(console, Text("\n".join(_align_columns(lines, columns))), indent, whole=True)
        return
    table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for title, column in zip(lines[0], columns, strict=True):
        table.add_column(title, justify=column.justify, no_wrap=column is not columns[-1])
    for line in lines[1:]:
        cells = zip(line, columns, strict=True)
        table.add_row(*(Text(cell, no_wrap=not c.wraps, overflow="ellipsis") for cell, c in cells))
    console.print(Padding.indent(table, indent) if indent else table)


def _print(console: Console, text: Text, indent: int = INDENT, whole: bool = False) -> None:
    """Print a text with an indent, wrapped on a terminal unless `whole`."""
    if not console.is_terminal:
        lines = text.plain.split("\n")
        console.file.write("".join(f"{' ' * indent}{line}".rstrip() + "\n" for line in lines))
    elif whole:
        for line in text.split("\n", allow_blank=True):
            console.print(Text(" " * indent) + line, soft_wrap=True, highlight=False)
    else:
        console.print(Padding.indent(text, indent), highlight=False)


def _print_section(section: Section, console: Console) -> None:
    """Print an empty line, the title and the content of a section."""
    console.print()
    if section.title:
        style = STYLES["alert"] if section.tone == "alert" else "bold"
        _print(console, Text(_line(section.title), style), 0)
    if isinstance(section, Table):
        print_table(section.rows, section.columns, console, INDENT)
        if section.note:
            _print(console, Text(_line(section.note), "dim"))
    elif isinstance(section, Notes):
        for line in section.lines:
            _print(console, Text(_line(line)))
    elif isinstance(section, Preformatted):
        _print(console, Text(clean(section.text)), whole=True)


def _print_figures(figures: Sequence[Figure], console: Console) -> None:
    """Print one line per figure: label, value, interval and details."""
    label_width = max(len(_line(figure.label)) for figure in figures)
    value_width = max(len(_line(figure.value)) for figure in figures)
    for figure in figures:
        label, value = _line(figure.label), _line(figure.value)
        line = Text.assemble(
            (f"{label:{label_width}}", "dim"), "  ", (f"{value:{value_width}}", "bold")
        )
        background = " · ".join(filter(None, (figure.interval, *figure.details)))
        if not background:
            line.rstrip()
        elif console.is_terminal:
            grid = RichTable.grid(padding=(0, 2, 0, 0))
            grid.add_column(no_wrap=True)
            grid.add_column()
            grid.add_row(line, Text(_line(background)))
            console.print(Padding.indent(grid, INDENT))
            continue
        else:
            line.append(f"  {_line(background)}")
        _print(console, line)


def _align_columns(lines: list[list[str]], columns: Sequence[Column]) -> list[str]:
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column.justify == "right" else cell.ljust(width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        ).rstrip()
        for line in lines
    ]


def _line(text: str) -> str:
    """Return a text on one line, without control characters."""
    return " ".join(clean(text).splitlines())


def _clean_lines(lines: list[list[str]]) -> list[list[str]]:
    """Return the cells without control characters; one call checks most tables as a whole."""
    together = "\n".join(cell for line in lines for cell in line)
    if clean(together) == together and together.count("\n") < sum(map(len, lines)):
        return lines
    return [[_line(cell) for cell in line] for line in lines]
