"""Document of a sweep: the best layout, a table in the style of layout studies, two charts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.core.flops import with_recompute
from paceline.core.layout import AXIS_FIELDS
from paceline.core.units import GIB, TERA, gib, percent, si, significant
from paceline.layouts.sweep.result import SweepResult, SweepRow, probability_text
from paceline.report.document import (
    Column,
    Document,
    Figure,
    Notes,
    Row,
    Table,
    Verdict,
    unknown_figure,
)

if TYPE_CHECKING:
    from altair import LayerChart

    from paceline.report.theme import ChartTheme

NO_SPEED = "x"
"""Shown in place of a speed that a run did not reach."""
STATUSES_WITHOUT_SPEED = ("oom", "nan", "timeout", "failed", "incomplete")
"""Statuses of runs that were started and have no speed."""
STATUS_WORDS = {"oom": "OOM", "nan": "NaN"}
MAX_REASON = 80
"""Characters of an error's text that a table shows."""
ALWAYS_SHOWN = ("layout.tp", "layout.pp", "layout.micro_batch", "layout.recompute")
"""Fields that every table has a column for, whether they vary or not."""
FIGURES = ("Throughput of the best", "Step time of the best", "Memory of the best")


def _plain(row: SweepRow, key: str) -> Any:
    """Return the value of a column that is a field of the row or of its layout."""
    return getattr(row, key) if hasattr(row, key) else getattr(row.layout, key)


def _expected(name: str) -> Callable[[SweepRow], Any]:
    return lambda row: row.prediction and getattr(row.prediction, name)


def _gibibytes(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f}"


def _number(value: Any) -> str:
    return value if isinstance(value, str) else significant(value, 3)


def _tera(value: Any) -> str:
    return value if isinstance(value, str) else significant(value / TERA, 3)


class SweepColumn(NamedTuple):
    """One column: its key in CSV, its title for people (none: CSV alone), format and value."""

    key: str
    title: str = ""
    format: Callable[[Any], str] = str
    value: Callable[[SweepRow], Any] | None = None
    """None takes the field of that name of the row or of its layout."""


SWEEP_COLUMNS = (
    SweepColumn("status"),
    SweepColumn("reason"),
    SweepColumn("best"),
    SweepColumn("p_best"),
    SweepColumn("tied_with_best"),
    SweepColumn("pareto"),
    SweepColumn("key"),
    SweepColumn("nodes", "nodes"),
    SweepColumn("devices"),
    *(SweepColumn(axis, axis.upper() if axis in ("tp", "pp") else "") for axis in AXIS_FIELDS),
    SweepColumn("dp", "DP"),
    SweepColumn("zero_stage"),
    SweepColumn("micro_batch", "MBS"),
    SweepColumn("recompute", "recompute"),
    SweepColumn("global_batch"),
    SweepColumn("seq_len"),
    SweepColumn("step_time_s", "s/iteration", _number),
    SweepColumn("low_s"),
    SweepColumn("high_s"),
    SweepColumn("spread"),
    SweepColumn("n"),
    SweepColumn("samples_per_s"),
    SweepColumn("tokens_per_s", "tokens/s", "{:,.0f}".format),
    SweepColumn("model_flops_per_s_per_device"),
    SweepColumn("hardware_flops_per_s_per_device", "TFLOP/s", _tera),
    SweepColumn("mfu"),
    SweepColumn("memory_bytes", "memory GiB", _gibibytes),
    SweepColumn("memory_kind"),
    SweepColumn("predicted_s", "predicted s", _number, _expected("step_time_s")),
    SweepColumn("predicted_low_s", value=_expected("low_s")),
    SweepColumn("predicted_high_s", value=_expected("high_s")),
    SweepColumn("prediction_error", "error", lambda error: f"{100 * error:+.1f}%"),
    SweepColumn("predicted_memory_bytes", "predicted GiB", _gibibytes, _expected("memory_bytes")),
    SweepColumn("p_oom", "P(OOM)", "{:.0%}".format, _expected("p_oom")),
    SweepColumn("predicted_memory", value=_expected("memory")),
    SweepColumn("runs", value=lambda row: " ".join(row.runs)),
)
"""All columns in CSV order; other varied settings come first there."""
CSV_KEYS = tuple(column.key for column in SWEEP_COLUMNS)
PREDICTION_COLUMNS = ("predicted_s", "prediction_error", "predicted_memory_bytes", "p_oom")
"""Columns shown if there are predictions."""


