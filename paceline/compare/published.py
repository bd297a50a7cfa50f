"""Comparison of a run with published rows: which are comparable, and the ratio."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache

from paceline.compare.comparability import ComparabilityReport, compare_settings
from paceline.compare.sides import ComparedRun, ComparisonSide, metric_value
from paceline.core.errors import UserError
from paceline.core.flops import CONVENTIONS, model_flops_per_token, without_recompute
from paceline.core.printed import read_printed
from paceline.core.result import (
    AS_PRINTED,
    Metric,
    ReferenceComparison,
    WindowRecord,
    finite_value,
)
from paceline.core.run import RunSettings
from paceline.files import references
from paceline.files.recipe import Recipe, load_recipe
from paceline.files.references import Row

SPEEDS = ("samples_per_s", "step_time_s", "tokens_per_s", "tokens_per_s_per_device")
"""Cells that may give a row's step time, in order of preference."""


def compare_with_references(
    facts: RunSettings, names: Sequence[str], metrics: Mapping[str, Metric]
) -> tuple[ReferenceComparison, ...]:
    """Compare a run with each published row of its recipe in `names`, comparable rows first.

    Unknown (or removed) reference names yield no rows.
    """
    rows: list[Row] = []
    for name in names:
        with contextlib.suppress(UserError):
            rows += references.find_rows(name)
    run = ComparedRun("this run", "ok", facts, metrics)
    comparisons = [
        _compare(run, row) for row in rows_with_step_time(rows) if row.recipe == facts.recipe
    ]
    return tuple(sorted(comparisons, key=lambda c: not c.comparable))


def nearest_row(rows: Sequence[Row], facts: Sequence[RunSettings], allowed: Collection[str]) -> Row:
    """Return the row with the fewest differences that are not allowed, then the fewest overall.

    `rows` must not be empty, and each must have a step time.
    """

    def distance(row: Row) -> tuple[int, int]:
        keys = row_comparability(row, facts, allowed).keys
        return len([key for key in keys if key not in allowed]), len(keys)

    return min(rows, key=distance)


def row_comparability(
    row: Row, facts: Sequence[RunSettings], allowed: Collection[str] = ()
) -> ComparabilityReport:
    """Compare the settings of runs with those that the row's source states."""
    return compare_settings([row_facts(row)], facts, allowed=allowed, published=True)


