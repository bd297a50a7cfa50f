"""The HTML report of one run: a single file that opens without a network."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any
from urllib.parse import quote

import altair as alt
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from paceline.core.result import RankSummary, ReferenceComparison
from paceline.core.run_report import RunReport
from paceline.core.text import one_line, printable
from paceline.report.cards import cards
from paceline.report.charts import run_charts
from paceline.report.document import Document, Preformatted, Table, Verdict
from paceline.report.figures import half_width, label, plus_minus, throughput, written
from paceline.report.head import PageHead, Tone, card
from paceline.report.page import (
    advice,
    chip_label,
    describe_rule,
    describe_setup,
    describe_time,
    describe_window,
    progress,
)
from paceline.report.tables import interval_kinds, written_rows
from paceline.report.theme import DARK, LIGHT, ON_PAGE, WHOSE, css_variables
from paceline.report.vega import vega_bundle

MOST_RANK_ROWS = 64
FIGURE_START = "0123456789+-\N{MINUS SIGN}±<"
LONGEST_FIGURE, LONGEST_SHORT, LONGEST_NAME = 32, 20, 40
"""Characters of a cell that stays on one line."""


@dataclass(frozen=True)
class EmbeddedChart:
    """One chart with its heading and notes as text of the page."""

    name: str
    title: str
    whose: str
    """The recipe, device or run that it shows; empty where the page is of nothing else."""
    notes: tuple[str, ...]
    spec: Markup


def render_html(report: RunReport) -> str:
    """The whole page as text; every name, log line and script in it is escaped."""
    return render_page(
        "run.html.j2",
        _head(report),
        run_charts(report, ON_PAGE),
        **_outcome(report),
        **_raw(report),
        rows=written_rows(report.result),
        interval_kinds=interval_kinds(report.result),
        ranks=_rank_rows(report.result.ranks),
        ranks_left_out=max(0, len(report.result.ranks) - MOST_RANK_ROWS),
        references=[_reference_row(ref) for ref in report.result.references],
    )


def render_page(
    template: str, head: PageHead, charts: Mapping[str, alt.LayerChart], **content: Any
) -> str:
    """A page that loads nothing: the answer at its head, its template, its charts for the page."""
    figures = [_embedded_chart(name, chart) for name, chart in charts.items()]
    bundle = vega_bundle() if figures else ""
    script = _template_text("page.js")
    return (
        _environment()
        .get_template(template)
        .render(
            **content,
            head=head,
            policy=_policy(bundle, script),
            style=Markup(_template_text("page.css")),
            light=Markup(css_variables(LIGHT)),
            dark=Markup(css_variables(DARK)),
            bundle=Markup(bundle),
            script=Markup(script),
            figures={figure.name: figure for figure in figures},
        )
    )


def render_document(document: Document) -> str:
    """Return the page of a document; every text in it is escaped."""
    verdict = document.verdict or Verdict("")
    head = PageHead(
        eyebrow=document.kind,
        name=one_line(document.title),
        chip=verdict.text,
        tone=verdict.tone,
        setup=document.setup,
        sentences=document.answer,
        cards=tuple(
            card(figure.label, figure.value, figure.interval, figure.details)
            for figure in document.figures
        ),
        title=one_line(document.window_title or document.title),
    )
    charts = document.charts(ON_PAGE) if document.charts else {}
    sections = document.sections_for("page")
    return render_page(
        "document.html.j2",
        head,
        charts,
        alerts=[section for section in sections if section.tone == "alert"],
        sections=[each for each in sections if each.tone != "alert" and each.shown != "folded"],
        folds=[section for section in sections if section.shown == "folded"],
        notes=document.notes,
    )


def _head(report: RunReport) -> PageHead:
    """Name, setup, verdict and the four figures."""
    result = report.result
    created = describe_time(result.created)
    sentence = result.verdict.sentence if result.status == "ok" else ""
    return PageHead(
        eyebrow=f"one run, {created}" if created else "one run",
        name=result.recipe,
        chip=chip_label(result),
        tone=_tone(report),
        setup=tuple(describe_setup(report)[1:]),
        sentences=(sentence,) if sentence else (),
        cards=tuple(cards(report)),
        title=result.run,
    )


def _outcome(report: RunReport) -> dict[str, Any]:
    """What happened, and how far to believe it."""
    result = report.result
    few = result.status == "ok" and throughput(result) is None
    return {
        "run": result.run,
        "sentence": result.verdict.sentence,
        "failed": result.status != "ok",
        "reason": result.reason or "",
        "advice": advice(report),
        "progress": progress(result),
        "log_tail": "\n".join(result.log_tail),
        "warnings": result.warnings,
        "how_sure": _interval_text(report),
        "expected": report.expected,
        "no_figure": f"No figure: {describe_window(result)}." if few else "",
    }


def _raw(report: RunReport) -> dict[str, Any]:
    """What lies in the folds at the page's end."""
    spec = report.spec
    return {
        "folder": report.folder,
        "files": [(name, quote(name)) for name in report.files],
        "command": report.command,
        "job_script": report.job_script,
        "stacks": list(report.stacks.items())[:MOST_RANK_ROWS],
        "spec": json.dumps(spec.model_dump(mode="json"), indent=2) if spec else "",
        "versions": report.result.versions,
        "conventions": report.result.conventions,
        "inventory": dict(flattened(report.inventory)),
    }


