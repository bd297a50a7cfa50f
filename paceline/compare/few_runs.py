"""Comparison of few runs: their order, the variation to expect of them, and the evidence for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from itertools import groupby, pairwise

from paceline.compare.machine_variation import MachineVariation
from paceline.compare.sides import ComparedRun, Pair
from paceline.compare.significance import MIN_REPEATS, RunVariation, VariationPrior, power
from paceline.core.hosts import compress
from paceline.core.units import percent, pluralize
from paceline.files.catalog import VariationClass, variation_class

OCCASION_GAP = timedelta(hours=6)
"""Time between the starts of two consecutive runs from which they are of different occasions."""
MIN_CONFOUNDING = 0.5
"""Sides that share their occasions better than this count as measured in turns."""
MAX_BLOCKS = 3
"""Sides whose runs form at most this number of blocks (AAA BBB A) in time are not interleaved. Two
runs per side are interleaved in three (A BB A)."""
PLANNED_CHANGES = (0.01, 0.015, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.2)
"""Changes among which the smallest that further runs would find is reported."""
MIN_SURE_STEPS = 20
"""Number of steady steps below which a run is short: it often ends inside its warm-up."""

MAX_NAMES = 3
"""Maximum number of short runs that are named."""


@dataclass(frozen=True)
class FewRunsRule:
    """Variation to expect of a comparison that lacks repeats, or whose sides do not alternate."""

    prior: VariationPrior | None = None
    """Run-to-run variation of the step time."""
    confounding: float = 0.0
    """See `with_occasions`; 0 for sides whose runs alternate."""
    blocks: float = 0.0
    """See `with_occasions`; 0 unless the runs of one occasion form blocks."""
    is_own: bool = False
    """True if the prior is the history of this machine."""
    decides: bool = True
    """False if the prior only widens intervals, because steps have no single level."""
    machine: MachineVariation | None = None
    """Variation of other configurations on this machine, if it is the prior."""


@dataclass(frozen=True)
class RunOrder:
    """Order of the runs of two sides in time, and the hosts that they ran on."""

    sides: Pair

    @property
    def not_interleaved(self) -> bool:
        """True if the runs form only two blocks in time, or three of three or more runs a side."""
        times = self._times
        if times is None or max(map(len, times)) < 2:
            return False
        # Runs of the same time alternate: (time, number of the run on its side, side).
        runs = [(time, i, at) for at, side in enumerate(times) for i, time in enumerate(side)]
        most = MAX_BLOCKS if min(map(len, times)) >= MIN_REPEATS else 2
        return len(list(groupby(at for *_, at in sorted(runs)))) <= most

    @property
    def confounding(self) -> float:
        """Share of the variation between occasions that separates the sides; see with_occasions."""
        if self.sides.baseline.published:
            return 0.0 if len(self.sides.candidate.valid_runs) >= MIN_REPEATS else 1.0
        is_apart = self.is_unknown or (self.not_interleaved and bool(self._breaks))
        amount = max(2.0 * is_apart, self._days, self._hosts)
        return min(2.0, amount) if amount >= MIN_CONFOUNDING else 0.0

    @property
    def blocks(self) -> float:
        """Sum of 1 - 1/n over the sides if their runs of one occasion form blocks, else 0."""
        if not self.not_interleaved or self._breaks:
            return 0.0
        return sum(1 - 1 / n for n in self.sides.sizes)

    @property
    def is_unknown(self) -> bool:
        """True if some run has no date, so that the order of the runs is unknown."""
        return not self.sides.baseline.published and self._times is None

    @property
    def order_reason(self) -> str | None:
        """Reason why the order of the runs may look like a difference, or None."""
        if self.sides.baseline.published:
            return None
        if self.is_unknown:
            name = next(
                run.name for side in self.sides.each for run in side.valid_runs if not _start(run)
            )
            return f"the order of the runs is unknown: the log of {name} has no dates"
        if self._days < MIN_CONFOUNDING and not self.not_interleaved:
            return None
        on_other_days = self._days >= MIN_CONFOUNDING
        fault = "two sides ran on different days" if on_other_days else "runs are not interleaved"
        return (
            f"the {fault}: a slow change of the machine would look like a difference; alternate "
            "the runs (A B A B ...)"
        )

    @property
    def host_reason(self) -> str | None:
        """Reason why the hosts of the runs may look like a difference, or None."""
        if self.sides.baseline.published or self._hosts < MIN_CONFOUNDING:
            return None
        names = [
            compress(sorted({host for run in side.valid_runs for host in run.hosts}))
            for side in self.sides.each
        ]
        return (
            f"the sides ran on different hosts ({names[0]} and {names[1]}), which may differ in "
            "speed; run both on the same"
        )

    @cached_property
    def _times(self) -> tuple[list[datetime], list[datetime]] | None:
        baseline, candidate = (
            [time for run in side.valid_runs if (time := _start(run))] for side in self.sides.each
        )
        counts = [len(baseline), len(candidate)]
        return (baseline, candidate) if counts == self.sides.sizes else None

    @cached_property
    def _breaks(self) -> list[datetime]:
        """The first run of each occasion after the first."""
        in_order = sorted(time for side in self._times or () for time in side)
        return [later for earlier, later in pairwise(in_order) if later - earlier > OCCASION_GAP]

    @property
    def _days(self) -> float:
        if self._times is None:
            return 0.0
        baseline, candidate = (
            [sum(time >= each for each in self._breaks) for time in side] for side in self._times
        )
        return _imbalance(baseline, candidate)

    @property
    def _hosts(self) -> float:
        baseline, candidate = ([run.hosts for run in side.valid_runs] for side in self.sides.each)
        return _imbalance(baseline, candidate) if all((*baseline, *candidate)) else 0.0


def _start(run: ComparedRun) -> datetime | None:
    try:
        time = datetime.fromisoformat(run.created or "")
    except ValueError:
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _imbalance(baseline: Sequence[object], candidate: Sequence[object]) -> float:
    """Return the sum over occasions of (p_b - p_c)^2, for the sides' shares p of their runs.

    From three repeats on, a side's own variation contains a part of that between its occasions: (1
    - sum p^2) / (n - 1) is subtracted. It is all of it where each run has an occasion of its own.
    """
    ours, theirs = (
        {at: number / len(side) for at, number in Counter(side).items()}
        for side in (baseline, candidate)
    )
    total = sum((ours.get(at, 0.0) - theirs.get(at, 0.0)) ** 2 for at in {*ours, *theirs})
    if min(len(baseline), len(candidate)) < MIN_REPEATS:
        return total
    return total - sum(
        (1 - sum(share**2 for share in shares.values())) / (len(side) - 1)
        for side, shares in ((baseline, ours), (candidate, theirs))
    )


def few_runs_rule(
    sides: Pair, variation: RunVariation | None, machine: MachineVariation | None = None
) -> FewRunsRule:
    """Return the rule for two sides.

    The prior is the history of the configuration, else that of its machine, else published.
    """
    machine = None if variation else machine
    history = variation or machine
    prior = history.prior if history else published_prior(machine_class(sides))
    few_against_published = (
        sides.baseline.published
        and len(sides.candidate.valid_runs) < MIN_REPEATS
        and variation is None
    )
    order = RunOrder(sides)
    return FewRunsRule(
        prior,
        order.confounding,
        order.blocks,
        is_own=variation is not None,
        decides=not few_against_published and not unsteady_runs(sides),
        machine=machine,
    )


def published_prior(machine: VariationClass) -> VariationPrior:
    """Return the published variation of a class of machines."""
    return VariationPrior(machine.within, machine.degrees, machine.between, machine.between_degrees)


def machine_class(sides: Pair) -> VariationClass:
    """Return the class of the runs' devices; of several, the one that varies most."""
    devices = {run.facts.device for side in sides.each for run in side.valid_runs}
    return max(map(variation_class, devices), key=lambda each: each.within)


