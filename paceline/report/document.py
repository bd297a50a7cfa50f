"""The output model: the result of a feature, built once and rendered for every medium.

A feature has one function that turns its result into a `Document`. Renderers turn that into
terminal text (`report/terminal.py`), Markdown (`report/markdown.py`), CSV (`report/csv_table.py`)
and a page (`report/html.py`). JSON is `data`, unchanged. A command passes the document to
`cli.output.emit(document, form, page=..., charts=...)` and prints nothing else, so that each
sentence, figure and column is worded in one place. Build it like this:

    def history_document(history: History) -> Document:
        return Document(
            kind="runs over time",
            title=history.recipe,
            setup=(history.metric, pluralize(history.n_runs, "run")),
            verdict=Verdict("1 change", "alert"),
            answer=("2.1% slower since 2026-01-12: 0.2000 s before, 0.2042 s after.",),
            figures=(
                Figure("Now", format_value(level, "s"), "", ("level of the newest series",)),
                Figure("Variation", percent(noise), "from run to run"),
                unknown_figure("Last change", "too few runs"),
            ),
            sections=(
                Table(
                    title="Series",
                    columns=(Column("name", "series"), Column("n_runs", "runs", justify="right")),
                    rows=[{"name": "2 x cpu", "n_runs": 14}],
                    note="Runs of one series ran the same on the same kind of machine.",
                ),
                Preformatted(title="2 x cpu", text="▁▁▂▆▇", media="text"),
            ),
            notes=("8 runs failed and are left out",),
            charts=lambda theme: history_charts(history, theme),
            data=history,
            csv=Table(columns=..., rows=...),
        )

Rules:

- Texts are plain, without markup, escapes or control characters; each renderer escapes its output.
- `report/figures.format_value` and `core/units` write values with their units.
- A page shows at most four figures in a row, so order them by importance.
- `None` in a table shows as `-`, and as an empty field in CSV.
- `Column.format` applies to text, Markdown and page; CSV contains the raw value.
- A section's `media` lists where it appears; "folded" sections are collapsed on the page and left
  out elsewhere. Sections with the tone "alert" come before the figures.

This module imports only the standard library. Charts are built when a page or a chart folder is
requested, so a command's text needs neither altair nor jinja2.
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
Media = Literal["everywhere", "text", "long", "page", "folded"]
"""Media that show a section. "text": terminal and Markdown; "long": all but the terminal; "folded":
collapsed on the page."""
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
    """One important value with its unit, uncertainty and background."""

    label: str
    value: str
    interval: str = ""
    """Interval and its kind, or the spread, or empty."""
    details: tuple[str, ...] = ()
    """Background of the value, one short fact per line."""
    badge: str = ""
    """Warning in one or two words, in red."""


@dataclass(frozen=True)
class Column:
    """One column of a table: the row's key, the title, and the format of a value."""

    key: str
    title: str
    format: Callable[[Any], str] = str
    justify: Literal["left", "right"] = "left"
    wraps: bool = False
    """True to wrap the column on a narrow terminal if it is the last one; False to cut it."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a document with a heading."""

    title: str = ""
    name: str = ""
    """Id of the section on the page."""
    media: Media = "everywhere"
    tone: Tone = "plain"


@dataclass(frozen=True, kw_only=True)
class Table(Section):
    """Rows under columns."""

    columns: Sequence[Column]
    rows: Sequence[Row]
    note: str = ""
    hint_key: str = ""
    """Key of an explanation of the row, which a page shows under the first cell."""

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
    """Sentences, one per line."""

    lines: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Preformatted(Section):
    """Text with significant line breaks and spaces: the end of a log, a script, a sparkline."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Links(Section):
    """Files next to a page, by their relative paths."""

    paths: Sequence[str]


HIDDEN: dict[Medium, tuple[Media, ...]] = {
    "terminal": ("long", "page", "folded"),
    "markdown": ("page", "folded"),
    "page": ("text",),
}


@dataclass(frozen=True)
class Document:
    """The result of a command, independent of the medium."""

    kind: str
    """Subject of the report in a few words: "one run", "runs over time"."""
    title: str
    verdict: Verdict | None = None
    setup: tuple[str, ...] = ()
    answer: tuple[str, ...] = ()
    """The result in sentences."""
    figures: tuple[Figure, ...] = ()
    sections: tuple[Section, ...] = ()
    notes: tuple[str, ...] = ()
    """Caveats and provenance, last in every medium."""
    charts: Callable[[ChartTheme], Mapping[str, LayerChart]] | None = None
    """Builder of the charts by name, for the page or for export."""
    data: Any = None
    """Content of the JSON output: a value with `model_dump_json`, or plain lists and dicts."""
    csv: Table | None = None
    """Table for CSV, by default the first one among the sections."""
    headline: str = field(default="", kw_only=True)
    """Result in one line, the title of the page; by default the title."""
    source: str = field(default="", kw_only=True)
    """Run, folder or file of the report, for the footer of the page."""
    command: str = field(default="", kw_only=True)
    """Command that reproduces the result, for the footer of the page."""

    def sections_for(self, medium: Medium) -> list[Section]:
        """Return the sections with content that a medium shows."""
        hidden = HIDDEN[medium]
        return [each for each in self.sections if each.media not in hidden and not is_empty(each)]

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