def rows_with_step_time(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with a step time and a known model, without rows of several experts."""
    return [row for row in rows if row.step_time_s is not None and row.experts_per_token is None]


def published_side(row: Row) -> ComparisonSide:
    """Return a published row, which must have a step time, as one side of a comparison."""
    member = ComparedRun(
        row.id,
        "ok",
        row_facts(row),
        _row_metrics(row),
        window=_row_window(row),
    )
    source = f"{row.source}, {row.where}"
    return ComparisonSide(
        row.id, (member,), published=True, resolution=resolution(row), source=source
    )


def in_convention_of(row: Row, side: ComparisonSide) -> ComparisonSide:
    """Return the side with MFU and model FLOP/s in the FLOPs convention and peak of a row.

    Runs that lack a setting, and rows that count recomputation, leave them as they are.
    """
    convention = row.convention
    if convention not in CONVENTIONS:
        return side
    members = tuple(
        _recount_flops(member, convention, row.peak_flops_per_s) for member in side.members
    )
    return replace(side, members=members)


def _recount_flops(
    run: ComparedRun, convention: str, peak_flops_per_s: float | None
) -> ComparedRun:
    rate, utilization = (run.metrics.get(name) for name in ("model_flops_per_s_per_device", "mfu"))
    x, value = run.facts.flops_input, finite_value(rate)
    if rate is None or rate.convention is None or x is None or value is None:
        return run
    if x.shape.conventions and convention not in x.shape.conventions:
        return run
    x = x.with_attended_share(finite_value(run.metrics.get("attended_share")))
    ratio = model_flops_per_token(convention, x) / model_flops_per_token(rate.convention, x)
    metrics = {"model_flops_per_s_per_device": _scaled(rate, ratio, convention)}
    if utilization is not None and (share := finite_value(utilization)):
        peak_ratio = value / share / peak_flops_per_s if peak_flops_per_s else 1.0
        metrics["mfu"] = _scaled(utilization, ratio * peak_ratio, convention)
    return replace(run, metrics={**run.metrics, **metrics})


def _scaled(metric: Metric, factor: float, convention: str) -> Metric:
    scaled = {
        name: value and value * factor
        for name, value in (("value", metric.value), ("low", metric.low), ("high", metric.high))
    }
    return metric.model_copy(update={**scaled, "convention": convention})


def row_facts(row: Row) -> RunSettings:
    """Return the settings that a row's source states; the layout is None if no part is stated."""
    recipe = _recipe(row.recipe) if row.recipe else None
    return RunSettings(
        recipe=row.recipe,
        model=recipe.model if recipe else row.shape,
        lora=recipe.lora if recipe else None,
        dtype=row.dtype,
        seq_len=row.seq_len,
        global_batch=row.global_batch,
        device=row.device,
        num_devices=row.num_devices,
        devices_per_node=row.devices_per_node,
        layout=row.layout if row.layout.model_fields_set else None,
        flops_convention=row.convention and without_recompute(row.convention),
        origin="imported",
        **(
            recipe.data.model_dump(include={"packing", "loss_on"}, exclude_unset=True)
            if recipe
            else {}
        ),
    )


@cache
def _recipe(name: str) -> Recipe:
    return load_recipe(name)


def resolution(row: Row) -> float:
    """Return half the last printed digit of the cell that gives a row's step time, relative.

    `29` seconds may be anything from 28.5 to 29.5, so the result is 0.017.
    """
    for name in SPEEDS:
        printed = read_printed(row.printed.get(name, ""), row.resolution.get(name))
        if printed is not None and printed.value > 0:
            return printed.step / 2 / printed.value
    return 0.0


def _row_metrics(row: Row) -> dict[str, Metric]:
    step_time_s, tokens_per_s = row.step_time_s, row.tokens_per_s
    each = tokens_per_s / row.num_devices if tokens_per_s and row.num_devices else None
    values = {
        "step_time_s": (step_time_s, "s"),
        "step_time_mean_s": (step_time_s if _averaged(row) else None, "s"),
        "samples_per_s": (row.samples_per_s, "samples/s"),
        "tokens_per_s": (tokens_per_s, "tokens/s"),
        "padded_tokens_per_s": (tokens_per_s, "tokens/s"),
        "tokens_per_s_per_device": (each, "tokens/s/device"),
    }
    metrics = {name: Metric(value=v, unit=unit, n=1) for name, (v, unit) in values.items() if v}
    if row.convention in CONVENTIONS and (mfu := row.figure("mfu")):
        metrics["mfu"] = Metric(value=mfu, unit="fraction", n=1, convention=row.convention)
    return metrics


def _row_window(row: Row) -> WindowRecord:
    rule = AS_PRINTED if _averaged(row) else row.window
    return WindowRecord(rule=rule, first_step=None, last_step=None, n=1, n_warmup=0, state="steady")


def _averaged(row: Row) -> bool:
    """Return whether the source prints an average; sources that do not state it are assumed to."""
    return row.window == AS_PRINTED


def _compare(run: ComparedRun, row: Row) -> ReferenceComparison:
    by_samples = "samples_per_s" in row.printed
    name, unit = ("samples_per_s", "samples/s") if by_samples else ("tokens_per_s", "tokens/s")
    published = (row.samples_per_s if by_samples else row.tokens_per_s) or 0.0
    ours = metric_value(run, name, _averaged(row))
    why_not = _difference(row, run.facts)
    comparable = why_not is None and ours is not None and published > 0
    return ReferenceComparison(
        reference=row.id,
        source=row.source,
        metric=name,
        reference_value=published,
        unit=unit,
        ratio=ours / published if comparable and ours else None,
        statistic="mean" if _averaged(row) else "median",
        comparable=comparable,
        why_not=why_not,
        resolution=resolution(row),
        known_error=ComparisonSide("", (run,)).within_run_error(name),
    )


def _difference(row: Row, facts: RunSettings) -> str | None:
    """Return the first setting in which the run and the published row differ, as a phrase."""
    first = next(iter(row_comparability(row, [facts]).differences), None)
    if first is None:
        return None
    if first.key == "model" and row.recipe:
        return f"the model is not the one of {row.recipe}"
    return f"{first.key.replace('_', ' ')} {first.candidate} here, {first.baseline} there"