def unsteady_runs(sides: Pair) -> tuple[str, ...]:
    """Return the runs whose steps have no single level: a shift, a drift, or two levels."""
    return tuple(
        run.name
        for side in sides.each
        for run in side.valid_runs
        if not side.published
        and run.window
        and (run.window.shift or run.window.state in ("drifting", "uneven"))
    )


def evidence_text(
    sides: Pair, ratio: float, rule: FewRunsRule, variation: RunVariation | None
) -> str:
    """Return how rare a difference like `ratio` is by chance, and on which data."""
    if variation is not None:
        return f"Runs of this configuration vary by {variation.words}."
    if rule.machine is not None:
        return f"Runs of this machine vary by {rule.machine.words}."
    machine = machine_class(sides)
    pairs = machine.published
    size = max(ratio, 1 / ratio) - 1
    limit = max((each for each in pairs.beyond if size > each), default=min(pairs.beyond))
    which = f"{pairs.pairs:,} published pairs" if pairs.pairs else "published pairs"
    days = " Between days or hosts, add about 1%." if rule.confounding else ""
    return (
        f"Runs of one system of this class ({machine.name}) differ by more than "
        f"{percent(limit, 0)} in {percent(pairs.beyond[limit], 1)} of {which} ({pairs.source})."
        f"{days}"
    )


def plan_text(prior: VariationPrior) -> str:
    """Return what three alternating runs per side would find, or an empty text."""
    variances = 2 * [prior.within**2]
    smallest = next(
        (each for each in PLANNED_CHANGES if power(variances, MIN_REPEATS, each, 0.0) >= 0.8), None
    )
    if smallest is None:
        return ""
    return (
        f"Three alternating runs per side detect a change of {100 * smallest:g}% with 80% "
        "probability."
    )


def short_runs(sides: Pair) -> str | None:
    """Return a sentence about the runs with fewer than 20 steady steps, or None."""
    short = [
        (run.name, run.window.n)
        for side in sides.each
        for run in side.valid_runs
        if run.window
        and not side.published
        and not run.averaged
        and not run.last_step_only
        and run.window.n < MIN_SURE_STEPS
    ]
    if not short:
        return None
    names = ", ".join(name for name, _ in short[:MAX_NAMES])
    others = f" and {len(short) - MAX_NAMES} more" if len(short) > MAX_NAMES else ""
    fewest = pluralize(min(n for _, n in short), "steady step")
    noun, has = ("short run", "has") if len(short) == 1 else ("short runs", "have at least")
    return (
        f"{noun}: {names}{others} {has} {fewest} and may still be warming up; use at least "
        f"{MIN_SURE_STEPS}"
    )
