"""The page of a sweep."""

from __future__ import annotations

from collections import Counter
from typing import Any

from paceline.core.text import one_line, printable
from paceline.core.units import gib, percent, si, significant
from paceline.layouts.sweep.charts import sweep_charts
from paceline.layouts.sweep.result import SweepResult, SweepRow, certainty
from paceline.layouts.sweep.table import (
    STATUS_WORDS,
    SweepColumn,
    for_people,
    sweep_columns,
    sweep_rows,
    table_note,
)
from paceline.report.head import Card, PageHead, card, unknown_card
from paceline.report.html import render_page
from paceline.report.theme import ON_PAGE

MOST_ROWS = 500
LABELS = ("Throughput of the best", "Step time of the best", "Memory of the best")


def sweep_html(result: SweepResult) -> str:
    """The page of one sweep; it opens without a network, and whatever a user wrote is escaped."""
    columns = sweep_columns(result)
    listed = result.model_copy(update={"rows": result.rows[:MOST_ROWS]})
    shown = [for_people(row) for row in sweep_rows(listed)]
    rows = [[one_line(row["label"]), *(_cell(row, each) for each in columns)] for row in shown]
    return render_page(
        "sweep.html.j2",
        _head(result),
        sweep_charts(result, ON_PAGE),
        unfinished=printable(result.halted or ("broken off" if result.interrupted else "")),
        heads=["layout", *(column.title for column in columns)],
        rows=rows,
        left_out=max(0, len(result.rows) - MOST_ROWS),
        note=table_note(result),
    )


def _head(result: SweepResult) -> PageHead:
    best = result.best
    varied = [f"{name}: {', '.join(values)}" for name, values in result.dimensions.items()]
    return PageHead(
        eyebrow="layouts compared",
        name=printable(result.name),
        title=f"Sweep {printable(result.name)}",
        chip=f"best: {one_line(best.label)}" if best else "no layout has a speed",
        tone="good" if best else "alert",
        setup=tuple(one_line(part) for part in (result.recipe, *varied)),
        sentences=tuple(one_line(sentence) for sentence in result.sentences),
        cards=sweep_cards(result),
    )


def sweep_cards(result: SweepResult) -> tuple[Card, ...]:
    """Speed, step time and memory of the best layout, and what became of all of them."""
    best, layouts = result.best, _layouts_card(result)
    if best is None:
        why = "no layout has a speed; the table says why"
        return (*(unknown_card(label, why) for label in LABELS), layouts)
    return (_speed_card(result, best), _step_card(best), _memory_card(result, best), layouts)


def _speed_card(result: SweepResult, best: SweepRow) -> Card:
    rates = [row.tokens_per_s for row in result.rows if row.ok and row.tokens_per_s]
    slowest = percent((best.tokens_per_s or 0.0) / min(rates) - 1)
    hardware = best.hardware_flops_per_s_per_device
    return card(
        LABELS[0],
        f"{best.tokens_per_s:,.0f} tokens/s",
        "",
        [
            best.label,
            f"{si(hardware, 'FLOP/s')} a device ({result.flops_convention})" if hardware else None,
            f"{slowest} faster than the slowest of {len(rates)}" if len(rates) > 1 else None,
            f"the fastest with {certainty(best.p_best)}" if best.p_best is not None else None,
            f"level with it: {sum(row.level for row in result.rows)}",
        ],
    )


def _step_card(best: SweepRow) -> Card:
    if best.step_time_s is None:
        return unknown_card(LABELS[1], "no step has a time")
    interval = "no interval: too few steps"
    if best.low_s is not None and best.high_s is not None:
        interval = f"{significant(best.low_s, 4)} to {significant(best.high_s, 4)} s (95 %)"
    of = "steps" if len(best.runs) < 2 else "runs"
    spread = None if best.spread is None else f"spread {percent(best.spread)}"
    expected = best.prediction and (
        f"{significant(best.prediction.step_time_s, 3)} s predicted "
        f"({significant(best.prediction.low_s, 3)} to {significant(best.prediction.high_s, 3)} s, "
        "80 %)"
    )
    number = None if best.n is None else f"median of {best.n:,} {of}"
    return card(
        LABELS[1], f"{significant(best.step_time_s, 4)} s", interval, [number, spread, expected]
    )


def _memory_card(result: SweepResult, best: SweepRow) -> Card:
    if best.memory_bytes is None:
        return unknown_card(LABELS[2], "no rank of it said how much")
    peaks = [row.memory_bytes for row in result.rows if row.ok and row.memory_bytes is not None]
    reach = f"{gib(min(peaks))} to {gib(max(peaks))} over the layouts" if len(peaks) > 1 else None
    kind = (best.memory_kind or "").replace("_", " ")
    return card(LABELS[2], gib(best.memory_bytes), "", [f"{kind} peak of the fullest rank", reach])


def _layouts_card(result: SweepResult) -> Card:
    measured = sum(row.ok for row in result.rows)
    counts = Counter(STATUS_WORDS.get(row.status, row.status) for row in result.rows if not row.ok)
    others = [f"{number:,} {status}" for status, number in counts.most_common()]
    runs = f"{result.repeats} runs of each" if result.repeats > 1 else "one run of each"
    return card("Layouts measured", f"{measured:,} of {len(result.rows):,}", "", [runs, *others])


def _cell(row: dict[str, Any], column: SweepColumn) -> str:
    value = row.get(column.key)
    return "-" if value is None or value == "" else one_line(str(column.write(value)))
