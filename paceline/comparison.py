"""A run beside the published rows of its recipe: which are comparable, and by what ratio."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from paceline import references
from paceline.core.facts import Facts
from paceline.core.layout import Layout
from paceline.core.result import Metric, ReferenceComparison
from paceline.errors import UserError
from paceline.recipe import load_recipe


def compare_with_references(
    facts: Facts, names: Sequence[str], metrics: Mapping[str, Metric]
) -> tuple[ReferenceComparison, ...]:
    """This run beside each published row of its recipe among `names`, comparable rows first.

    Reference names that are not known (any more) give no rows.
    """
    rows: list[references.Row] = []
    for name in names:
        with contextlib.suppress(UserError):
            rows += references.named(name)
    timed = [row for row in rows if row.recipe == facts.recipe and row.step_time_s is not None]
    found = [_compare(facts, row, metrics) for row in timed]
    return tuple(sorted(found, key=lambda c: not c.comparable))


def _compare(
    facts: Facts, row: references.Row, metrics: Mapping[str, Metric]
) -> ReferenceComparison:
    by_samples = "samples_per_s" in row.printed
    name, unit = ("samples_per_s", "samples/s") if by_samples else ("tokens_per_s", "tokens/s")
    published = (row.samples_per_s if by_samples else row.tokens_per_s) or 0.0
    averaged = row.window == "as printed"
    ours = _at_step(metrics, name, averaged)
    why_not = _difference(facts, row)
    comparable = why_not is None and ours is not None and published > 0
    return ReferenceComparison(
        reference=row.id,
        source=row.source,
        metric=name,
        reference_value=published,
        unit=unit,
        ratio=ours / published if comparable and ours else None,
        statistic="mean" if averaged else "median",
        comparable=comparable,
        why_not=why_not,
    )


def _at_step(metrics: Mapping[str, Metric], rate: str, averaged: bool) -> float | None:
    """A rate at the median step, or at the mean step for a source that prints an average."""
    value = metrics[rate].value if rate in metrics else None
    if value is None or not averaged:
        return value
    tax = metrics["jitter_tax"].value if "jitter_tax" in metrics else None
    return None if tax is None else value / (1 + tax)


def _difference(facts: Facts, row: references.Row) -> str | None:
    """The first setting in which the run and the published row differ, as a phrase."""
    recipe = load_recipe(row.recipe)
    if (facts.model, facts.lora) != (recipe.model, recipe.lora):
        return f"the model is not the one of {row.recipe}"
    pairs: dict[str, tuple[object, object]] = {
        "device": (facts.device, row.device),
        "devices": (facts.num_devices, row.num_devices),
        "dtype": (facts.dtype, row.dtype),
        "sequence length": (facts.seq_len, row.seq_len),
        "global batch": (facts.global_batch, row.global_batch),
    }
    layout = facts.layout or Layout()
    axes = ("tp", "pp", "cp", "vp", "micro_batch", "zero_stage", "recompute", "sequence_parallel")
    pairs |= {
        name.replace("_", " "): (getattr(layout, name), getattr(row.layout, name)) for name in axes
    }
    for name, (ours, theirs) in pairs.items():
        if ours != theirs:
            return f"{name} {ours} here, {theirs} there"
    return None
