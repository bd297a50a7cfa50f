"""What is expected of every layout after each trial: the time model refitted, and its errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.estimate.fit.evidence import Evidence
from paceline.estimate.fit.interval import slopes
from paceline.estimate.fit.posterior import predict
from paceline.estimate.fit.refit import prior_of, refit
from paceline.estimate.model.case import Cases, Floats
from paceline.layouts.search.features import features
from paceline.layouts.search.residuals import Belief, LayoutPrior, believe
from paceline.layouts.tune.candidates import Candidates

TITLE = "step times of this tuning"
GROWTH = 1.3
"""Runs over those of the last refit from which coefficients are refitted."""


@dataclass
class Learner:
    """Turns the runs so far into a belief about all layouts."""

    candidates: Candidates
    refitted: Evidence | None = None
    """The coefficients after the last runs; None before any, and without a time model."""
    _refitted_rows: int = 0
    _features: Floats = field(init=False)
    _root: Floats = field(init=False)
    """A square root of the covariance that the coefficients have before any run."""

    def __post_init__(self) -> None:
        self._features = features(self.candidates.layouts)
        values, vectors = np.linalg.eigh(prior_of(self.candidates.evidence).covariance)
        self._root = vectors * np.sqrt(np.maximum(values, 0.0))

    def belief(self, measured: Mapping[int, Sequence[float]]) -> Belief:
        """The belief after these runs, by the row of their layout."""
        pairs = [(row, seconds) for row, runs in measured.items() for seconds in runs]
        rows, seconds = [row for row, _ in pairs], np.array([s for _, s in pairs], dtype=float)
        return believe(self._prior(rows, seconds), rows, np.log(seconds))

    def _prior(self, rows: list[int], seconds: Floats) -> LayoutPrior:
        """The time model as a straight line through where its coefficients now are.

        Around the refitted coefficients r, ln t = ln t(r) + J (c - r) with J the slopes of ln t:
        its mean takes the coefficients c from before any run, so that runs count once.
        """
        x, size = self.candidates.x, len(self.candidates.layouts)
        if x is None:
            middle = float(np.log(seconds).mean()) if len(seconds) else 0.0
            return LayoutPrior(self._features, np.full(size, middle), np.zeros((size, 1)))
        before = prior_of(self.candidates.evidence).centre
        now = self._centre(x, rows, seconds) if rows else before
        slope = slopes(x, now)
        log_predicted = np.log(predict(x, now)) + slope @ (before - now)
        return LayoutPrior(self._features, log_predicted, slope @ self._root)

    def _centre(self, x: Cases, rows: list[int], seconds: Floats) -> Floats:
        """Coefficients refitted to these runs, or to most: the straight line brings the rest."""
        if self.refitted is None or len(rows) >= GROWTH * self._refitted_rows:
            self.refitted = refit(self.candidates.evidence, x.pick(np.array(rows)), seconds, TITLE)
            self._refitted_rows = len(rows)
        return self.refitted.fit().centre