def sweep_document(result: SweepResult) -> Document:
    """Return a sweep for every medium."""
    dimension_texts = [f"{name}: {', '.join(values)}" for name, values in result.dimensions.items()]
    rows = [_row(row) for row in result.rows]
    unfinished_reason = result.halt_reason or ("interrupted" if result.interrupted else "")
    others = [name for name in result.dimensions if name.rpartition(".")[2] not in CSV_KEYS]
    return Document(
        kind="layouts compared",
        title=result.name,
        headline=": ".join((result.recipe, *result.sentences[:1])),
        verdict=_verdict(result),
        setup=(result.recipe, *dimension_texts),
        answer=result.sentences,
        figures=_figures(result),
        sections=(
            Notes(
                title="Unfinished",
                name="unfinished",
                media="page",
                tone="alert",
                lines=[f"Incomplete: {unfinished_reason}"] if unfinished_reason else [],
            ),
            Table(
                title="Layouts, in the order in which they run",
                name="layouts",
                columns=shown_columns(result),
                rows=[_display_row(row) for row in rows],
                note=table_note(result),
            ),
        ),
        charts=lambda theme: _charts(result, theme),
        data=result,
        csv=Table(columns=[Column(key, key) for key in (*others, *CSV_KEYS)], rows=rows),
    )


def _is_planned(result: SweepResult) -> bool:
    """Return whether nothing has run yet, as with `--dry-run`."""
    statuses = {row.status for row in result.rows}
    return "waiting" in statuses and statuses <= {"waiting", "refused", "pruned"}


def _verdict(result: SweepResult) -> Verdict:
    if result.best:
        return Verdict(f"best: {result.best.label}", "good")
    if _is_planned(result):
        return Verdict("nothing has run yet")
    return Verdict("no layout has a speed", "alert")


def shown_columns(result: SweepResult) -> list[Column]:
    """Return the columns for people: published studies', varied settings, predictions if any."""
    predicted = any(row.prediction for row in result.rows)
    columns: list[Column] = []
    for key, title, format_value, _ in SWEEP_COLUMNS:
        if not title or (key in PREDICTION_COLUMNS and not predicted):
            continue
        columns.append(Column(key, title, format_value, "left" if key == "recompute" else "right"))
        if key == "recompute":
            varied_fields = [field for field in result.dimensions if field not in ALWAYS_SHOWN]
            columns += [Column(f, f.rpartition(".")[2], justify="right") for f in varied_fields]
    return [*columns, Column("notes", "notes", wraps=True)]


def _row(row: SweepRow) -> Row:
    """Return a combination in base units; other varied settings are keyed by their field."""
    values = {
        column.key: column.value(row) if column.value else _plain(row, column.key)
        for column in SWEEP_COLUMNS
    }
    return {**values, **row.settings, "notes": notes(row)}


def _display_row(row: Row) -> Row:
    """Return the row with an x where a run ended without a speed."""
    if row["status"] not in STATUSES_WITHOUT_SPEED:
        return row
    return {**row, "step_time_s": NO_SPEED, "hardware_flops_per_s_per_device": NO_SPEED}


def notes(row: SweepRow) -> str:
    """Return in words why a row has no figure, or what sets it apart."""
    if row.status != "ok":
        words = [STATUS_WORDS.get(row.status, row.status), *_borderline(row)]
        # The full error text is in the JSON output; refusals are shown in full.
        short = row.status in ("refused", "pruned") or len(row.reason or "") <= MAX_REASON
        reason = row.reason if short else f"{(row.reason or '')[:MAX_REASON]}..."
        return ": ".join(filter(None, (", ".join(words), reason)))
    marks = ["best"] if row.best else ["tied with the best"] if row.tied_with_best else []
    if marks and row.p_best is not None:
        marks = [f"{marks[0]} ({probability_text(row.p_best)})"]
    marks += ["on the Pareto front"] if row.pareto else []
    return ", ".join([*marks, *_borderline(row)])


def _borderline(row: SweepRow) -> list[str]:
    """Return what the prediction says of the memory of a row that has not shown it."""
    if row.prediction is None or row.status in ("oom", "pruned"):
        return []
    if row.status == "waiting" and row.prediction.memory == "out of memory":
        return ["probably out of memory"]
    return ["memory borderline"] if row.prediction.memory == "borderline" else []


