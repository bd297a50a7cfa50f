"""Documents of a layout ranking and of a layout search."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.core.units import GIB, gib, pluralize, step_seconds
from paceline.estimate.memory.device_memory import UNLIKELY
from paceline.layouts.tune.ranking import RankedLayout, Ranking
from paceline.layouts.tune.result import TuneResult, TuneRow
from paceline.report.document import Column, Document, Row, Table, Verdict

RANKING_COLUMNS = (
    Column("label", "layout"),
    Column("micro_batch", "micro-batch", justify="right"),
    Column("recompute", "recompute"),
    Column("step_time_s", "step s", step_seconds, "right"),
    Column("low_s", "low", step_seconds, "right"),
    Column("high_s", "high", step_seconds, "right"),
    Column("memory_bytes", "memory GiB", lambda value: f"{value / GIB:.1f}", "right"),
    Column("p_oom", "P(OOM)", "{:.0%}".format, "right"),
    Column("memory", "memory"),
)
TUNING_COLUMNS = (
    Column("number", "", justify="right"),
    Column("label", "layout"),
    Column("step_time_s", "s/iteration", step_seconds, "right"),
    Column("num_runs", "runs", justify="right"),
    Column("tokens_per_s", "tokens/s", "{:,.0f}".format, "right"),
    Column("before_s", "expected initially", step_seconds, "right"),
    Column("expected_s", "before its run", step_seconds, "right"),
    Column("after_s", "at the end", step_seconds, "right"),
    Column("notes", "notes", wraps=True),
)


def ranking_document(ranking: Ranking) -> Document:
    """Return all layouts by estimate, with the counts of those that cannot run or do not fit."""
    recipe_layout = ranking.recipe_layout
    notes = [
        f"{pluralize(ranking.n_layouts, 'layout')} estimated, {ranking.n_infeasible:,} cannot run, "
        f"{ranking.n_pruned:,} {ranking.bound}."
    ]
    if recipe_layout is not None:
        seconds = step_seconds(recipe_layout.step_time_s)
        words = f"{recipe_layout.label}: {seconds} s, memory: {recipe_layout.memory}"
    else:
        words = f"cannot run: {ranking.recipe_problem}"
    notes += [f"The recipe's own layout: {words}.", f"Calibration: {ranking.evidence}."]
    best, verdict = ranking.layouts[0], None
    if best.memory == "borderline":
        text = "no layout fits safely: the first ones may run out of memory"
        verdict = Verdict(text, "alert")
    elif not best.fits:
        least = gib(ranking.least_memory_bytes)
        text = f"no layout fits: the smallest needs {least} per device; use more or larger devices"
        verdict = Verdict(text, "alert")
    return Document(
        kind="layouts ranked by estimate",
        title=f"{ranking.recipe} on {ranking.devices:,} x {ranking.device}",
        verdict=verdict,
        sections=(
            Table(columns=RANKING_COLUMNS, rows=[_ranking_row(row) for row in ranking.layouts]),
            *_borderline_sections(ranking),
        ),
        notes=tuple(notes),
        data=ranking,
    )


def _borderline_sections(ranking: Ranking) -> Iterator[Table]:
    if ranking.borderline:
        yield Table(
            title="Faster, but may run out of memory",
            name="borderline",
            columns=RANKING_COLUMNS,
            rows=[_ranking_row(row) for row in ranking.borderline],
            note=f"Their risk of running out of memory is {UNLIKELY:.0%} or more. "
            "Measure one before you rely on it.",
        )


def tuning_document(result: TuneResult) -> Document:
    """Return the layouts that were tried, and what was learned."""
    notes: list[str] = []
    if result.recipe_file:
        notes.append(f"recipe of the best layout: {result.recipe_file}")
    if result.resume_command:
        notes.append(f"resume with: {result.resume_command}")
    return Document(
        kind="layouts tuned",
        title=f"{result.recipe} on {result.devices:,} x {result.device}",
        answer=result.sentences,
        sections=(Table(columns=TUNING_COLUMNS, rows=[_tuning_row(row) for row in result.rows]),),
        notes=tuple(notes),
        data=result,
    )


def _ranking_row(row: RankedLayout) -> Row:
    layout = row.layout
    return {
        **row.model_dump(exclude={"layout"}, mode="json"),
        "micro_batch": layout.micro_batch,
        "recompute": layout.recomputation,
    }


def _tuning_row(row: TuneRow) -> Row:
    """Return a row in base units, with its notes."""
    remarks = ["best"] if row.best else ["tied with the best"] if row.tied_with_best else []
    remarks += ["the recipe's own"] if row.own else []
    why = [] if row.status == "ok" else [": ".join(filter(None, (row.status, row.reason)))]
    return {
        **row.model_dump(include={"number", "label", "step_time_s", "num_runs", "tokens_per_s"}),
        "before_s": row.before.step_time_s,
        "expected_s": row.expected.step_time_s,
        "after_s": row.after.step_time_s,
        "notes": ", ".join([*why, *remarks]),
    }
