"""A comparison as text for a terminal and as Markdown for a pull request."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.compare.judgement import Comparison, MetricComparison, SideSummary
from paceline.compare.phrases import signed
from paceline.core.text import printable
from paceline.core.units import counted, percent, significant
from paceline.report.figures import written
from paceline.report.markdown import md_text

MARKS = {
    "same": "✓",
    "faster": "▲",
    "better": "▲",
    "slower": "▼",
    "worse": "▼",
    "differs": "≠",
    "undecided": "?",
    "not comparable": "✕",
    "invalid": "✕",
}
MOST_CAUSES = 12
HEAD: tuple[str, ...] = (
    "metric",
    "baseline",
    "candidate",
    "change",
    "95 % interval",
    "p",
    "p corrected",
    "verdict",
)


def headline(comparison: Comparison) -> str:
    """The verdict in capitals with its sentence, on one line."""
    word = comparison.verdict.upper()
    suspicious = " (SUSPICIOUS)" if comparison.too_good else ""
    return _line(f"{MARKS[comparison.verdict]} {word}{suspicious}  {comparison.sentence}")


def summary_lines(comparison: Comparison) -> Iterator[str]:
    """Who was compared, by which figure, and how sure it is."""
    yield _line(f"baseline   {_side(comparison.baseline)}")
    yield _line(f"candidate  {_side(comparison.candidate)}")
    if comparison.ratio is not None:
        yield _line(ratio_text(comparison))
    if comparison.confidence == "low" and comparison.why_low:
        yield _line(f"low confidence: {'; '.join(comparison.why_low)}")
    if comparison.repeats_needed:
        yield _line(repeats_text(comparison))


def finding_lines(comparison: Comparison) -> Iterator[str]:
    """Settings, surroundings, warnings and notes, each on a line."""
    for difference in comparison.differences:
        key, sides = difference.key, f"{difference.baseline} against {difference.candidate}"
        allowed = "allowed to differ" if difference.allowed else f"--allow {key} accepts it"
        yield _line(f"{key}: {sides} ({allowed})")
    if comparison.too_good:
        yield _line(f"too good: {comparison.too_good}")
    yield from (_line(f"warning: {warning}") for warning in comparison.warnings)
    yield from (_line(f"note: {note}") for note in comparison.notes)
    for cause in comparison.causes[:MOST_CAUSES]:
        yield _line(f"possible cause: {cause}")
    if len(comparison.causes) > MOST_CAUSES:
        further = counted(len(comparison.causes) - MOST_CAUSES, "further change")
        yield f"{further} of surroundings in the JSON"


def ratio_text(comparison: Comparison) -> str:
    """The ratio with its direction, interval, p and margin."""
    lead = next(metric for metric in comparison.metrics if metric.metric == comparison.metric)
    worse_sides = {"lower": "above 1 is worse", "higher": "below 1 is worse"}
    worse = worse_sides.get(lead.better or "", "")
    parts = [
        f"ratio {significant(comparison.ratio or 0.0, 5)} of {lead.metric}, candidate over baseline"
        + (f" ({worse})" if worse else "")
    ]
    if comparison.low is not None and comparison.high is not None:
        parts.append(
            f"95 % interval {significant(comparison.low, 5)} to {significant(comparison.high, 5)}"
        )
    if comparison.p is not None:
        parts.append(f"p {p_text(comparison.p)}")
    margin = f"margin {percent(comparison.margin, 2)}"
    widened = f" + {percent(comparison.resolution, 2)} for rounding in print"
    parts.append(margin + (widened if comparison.resolution > 5e-6 else ""))
    return ", ".join([*parts, f"n {comparison.n_a} and {comparison.n_b}"])


def repeats_text(comparison: Comparison) -> str:
    """How many further repeats it takes, and how that is known."""
    needed = comparison.repeats_needed
    noun = "repeat" if needed == 1 else "repeats"
    whose = "" if comparison.baseline.kind == "reference" else " a side"
    return f"{needed} more {noun}{whose} ({comparison.repeats_note})"


def shown(comparison: Comparison) -> list[MetricComparison]:
    """The metrics that stand for themselves; JSON and CSV hold the others as well."""
    return [metric for metric in comparison.metrics if metric.primary or metric.follows is None]


def metric_cells(metric: MetricComparison) -> list[str]:
    """One metric as cells under HEAD."""
    interval = ""
    if metric.low is not None and metric.high is not None:
        interval = f"{signed(metric.low)} to {signed(metric.high)}"
    values = [
        "" if side.value is None else written(side.value, metric.unit)
        for side in (metric.baseline, metric.candidate)
    ]
    return [
        f"{metric.metric} *" if metric.primary else metric.metric,
        *values,
        "" if metric.ratio is None else signed(metric.ratio),
        interval,
        "" if metric.p is None else p_text(metric.p),
        "" if metric.p_corrected is None else p_text(metric.p_corrected),
        metric.verdict if metric.note is None else f"{metric.verdict}: {printable(metric.note)}",
    ]


def comparison_md(comparison: Comparison) -> str:
    """The comparison as Markdown: a heading, the sentence, the table, and what to know."""
    suspicious = ", suspicious" if comparison.too_good else ""
    lines = [
        f"### {MARKS[comparison.verdict]} {comparison.verdict}{suspicious}",
        "",
        md_text(comparison.sentence),
        "",
        *(f"- {md_text(line)}" for line in summary_lines(comparison)),
    ]
    if comparison.metrics:
        rows = [[md_text(cell) for cell in metric_cells(metric)] for metric in shown(comparison)]
        table = [list(HEAD), ["---", *["---:"] * 6, "---"], *rows]
        lines += ["", *(f"| {' | '.join(row)} |" for row in table)]
        lines += ["", r"\* the verdict depends on it"]
    findings = [f"- {md_text(line)}" for line in finding_lines(comparison)]
    return "\n".join([*lines, *(["", *findings] if findings else [])]) + "\n"


def _side(side: SideSummary) -> str:
    if side.kind == "reference":
        return f"{side.name} (published: {side.source})"
    runs = counted(len(side.runs), "run")
    return f"{side.name} ({runs})"


def p_text(value: float) -> str:
    """A p value with four decimals, or that it is smaller."""
    return "< 0.0001" if value < 1e-4 else f"{value:.4f}"


def _line(text: str) -> str:
    return " ".join(printable(text).split("\n"))
