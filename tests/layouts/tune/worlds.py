"""Made-up machines whose step times are known: what a search of layouts can be compared with."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from paceline.core.layout import Layout
from paceline.estimate.estimates import estimates_of_layouts
from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.model.case import Floats
from paceline.estimate.model.coefficients import coefficient_values
from paceline.estimate.model.step import step_time
from paceline.estimate.request import EstimateRequest
from paceline.files.recipe import load_recipe
from paceline.layouts.search.residuals import features
from paceline.layouts.search.space import SearchSpace, feasible_layouts
from paceline.layouts.tune.candidates import Candidates
from paceline.layouts.tune.search import (
    Budget,
    Learner,
    Search,
    TrialOutcome,
    resume_search,
    start_search,
)
from paceline.machines.placement import Request

SPACE = SearchSpace(
    micro_batches=(1, 2, 4), recompute=("none", "full"), schedules=("1f1b", "zero-bubble")
)


def made_up(layouts: list[Layout] | None = None, *, blind: bool = False) -> Candidates:
    """The layouts of an 8B model on eight H100s; `blind` has no time model."""
    question = EstimateRequest("llama31-8b", "H100", 8)
    spec, machine = question.spec_of_any_layout, question.machine
    if layouts is None:
        layouts, _ = feasible_layouts(spec.model, 8, spec.training.global_batch, 8192, SPACE)
    estimates = estimates_of_layouts(spec, machine, shipped_evidence(), layouts)
    return Candidates(
        request=Request("llama31-8b"),
        recipe=load_recipe("llama31-8b"),
        spec=spec,
        evidence=shipped_evidence(),
        layouts=tuple(layouts),
        recipe_row=None,
        x=None if blind else estimates.x,
        seconds=np.ones(len(layouts)) if blind else estimates.step_time_s,
        memory_bytes=estimates.memory.device_used,
        p_oom=np.zeros(len(layouts)),
        limit_bytes=np.full(len(layouts), np.inf),
        num_infeasible=0,
        num_beyond=0,
        notices=(),
    )


@dataclass
class World:
    """A machine on which every layout has a true time; runs scatter around it."""

    candidates: Candidates
    seed: int
    noise: float = 0.01
    wrong: float = 0.05
    """Deviation of the error's slope along every axis."""
    runs_out: frozenset[int] = frozenset()
    ran: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)
        z = features(self.candidates.layouts)
        slopes = self._random.normal(0, self.wrong, z.shape[1])
        evidence = shipped_evidence().fit()
        moved = self._random.multivariate_normal(evidence.centre, evidence.covariance)
        x = self.candidates.x
        physics = step_time(x, coefficient_values(moved)).total if x else np.ones(len(z))
        self.truth: Floats = physics * np.exp(z @ slopes)

    def measure(self, row: int) -> TrialOutcome:
        """One run."""
        self.ran.append(row)
        if row in self.runs_out:
            return TrialOutcome("oom", None, 10.0, "out of memory")
        seconds = self.truth[row] * np.exp(self._random.normal(0, self.noise))
        return TrialOutcome("ok", float(seconds), 10.0)

    def searched(self, runs: int) -> Search:
        """A search of `runs` runs."""
        search = start_search(self.candidates, Learner(self.candidates))
        resume_search(search, self.measure, Budget(runs=runs))
        return search

    def regret(self, row: int | None) -> float:
        """How much slower a layout is than the best."""
        assert row is not None
        return float(self.truth[row] / self.truth.min()) - 1