def table_note(result: SweepResult) -> str:
    """Return how FLOPs are counted and of what the memory is; "" where everything was refused."""
    if result.flops_convention is None:
        return ""
    flops_note = (
        f"TFLOP/s per device, including recomputation ({with_recompute(result.flops_convention)}). "
        "Layouts are ranked by tokens/s."
    )
    stack = f" Predictions assume {result.stack}." if result.stack else ""
    return f"{flops_note}{stack} {memory_note(result)}".strip()


def memory_note(result: SweepResult) -> str:
    """Return of what the memory is, as the rows say it."""
    kinds = dict.fromkeys(row.memory_kind for row in result.rows if row.memory_kind)
    words = {
        "device_used": "in use on the device",
        "reserved": "reserved by the allocator",
        "resident": "resident set of the process",
    }
    peaks = " or ".join(words.get(kind, kind) for kind in kinds)
    return f"Memory: peak {peaks}, largest rank." if peaks else ""


def _figures(result: SweepResult) -> tuple[Figure, ...]:
    """Return speed, step time and memory of the best layout, and what became of all of them."""
    best = result.best
    if _is_planned(result):
        return (_count_figure(result),)
    if best is None:
        why = "no layout has a speed; see the table for the reasons"
        return (*(unknown_figure(label, why) for label in FIGURES), _count_figure(result))
    return (
        _speed_figure(result, best),
        _step_figure(best),
        _memory_figure(result, best),
        _count_figure(result),
    )


def _speed_figure(result: SweepResult, best: SweepRow) -> Figure:
    rates = [row.tokens_per_s for row in result.rows if row.ok and row.tokens_per_s]
    hardware = best.hardware_flops_per_s_per_device
    details = [best.label]
    if hardware:
        details.append(f"{si(hardware, 'FLOP/s')} per device ({result.flops_convention})")
    if len(rates) > 1:
        gain = percent((best.tokens_per_s or 0.0) / min(rates) - 1)
        details.append(f"{gain} faster than the slowest of {len(rates)}")
    if best.p_best is not None:
        details.append(f"the fastest with {probability_text(best.p_best)}")
    details.append(f"tied with it: {sum(row.tied_with_best for row in result.rows)}")
    return Figure(FIGURES[0], f"{best.tokens_per_s:,.0f} tokens/s", "", tuple(details))


def _step_figure(best: SweepRow) -> Figure:
    if best.step_time_s is None:
        return unknown_figure(FIGURES[1], "no step has a time")
    interval = "no interval: too few steps"
    if best.low_s is not None and best.high_s is not None:
        interval = f"{significant(best.low_s, 4)} to {significant(best.high_s, 4)} s (95%)"
    details: list[str] = []
    if best.n is not None:
        details.append(f"median of {best.n:,} {'steps' if len(best.runs) < 2 else 'runs'}")
    if best.spread is not None:
        details.append(f"spread {percent(best.spread)}")
    if expected := best.prediction:
        low, high = significant(expected.low_s, 3), significant(expected.high_s, 3)
        seconds = significant(expected.step_time_s, 3)
        details.append(f"{seconds} s predicted ({low} to {high} s, 80%)")
    return Figure(FIGURES[1], f"{significant(best.step_time_s, 4)} s", interval, tuple(details))


def _memory_figure(result: SweepResult, best: SweepRow) -> Figure:
    if best.memory_bytes is None:
        return unknown_figure(FIGURES[2], "no rank reported its memory")
    peaks = [row.memory_bytes for row in result.rows if row.ok and row.memory_bytes is not None]
    details = [f"{(best.memory_kind or '').replace('_', ' ')} peak of the rank that uses most"]
    if len(peaks) > 1:
        details.append(f"{gib(min(peaks))} to {gib(max(peaks))} over the layouts")
    return Figure(FIGURES[2], gib(best.memory_bytes), "", tuple(details))


def _count_figure(result: SweepResult) -> Figure:
    measured = sum(row.ok for row in result.rows)
    counts = Counter(STATUS_WORDS.get(row.status, row.status) for row in result.rows if not row.ok)
    others = [f"{number:,} {status}" for status, number in counts.most_common()]
    runs = f"{result.repeats} runs each" if result.repeats > 1 else "one run each"
    value = f"{measured:,} of {len(result.rows):,}"
    return Figure("Layouts measured", value, "", (runs, *others))


def _charts(result: SweepResult, theme: ChartTheme) -> Mapping[str, LayerChart]:
    from paceline.layouts.sweep.charts import sweep_charts  # Altair takes long to import.

    return sweep_charts(result, memory_note(result), theme)
