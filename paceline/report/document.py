"""The output model: what a feature answers, built once and rendered for every medium.

A feature has one function that turns its result into a `Document`; renderers turn that into
terminal text (`report/terminal.py`), Markdown (`report/markdown.py`), CSV (`report/csv_table.py`)
and a page (`report/html.py`); JSON is `data` as it is. A verb hands the document to
`cli.output.emit(document, form, page=..., charts=...)` and prints nothing of the answer itself.
A sentence, a figure or a column is therefore worded in one place. Build it like this:

    def history_document(history: History) -> Document:
        return Document(
            kind="runs over time",
            title=history.recipe,
            setup=(history.metric, counted(history.n_runs, "run")),
            verdict=Verdict("1 change", "alert"),
            answer=("2.1 % slower since 2026-01-12: 0.2000 s before, 0.2042 s after.",),
            figures=(
                Figure("Now", written(level, "s"), "", ("level of the newest series",)),
                Figure("Scatter", percent(noise), "from run to run"),
                unknown_figure("Last change", "too few runs"),
            ),
            sections=(
                Table(
                    title="Series",
                    columns=(Column("name", "series"), Column("n_runs", "runs", justify="right")),
                    rows=[{"name": "2 x cpu", "n_runs": 14}],
                    note="Runs of one series ran the same on the same kind of machine.",
                ),
                Preformatted(title="2 x cpu", text="▁▁▂▆▇", shown="text"),
            ),
            notes=("8 runs failed and are left out",),
            charts=lambda theme: history_charts(history, theme),
            data=history,
            csv=Table(columns=..., rows=...),
        )

Rules. Texts are plain: no markup, no escapes, no control characters of your own; each renderer
escapes what it prints. Values are written with their unit by `report/figures.written` or
`core/units`. A page shows at most four figures in a row, so order them by importance. `None` in a
table shows as `-`, and as an empty field in CSV. `Column.format` serves text, Markdown and page;
CSV gets the raw value. A section's `shown` says which media have it; a "folded" one is a fold on
the page and is left out elsewhere. Sections with the tone "alert" come before the figures.

This module imports nothing but the standard library: charts are built only when a page or a chart
folder is asked for, so a verb's text needs neither altair nor jinja2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from altair import LayerChart

    from paceline.report.theme import ChartTheme

Tone = Literal["good", "alert", "plain"]
"""The colour of a verdict or a section."""
Shown = Literal["everywhere", "text", "long", "page", "folded"]
"""Media that show a section: "text" are terminal and Markdown, "long" all but a terminal, "folded"
is a fold on the page."""
Medium = Literal["terminal", "markdown", "page"]
Row = Mapping[str, Any]
UNKNOWN = "not known"
"""Value of a figure that could not be determined; its details give the reason."""


@dataclass(frozen=True)
class Verdict:
    """The judgement in a few words, with its colour."""

    text: str
    tone: Tone = "plain"


@dataclass(frozen=True)
class Figure:
    """One important value: written with its unit, with its uncertainty and its background."""

    label: str
    value: str
    interval: str = ""
    """The interval and its kind, else the spread, else empty."""
    details: tuple[str, ...] = ()
    """Where it comes from, one short fact a line."""


@dataclass(frozen=True)
class Column:
    """One column of a table: the row's key, its title, and how people see a value."""

    key: str
    title: str
    format: Callable[[Any], str] = str
    justify: Literal["left", "right"] = "left"
    wraps: bool = False
    """Whether the last column, on a narrow terminal, takes more lines or is cut."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a document with a heading."""

    title: str = ""
    name: str = ""
    """Id of the section on the page."""
    shown: Shown = "everywhere"
    tone: Tone = "plain"


@dataclass(frozen=True, kw_only=True)
class Table(Section):
    """Rows under columns."""

    columns: Sequence[Column]
    rows: Sequence[Row]
    note: str = ""
    hint_key: str = ""
    """Key of an explanation of the row that a page shows under the first cell."""

    def cells(self) -> list[list[str]]:
        """Return every row as text, `-` for None."""
        return [
            [
                "-" if (value := row.get(column.key)) is None else column.format(value)
                for column in self.columns
            ]
            for row in self.rows
        ]


@dataclass(frozen=True, kw_only=True)
class Notes(Section):
    """Sentences, one a line."""

    lines: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Preformatted(Section):
    """Text whose line breaks and spaces count: a log's end, a script, a sparkline."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Links(Section):
    """Files beside a page, by their relative paths."""

    paths: Sequence[str]


HIDDEN: dict[Medium, tuple[Shown, ...]] = {
    "terminal": ("long", "page", "folded"),
    "markdown": ("page", "folded"),
    "page": ("text",),
}


@dataclass(frozen=True)
class Document:
    """One answer of a verb, independent of the medium."""

    kind: str
    """What it is a report of, in a few words: "one run", "runs over time"."""
    title: str
    verdict: Verdict | None = None
    setup: tuple[str, ...] = ()
    answer: tuple[str, ...] = ()
    """The answer in sentences."""
    figures: tuple[Figure, ...] = ()
    sections: tuple[Section, ...] = ()
    notes: tuple[str, ...] = ()
    """Reservations and provenance, last in every medium."""
    charts: Callable[[ChartTheme], Mapping[str, LayerChart]] | None = None
    """Builds the charts by name, for the page or for export."""
    data: Any = None
    """What JSON prints: a value with `model_dump_json`, or plain lists and dicts."""
    csv: Table | None = None
    """The table that CSV prints, by default the first one among the sections."""
    window_title: str = field(default="", kw_only=True)
    """Title of the browser's window, by default the title."""

    def sections_for(self, medium: Medium) -> list[Section]:
        """Return the sections with content that a medium shows."""
        hidden = HIDDEN[medium]
        return [each for each in self.sections if each.shown not in hidden and not is_empty(each)]

    def csv_table(self) -> Table | None:
        """Return the table that CSV prints, None if the document has no table."""
        tables = (section for section in self.sections if isinstance(section, Table))
        return self.csv or next(tables, None)


def is_empty(section: Section) -> bool:
    """Return whether a section has nothing to show."""
    contents = ("rows", "lines", "text", "paths")
    return not any(getattr(section, name, None) for name in contents)


def unknown_figure(label: str, reason: str, details: Iterable[str] = ()) -> Figure:
    """Return a figure without a value, and why there is none."""
    return Figure(label, UNKNOWN, "", (reason, *details))
