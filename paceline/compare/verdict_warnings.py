"""Warnings next to a verdict: reasons for low confidence, and possible causes of a change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.compare.comparability import EQUAL_BATCH, STATING_OPTIONS, ComparabilityReport
from paceline.compare.few_runs import FewRunsRule, RunOrder, machine_class, short_runs
from paceline.compare.judgement import MetricComparison, Verdict
from paceline.compare.metric_comparison import IDENTICAL, is_timed
from paceline.compare.over_time.environment import environment_changes
from paceline.compare.sides import Pair, outlier_sentences
from paceline.compare.significance import MIN_REPEATS, NO_SPREAD, RunVariation, power
from paceline.core.metrics import metric_class
from paceline.core.result import finite_value
from paceline.core.units import percent, pluralize

TOO_GOOD = 0.05
"""Relative improvement above which a result is suspicious if no setting was changed on purpose."""


@dataclass
class Remarks:
    """Warnings, notes and reasons for low confidence, collected on the way to a verdict."""

    why_low: list[str] = field(default_factory=list[str])
    warnings: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])

    def doubt(self, reason: str, warning: str | None = None) -> None:
        """Lower the confidence for a reason, and warn about it."""
        if reason not in self.why_low:
            self.why_low.append(reason)
            self.warnings.append(warning or reason)


def remark_on_runs(
    sides: Pair, alike: ComparabilityReport, remarks: Remarks, variation: RunVariation | None = None
) -> None:
    """Add the remarks that follow from the runs and their settings, without their figures."""
    remarks.warnings += left_out(sides)
    if alike.unknown:
        remarks.doubt(f"assumed equal, because neither side states it: {', '.join(alike.unknown)}")
    for side, keys in zip(
        sides.each, (alike.unstated_by_baseline, alike.unstated_by_candidate), strict=True
    ):
        if keys:
            options = ", ".join(STATING_OPTIONS[key] for key in keys if key in STATING_OPTIONS)
            add = f"; add it with {options}" if options else ""
            remarks.doubt(
                f"assumed equal, because {side.name} does not state it: {', '.join(keys)}{add}"
            )
    if alike.unstated_keys:
        unstated_text = ", ".join(alike.unstated_keys)
        remarks.notes.append(f"the source does not state {unstated_text}: assumed equal")
    if alike.batch_rule != EQUAL_BATCH:
        remarks.notes.append(alike.batch_rule)
    identities = {member.identity for member in sides.baseline.valid_runs}
    for name in [
        member.name for member in sides.candidate.valid_runs if member.identity in identities
    ]:
        remarks.doubt(f"{name} is on both sides, so no change can be seen")
    rules = {
        m.window.rule
        for side in sides.each
        for m in side.valid_runs
        if m.window and not m.averaged and not side.published
    }
    if len(rules) > 1:
        remarks.doubt(f"windows chosen by different rules: {', '.join(sorted(rules))}")
    _remark_on_last_steps(sides, remarks)
    for member in (m for side in sides.each for m in side.valid_runs):
        if member.window and member.window.state == "drifting" and member.window.drift is not None:
            remarks.doubt(f"{member.name} drifts by {member.window.drift:+.1%} over its window")
        if member.window and member.window.shift:
            remarks.doubt(f"{member.name}: {member.window.shift.sentence}")
        if member.window and member.window.state == "uneven":
            remarks.doubt(f"step time of {member.name} is not stationary: its mean is compared")
    if sides.baseline.averaged or sides.candidate.averaged:
        remarks.notes.append("one side prints an average, so the mean steps are compared")
    if short := short_runs(sides):
        remarks.doubt(short)
    order = RunOrder(sides)
    if order.host_reason:
        remarks.doubt(order.host_reason)
    if order.order_reason and variation is None:
        remarks.doubt(order.order_reason)
    elif order.order_reason and variation is not None:
        remarks.notes.append(
            f"{order.order_reason.split(':')[0]}: the interval is widened by "
            f"{100 * variation.between:.2g}% per side, the day-to-day variation of this machine"
        )


def _remark_on_last_steps(sides: Pair, remarks: Remarks) -> None:
    """Add remarks on figures of a single step, and on published figures taken in another way."""
    published = sides.baseline.valid_runs if sides.baseline.published else ()
    for member in published:
        if member.window and not member.averaged:
            remarks.notes.append(f"the source takes its figure from: {member.window.rule}")
    for member in sides.candidate.valid_runs if published else ():
        if member.last_step_only and not any(row.last_step_only for row in published):
            remarks.doubt(f"{member.name} is judged by its last step, the source by many")
    for side in sides.each:
        alone = [m.name for m in side.valid_runs if m.last_step_only and not side.published]
        if alone and len(side.valid_runs) < MIN_REPEATS:
            remarks.doubt(f"{', '.join(alone)}: one step (n = 1), of which no spread is known")


def left_out(sides: Pair) -> tuple[str, ...]:
    """Return a sentence for each excluded run, with the reason."""
    return tuple(f"left out: {why}" for side in sides.each for why in side.left_out)


def remark_on_figures(
    sides: Pair,
    primaries: Sequence[MetricComparison],
    margin: float,
    remarks: Remarks,
    rule: FewRunsRule,
    variation: RunVariation | None = None,
) -> None:
    """Lower the confidence for few repeats and values without variation; warn about outliers."""
    fewest = min(sides.sizes)
    sizes = dict.fromkeys(sides.sizes)
    per_side = " per side" if len(sizes) < len(sides.sizes) else ""
    runs = f"{' and '.join(pluralize(n, 'run') for n in sizes)}{per_side}"
    decides = rule.decides and any(is_timed(primary.metric) for primary in primaries)
    if fewest < MIN_REPEATS and not decides:
        remarks.why_low.append(f"{runs}: run-to-run variation unknown")
    elif fewest < MIN_REPEATS and variation is not None:
        remarks.notes.append(f"{runs}, judged by this machine's history: {variation.words}")
    elif fewest < MIN_REPEATS:
        device = all(run.facts.device for side in sides.each for run in side.valid_runs)
        state = "" if device else " (name the GPU with --device)"
        source = "other runs on this machine" if rule.machine else machine_class(sides).name
        remarks.why_low.append(
            f"{runs}: the variation is that of {source}{state}; a test needs {MIN_REPEATS}"
        )
    for primary in primaries:
        for side, figures in zip(sides.each, (primary.baseline, primary.candidate), strict=True):
            if len(figures.values) == len(side.valid_runs) and all(v > 0 for v in figures.values):
                names = [member.name for member in side.valid_runs]
                remarks.warnings += outlier_sentences(names, figures.values, margin)
            if (
                figures.spread is not None
                and figures.spread < NO_SPREAD
                and metric_class(primary.metric).is_speed
            ):
                remarks.doubt(f"{primary.metric} of {side.name}: {IDENTICAL}")
        remarks.notes += _power(sides, primary, margin)
        if primary.resolution >= 0.0005:
            remarks.notes.append(
                f"{primary.metric} is printed to within {percent(primary.resolution, 2)}, which "
                "widens the margin: only differences beyond "
                f"{percent(margin + primary.resolution, 2)} are detectable"
            )


def _power(sides: Pair, primary: MetricComparison, margin: float) -> list[str]:
    """Return the power of such repeats to find a difference, where none was found."""
    figures = zip(sides.each, (primary.baseline, primary.candidate), strict=True)
    spreads = [of_side.spread for side, of_side in figures if not side.published]
    known_spreads = [spread for spread in spreads if spread is not None]
    few = min(sides.sizes) < MIN_REPEATS or len(known_spreads) < len(sides.sizes)
    # Differences within margin and rounding are never reported, so their power is meaningless.
    hidden = 2 * margin <= margin + primary.resolution
    order = RunOrder(sides)
    is_apart = bool(order.confounding or order.blocks)
    if few or hidden or is_apart or primary.verdict not in ("same", "undecided"):
        return []
    n, variances = min(sides.sizes), [spread**2 for spread in known_spreads]
    variation = (sum(variances) / len(known_spreads)) ** 0.5
    share = power(variances, n, 2 * margin, margin, primary.resolution)
    return [
        f"{n} runs{' per side' if len(known_spreads) > 1 else ''} with a run-to-run variation of "
        f"{100 * variation:.2g}% find a change of {percent(2 * margin)} in {100 * share:.0f}% of "
        "cases"
    ]


def suspicion(
    sides: Pair, lead: MetricComparison, verdict: Verdict, difference_meant: bool
) -> str | None:
    """Return why the candidate's figure is suspicious, or None."""
    for member in sides.candidate.valid_runs:
        share = finite_value(member.metrics.get("achievable_fraction"))
        if share is not None and share > 1:
            return (
                f"achievable_fraction of {member.name} is {percent(share)}: no run exceeds its "
                "probed rate"
            )
    if (
        verdict not in ("faster", "likely faster", "better", "undecided")
        or lead.ratio is None
        or difference_meant
    ):
        return None
    improves = (lead.ratio > 1) == (lead.better == "higher")
    gain = max(lead.ratio, 1 / lead.ratio) - 1
    if lead.better is None or not improves or gain <= TOO_GOOD + lead.resolution:
        return None
    return (
        f"{lead.metric} is better by {percent(gain)}, and more than {percent(TOO_GOOD, 0)} is "
        "suspicious: check that both sides did the same work (loss, tokens, skipped steps)"
    )


def causes(sides: Pair) -> tuple[str, ...]:
    """Return software versions and system settings that differ: `torch 2.12 -> 2.13`."""
    before, after = (
        [m.environment for m in side.valid_runs if m.environment] for side in sides.each
    )
    if not before or not after:
        return ()
    return tuple(
        f"{change.item} {change.before} -> {change.after}"
        + ("" if change.only_here else " (not in all runs)")
        for change in environment_changes(before, after)
    )