def flattened(content: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Nested values as dotted path and text; a list of plain values becomes one line."""
    if isinstance(content, dict) and content:
        for key, value in content.items():
            yield from flattened(value, f"{path}.{key}" if path else str(key))
    elif isinstance(content, list) and any(isinstance(item, dict | list) for item in content):
        for number, item in enumerate(content):
            yield from flattened(item, f"{path}.{number}")
    elif isinstance(content, list):
        yield path, ", ".join(str(item) for item in content) or "none"
    elif path:
        none = content is None or content == {}
        yield path, "none" if none else _plain(path, content)


def _plain(path: str, value: Any) -> str:
    """A single value; a name that ends in _bytes gives the unit."""
    if path.endswith("_bytes") and isinstance(value, int | float):
        return written(value, "bytes")
    return str(value)


def _tone(report: RunReport) -> Tone:
    """The chip's colour: good, alert or plain."""
    result = report.result
    if result.status in ("queued", "running"):
        return "plain"
    if result.status != "ok" or result.verdict.kind in ("slower", "invalid"):
        return "alert"
    return "good" if result.verdict.kind == "pass" else "plain"


def _interval_text(report: RunReport) -> str:
    """From which steps the figures come and what their interval covers."""
    result = report.result
    if result.window is None or result.window.n == 0:
        return ""
    basis = f"{describe_window(result).capitalize()}: {describe_rule(report)}."
    headline = throughput(result)
    if headline is None or half_width(headline[1]) is None:
        return f"{basis} Too few steps for an interval."
    metric = headline[1]
    return (
        f"{basis} {plus_minus(metric)}: {printable(metric.interval or '95 %')}. It covers the "
        "scatter of this run's steps, not the change from one run to the next; repeats show that."
    )


def _rank_rows(ranks: Sequence[RankSummary]) -> list[list[str]]:
    """The table's rows; a rank is named with its pipeline stage when there are several."""
    staged = len({rank.stage for rank in ranks}) > 1
    return [
        _rank_row(rank, f"{rank.rank}, stage p{rank.stage}" if staged else f"{rank.rank}")
        for rank in ranks[:MOST_RANK_ROWS]
    ]


def _rank_row(rank: RankSummary, name: str) -> list[str]:
    times = (rank.step_time_s, rank.busy_time_s, rank.comm_wait_s, rank.data_wait_s)
    memory = ", ".join(f"{written(v, 'bytes')} {kind}" for kind, v in rank.memory_bytes.items())
    cells = ["unknown" if t is None else written(t, "s") for t in times]
    cores = "unknown" if rank.cores is None else f"{rank.cores}{' bound' if rank.bound else ''}"
    return [name, printable(rank.host), *cells, memory or "unknown", printable(cores)]


def _reference_row(row: ReferenceComparison) -> list[str]:
    ratio = "none" if row.ratio is None else f"{row.ratio:.3f}"
    judged = "yes" if row.comparable else f"no: {row.why_not or 'no reason given'}"
    cells = (
        row.reference,
        label(row.metric),
        written(row.reference_value, row.unit),
        ratio,
        judged,
        row.source,
    )
    return [printable(cell) for cell in cells]


def _embedded_chart(name: str, chart: alt.LayerChart) -> EmbeddedChart:
    """The chart with its title taken out: the page sets and wraps that itself."""
    spec = chart.to_dict()
    title = spec.pop("title")
    text, _, whose = title["text"].partition(WHOSE)
    notes = tuple(title["subtitle"])
    return EmbeddedChart(name, text, whose, notes, json_for_script(spec))


def column_kinds(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A class a column: figures stand right, they and short words on one line, others wrap.

    The first column names the row and stands left whatever it holds.
    """
    columns = list(zip(*rows, strict=True)) or [()] * len(heads)
    kinds = [_kind([cell for cell in cells if cell]) for cells in columns]
    names = max((len(cells[0]) for cells in rows), default=0)
    return ["short" if names <= LONGEST_NAME else "words", *kinds[1:]]


def _kind(cells: Sequence[str]) -> str:
    longest = max(map(len, cells), default=0)
    if longest <= LONGEST_FIGURE and all(cell == "-" or cell[0] in FIGURE_START for cell in cells):
        return "figure"
    return "short" if longest <= LONGEST_SHORT else "words"


def json_for_script(content: Any) -> Markup:
    """JSON that no HTML parser can take for markup."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _policy(*scripts: str) -> str:
    """A content policy: nothing is loaded, and only these very scripts run."""
    hashes = (hashlib.sha256(script.encode()).digest() for script in scripts if script)
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("paceline.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters["unbroken"] = unbroken
    environment.globals["column_kinds"] = column_kinds
    environment.tests["table"] = lambda section: isinstance(section, Table)
    environment.tests["preformatted"] = lambda section: isinstance(section, Preformatted)
    return environment


def unbroken(text: str) -> str:
    """`text` in which a number keeps its unit, and a sign its number, on one line."""
    return re.sub(r"(?<=±) (?=\d)|(?<=\d) (?=[%A-Za-z])", "\N{NO-BREAK SPACE}", text)


def _shown(value: Any) -> Any:
    """Strings without control characters, except what the page made itself."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _template_text(name: str) -> str:
    return (resources.files("paceline.report") / "templates" / name).read_text(encoding="utf-8")
