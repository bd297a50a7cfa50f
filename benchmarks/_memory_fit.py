"""Moving the frameworks' constants by published memories, each stack by its own rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from math import log
from typing import Any

import numpy as np

from benchmarks._step_fit import equal_weights
from paceline.estimate.memory.device_memory import memory
from paceline.estimate.memory.framework import PRIORS, Framework
from paceline.estimate.model.case import Floats, cases_of
from paceline.estimate.validation import PublishedMemory, memory_as_reported

SCALE = 0.07
"""Standard deviation of the logarithm that good formulas still miss of a published memory."""
FITTED = (
    "activation_scale", "logits", "fixed", "per_parameter", "per_shard", "fragmentation",
)  # fmt: skip
"""Constants that are fitted to published memory figures if their prior is not 0."""
SPREADS: Mapping[str, float] = {
    "activation_scale": 0.08, "logits": 0.30, "fixed": 0.70, "per_parameter": 0.70,
    "per_shard": 0.70, "fragmentation": 0.50,
}  # fmt: skip
"""Standard deviation of each prior's logarithm."""
EVIDENCE_PER_SOURCE = 12.0
"""Number of independent rows that a source counts as."""


def fit_memory(
    rows: Sequence[PublishedMemory], priors: Mapping[str, Framework] = PRIORS
) -> dict[str, Framework]:
    """Constants by stack, moved from their priors by published rows, where the stack has any.

    How far they miss a new source is another question: `held_out_sd`.

    Minimises the sum of soft_l1(log(estimated / stated) / 0.07) over a stack's rows, and of
    -2 log P that what ran fits and what ran out does not, every source with the weight of 12 rows,
    plus the squared distance from the priors.
    """
    stacks = {row.case.implementation for row in rows if row.reported_bytes}
    return {
        stack: _fit_stack([row for row in rows if row.case.implementation == stack], prior)
        if stack in stacks
        else prior
        for stack, prior in priors.items()
    }


def leave_one_source_out(
    rows: Sequence[PublishedMemory], priors: Mapping[str, Framework] = PRIORS
) -> list[Mapping[str, Framework]]:
    """For each row the constants of a fit that never saw the row's source."""
    sources = sorted({row.source for row in rows})
    fits = {
        source: fit_memory([row for row in rows if row.source != source], priors)
        for source in sources
    }
    return [fits[row.source] for row in rows]


def held_out_sd(rows: Sequence[PublishedMemory]) -> float:
    """Deviation of ln(estimated / stated) in sources that the fit never saw.

    Root of the mean square, every source with the same weight. What the fitted rows themselves are
    missed by is about half of it, and would make a table outside the fit look more certain than
    it is.
    """
    stated_rows = [i for i, row in enumerate(rows) if row.reported_bytes]
    fits = leave_one_source_out(rows)
    errors = [
        log(memory_as_reported([rows[i]], fits[i])[0] / (rows[i].reported_bytes or 1))
        for i in stated_rows
    ]
    weights = equal_weights([rows[i].source for i in stated_rows])
    return float(np.sqrt(np.average(np.square(errors), weights=weights)))


def _fit_stack(rows: list[PublishedMemory], prior: Framework) -> Framework:
    weight = np.sqrt(EVIDENCE_PER_SOURCE * equal_weights([row.source for row in rows]))
    x, stated_bytes = (
        cases_of([row.case for row in rows]),
        np.array([row.reported_bytes for row in rows], float),
    )
    limit = np.array([row.device_bytes for row in rows])
    ran = np.isfinite(stated_bytes)
    names = [name for name in FITTED if getattr(prior, name) > 0]
    centre = np.log([getattr(prior, name) for name in names])
    width = np.array([SPREADS[name] for name in names])
    log_ndtr: Any = import_module("scipy.special").log_ndtr

    def errors(framework: Framework) -> Floats:
        return np.where(
            ran, np.log(memory_as_reported(rows, framework) / np.where(ran, stated_bytes, 1)), 0.0
        )

    def residuals(logs: Floats) -> Floats:
        framework = _with_offsets(prior, names, logs)
        over = np.log(memory(x, framework).needed_bytes / limit) / SCALE
        witness = np.sqrt(-2 * log_ndtr(np.where(ran, -over, over)))
        misfit = np.concatenate(
            [_soft(errors(framework) / SCALE) * weight, _soft(witness) * weight]
        )
        return np.concatenate([misfit, (logs - centre) / width])

    least_squares: Any = import_module("scipy.optimize").least_squares
    offsets = np.asarray(least_squares(residuals, centre).x, dtype=float)
    return _with_offsets(prior, names, offsets)


def _soft(error: Floats) -> Floats:
    return np.sign(error) * np.sqrt(2 * (np.sqrt(1 + error**2) - 1))


def _with_offsets(prior: Framework, names: Sequence[str], logs: Floats) -> Framework:
    return replace(prior, **dict(zip(names, np.exp(logs).tolist(), strict=True)))
