"""Statistical promises of the docs, and known exceptions."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from statistics import NormalDist

import _noise_measures as of
from _noise_measures import Cell
from _noise_runs import USUAL

NOTICED_Z = NormalDist().inv_cdf(0.8)
BISECTIONS = 40


@dataclass(frozen=True)
class Promise:
    """A share of trials that must not be passed, in every cell or in those of some kinds."""

    text: str
    cells: str
    """Name of the cells that it is checked with."""
    least: float | None = None
    most: float | None = None
    kinds: Collection[str] = ()
    """Empty is all."""
    settings: Collection[str] = ()
    is_error: bool = False
    """True for a share without a bound that is better if it is small."""

    @property
    def bound(self) -> str:
        """`at least 90%`."""
        if self.least is not None:
            return f"at least {100 * self.least:g}%"
        return "measured" if self.most is None else f"at most {100 * self.most:g}%"

    def covers(self, cell: Cell) -> bool:
        """Return whether the promise covers this cell."""
        in_kind = not self.kinds or cell.kind in self.kinds
        return (
            cell.promise == self.cells
            and in_kind
            and (not self.settings or cell.setting in self.settings)
        )

    def distance(self, cell: Cell) -> float:
        """Return how far a cell misses the bound; negative if it meets the bound."""
        if self.most is not None:
            return cell.rate - self.most
        if self.is_error:
            return cell.rate
        return (1.0 if self.least is None else self.least) - cell.rate

    def is_missed(self, cell: Cell, errors: float) -> bool:
        """Return whether a cell misses the bound by `errors` standard errors of the bound."""
        bound = self.least if self.least is not None else self.most
        if bound is None:
            return False
        return self.distance(cell) > errors * (bound * (1 - bound) / cell.n) ** 0.5

    def detectable_rate(self, n: int, errors: float) -> float | None:
        """Return the rate that `n` trials notice with 80% probability; None if only measured.

        Rates beyond it are noticed more often. Normal approximation of the binomial distribution.
        """
        error = self.most if self.most is not None else 1 - (self.least or 0.0)
        if self.most is None and self.least is None:
            return None
        limit = error + errors * (error * (1 - error) / n) ** 0.5
        low, high = error, 1.0
        for _ in range(BISECTIONS):
            rate = (low + high) / 2
            reach = NOTICED_Z * (rate * (1 - rate) / n) ** 0.5
            low, high = (rate, high) if rate - reach < limit else (low, rate)
        return high if self.most is not None else 1 - high


@dataclass(frozen=True)
class Limit:
    """Cells in which a promise cannot be kept, and the message to the user."""

    cells: str
    kinds: Collection[str]
    message: str
    settings: Collection[str] = ()
    """Parts of the setting's name; empty is all."""

    def covers(self, promise: Promise, cell: Cell) -> bool:
        """Return whether the limit covers this cell of this promise."""
        in_setting = not self.settings or any(part in cell.setting for part in self.settings)
        return promise.cells == self.cells and cell.kind in self.kinds and in_setting


FIVE = ("5 + 5 in turns",)
PROMISES: tuple[Promise, ...] = (
    Promise(
        "step time within 0.3%, inside its interval, or with a warning", of.REPORTED, least=0.9
    ),
    Promise(
        "95% interval of the step time contains the truth, or a warning", of.COVERED, least=0.9
    ),
    Promise("identical sides called slower or faster", of.FALSE_ALARM, most=0.05),
    Promise("identical single runs called slower or faster", of.SINGLE_ALARM, most=0.05),
    Promise("sides that differ by 1% called the same", of.FALSE_SAME, most=0.05),
    Promise("2% slowdown found, 5 + 5, 0.4% variation", of.POWER, 0.9, None, (USUAL,), FIVE),
    Promise("2% slowdown found, all kinds", of.POWER),
    Promise("identical called same, 5 + 5, 0.4% variation", of.SAME, 0.9, None, (USUAL,), FIVE),
    Promise("identical sides called different, sequential test", of.PAIRS_ALARM, most=0.05),
    Promise("the same, closest kinds and margins", of.PAIRS_MANY, most=0.05),
    Promise("a difference of 1% called the same, sequential test", of.PAIRS_SAME, most=0.05),
    Promise(
        "2% slowdown found, sequential test, 0.4% variation", of.PAIRS_POWER, 0.95, kinds=(USUAL,)
    ),
    Promise("2% slowdown found, sequential test, all kinds", of.PAIRS_POWER),
    Promise("final interval of sequential test has the truth", of.PAIRS_COVERED, least=0.9),
    Promise("the layout called best with 90% is the best within 0.5%", of.BEST, least=0.9),
    Promise("clusters in which a healthy node is flagged", of.FLAGGED, most=0.05),
    Promise("a node slowed by 5% is flagged", of.NAMED, 0.95, None, ("normal",)),
    Promise("a node slowed by 5 or 10% is flagged, all kinds", of.NAMED),
    Promise("a node as slow as the stated smallest fault is flagged", of.FAULT, least=0.9),
    Promise("a slow link, cable or uplink is located, three rounds", of.PLACED, least=0.9),
    Promise("a node that is slow now and then is reported", of.SEEN),
    Promise("the loss of such a node is laid on links", of.MISPLACED, is_error=True),
    Promise("interval of the straggler efficiency contains the truth", of.FACTOR, least=0.9),
    Promise("a straggler is reported although nodes do not differ", of.CLAIMED, most=0.02),
    Promise("series without a step change in which history reports one", of.STEP_ALARM, most=0.05),
    Promise("history finds 2% after 5 + 5 runs", of.STEP_POWER, 0.95, None, (USUAL,)),
    Promise("history finds 2% after 5 + 5 runs, all kinds", of.STEP_POWER),
)

LIMITS: tuple[Limit, ...] = (
    Limit(
        of.COVERED,
        ("random spikes", "periodic spikes"),
        "Spikes raise the median by a few hundredths of a percent, which is more than the width "
        "of the interval of a long run. The mean step time shows that there are spikes.",
    ),
    Limit(
        of.FLAGGED,
        ("10% of measurements disturbed",),
        "Two bad measurements look like independent evidence. The report lists the groups that "
        "confirm the finding. Three repeats avoid it.",
        (" 1 x", "together"),
    ),
    Limit(
        of.FAULT,
        ("two deliveries", "lottery of chips", "switch groups"),
        "The stated fault assumes normally distributed nodes. For several kinds of nodes it is too "
        "small. A node that is reported is slow all the same.",
    ),
    Limit(
        of.FAULT,
        ("2% of measurements disturbed", "10% of measurements disturbed"),
        "A disturbed measurement hides the slow node, or contradicts it. The node is then reported "
        "as a suspect.",
    ),
    Limit(
        of.FAULT,
        ("four nodes against a reference",),
        "A reference without a spread does not show how much healthy nodes differ. A node that is "
        "normally faster than the reference hides part of its loss.",
    ),
    Limit(
        of.FAULT,
        ("all alike",),
        "The variation of 64 equal nodes is estimated slightly too small, so the stated fault is "
        "flagged in about 8 of 10 cases (64 of 80 clusters) instead of 9.",
        ("64 nodes, 3 x",),
    ),
    Limit(
        of.STEP_ALARM,
        ("days differ by 0.5%", "days differ by 1%"),
        "The report says that there are too few days to separate a step change from a day.",
        ("10 runs", "20 runs", "together"),
    ),
)
