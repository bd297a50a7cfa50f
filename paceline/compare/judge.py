"""Verdict on two sides, or on one run next to published rows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from paceline.compare.comparability import (
    STATING_OPTIONS,
    UNKNOWN,
    ComparabilityReport,
    KeyDifference,
    compare_settings,
    fair_metric,
    window_difference,
)
from paceline.compare.few_runs import (
    FewRunsRule,
    RunOrder,
    evidence_text,
    few_runs_rule,
    plan_text,
    unsteady_runs,
)
from paceline.compare.judgement import (
    LIKELY,
    Comparison,
    MetricComparison,
    SideSummary,
    Verdict,
    observed_difference,
    proof,
)
from paceline.compare.machine_variation import MachineVariation
from paceline.compare.metric_comparison import compare_metrics
from paceline.compare.sides import ComparisonSide, Pair
from paceline.compare.significance import (
    CONFIDENCE,
    MARGIN,
    MAX_FURTHER_REPEATS,
    MIN_REPEATS,
    NO_SPREAD,
    RunVariation,
    correct_p_values,
)
from paceline.compare.verdict_warnings import (
    TOO_GOOD,
    Remarks,
    causes,
    left_out,
    remark_on_figures,
    remark_on_runs,
    suspicion,
)
from paceline.core.metrics import metric_class
from paceline.core.result import ReferenceComparison, RunVerdict, Status, WindowRecord, finite_value
from paceline.core.units import percent

VERDICT_PRIORITY: tuple[Verdict, ...] = (
    "invalid",
    "slower",
    "worse",
    "differs",
    "likely slower",
    "undecided",
    "likely faster",
    "faster",
    "better",
    "same",
)
"""Verdicts by priority: with several primary metrics, the first of these that occurs is the
verdict."""

RATES = ("tokens_per_s", "samples_per_s", "tokens_per_s_per_device")
"""Metrics that are compared if the source states no step time."""

ONE_LEVEL = "find what shifts the step time, or choose a window on one level"
"""Advice for a run with two levels of step time."""


def judge(
    baseline: ComparisonSide,
    candidate: ComparisonSide,
    *,
    margin: float = MARGIN,
    allowed: Collection[str] = (),
    metrics: Sequence[str] = (),
    variation: RunVariation | None = None,
    machine: MachineVariation | None = None,
) -> Comparison:
    """Compare the candidate with the baseline; see Comparison.

    `allowed` lists the keys of settings that may differ. `metrics` lists the metrics that decide
    the verdict; the default is the step time, or a metric that stays meaningful when settings
    differ. `variation` is the run-to-run variation in the configuration's history. Without it, the
    variation of the `machine`, or the published one of such machines, replaces missing repeats.
    """
    sides = Pair(baseline, candidate)
    # Without variation, a history would make any difference certain.
    variation = variation if variation and variation.single >= NO_SPREAD else None
    if problem := baseline.invalid or candidate.invalid:
        return _without_figures(sides, f"Not judged: {problem}.", margin)
    alike = compare_settings(
        [m.facts for m in baseline.valid_runs],
        [m.facts for m in candidate.valid_runs],
        allowed=allowed,
        published=baseline.published,
    )
    if not baseline.published:
        ours, theirs = ([m.steps_used for m in side.valid_runs] for side in sides.each)
        of_figures = window_difference(ours, theirs, allowed)
        alike = replace(alike, differences=(*alike.differences, *of_figures))
    fields = {
        "differing_keys": alike.keys,
        "differences": alike.differences,
        "unknown_keys": (*alike.unknown, *alike.unstated_by_one_side),
        "batch_rule": alike.batch_rule,
    }
    blank = _without_figures(sides, "", margin).model_copy(update=fields)
    forbidden = [d for d in alike.differences if not d.allowed]
    if forbidden:
        differing = "; ".join(f"{d.key} {d.baseline} against {d.candidate}" for d in forbidden)
        slow = " A profiler slows a run: its figures are not valid." if _profiled(forbidden) else ""
        refusal = f"{sides.names} are not comparable: {differing}.{slow} {_accept(forbidden)}"
        return blank.model_copy(update={"verdict": "not comparable", "sentence": refusal})
    remarks = Remarks()
    remark_on_runs(sides, alike, remarks, variation)
    primary = tuple(dict.fromkeys(metrics)) or (_fair(sides, alike, remarks),)
    rule = few_runs_rule(sides, variation, machine)
    comparisons = compare_metrics(baseline, candidate, primary, margin, rule)
    return _verdict(blank, sides, comparisons, remarks, rule, variation)


def _accept(forbidden: Sequence[KeyDifference]) -> str:
    """Return how to compare in spite of the differences."""
    unknown = [d.key for d in forbidden if UNKNOWN in (d.baseline, d.candidate)]
    options = ", ".join(STATING_OPTIONS[key] for key in unknown if key in STATING_OPTIONS)
    anyway = "compare anyway"
    state = f"Add what a log does not state ({options}), or {anyway}" if options else f"To {anyway}"
    return f"{state}: {' '.join(f'--allow {d.key}' for d in forbidden)}."


def _profiled(differences: Sequence[KeyDifference]) -> bool:
    return any(d.key == "profiled" and "yes" in d.baseline + d.candidate for d in differences)


def _verdict(
    blank: Comparison,
    sides: Pair,
    comparisons: tuple[MetricComparison, ...],
    remarks: Remarks,
    rule: FewRunsRule,
    variation: RunVariation | None,
) -> Comparison:
    """Return `blank` with its figures and the verdict that follows from them."""
    primaries = [comparison for comparison in comparisons if comparison.primary]
    words = _gate_verdicts(primaries)
    verdict = min(words, key=VERDICT_PRIORITY.index)
    lead = primaries[words.index(verdict)]
    remark_on_figures(sides, primaries, blank.margin, remarks, rule, variation)
    if (
        verdict == "same"
        and metric_class(lead.metric).is_speed
        and has_level_shift(sides, blank.margin)
    ):
        verdict, repeats_needed, how = "undecided", None, ONE_LEVEL
    else:
        repeats_needed, how = _repeats(primaries, verdict, sides)
    low = bool(remarks.why_low)
    observed = evidence = ""
    if lead.by_known_variation and metric_class(lead.metric).is_speed:
        evidence = evidence_text(sides, lead.ratio or 1.0, rule, variation)
    if lead.ratio is None or verdict == "invalid":
        text = f"Not judged: {lead.metric} is not known ({lead.note or 'no value'})."
    else:
        names = blank.baseline.short_name, blank.candidate.short_name
        observed = observed_difference(names, lead)
        sizes = {
            name: len(side.valid_runs)
            for name, side in zip(names, sides.each, strict=True)
            if not side.published
        }
        few = min(sides.sizes) < MIN_REPEATS
        is_open = verdict == "undecided" or verdict in LIKELY
        shifts = has_level_shift(sides, blank.margin)
        unsteady = unsteady_runs(sides) if few or rule.confounding > 0 or shifts else ()
        if verdict == "undecided" and unsteady and not evidence:
            repeats_needed, how = None, ONE_LEVEL
            text = (
                f"{observed} Not proven: step time of {', '.join(unsteady)} is not stationary. "
                f"More runs do not help: {ONE_LEVEL}."
            )
        else:
            text = (
                f"{observed} {proof(lead, verdict, blank.margin, sizes, repeats_needed, evidence)}"
            )
        if evidence and is_open and few and rule.prior and variation is None:
            text += f" {plan_text(rule.prior)}"
        text += f" {_low_confidence(remarks.why_low)}" if low and not is_open else ""
    return blank.model_copy(
        update={
            **{name: getattr(lead, name) for name in ("metric", "ratio", "low", "high", "p")},
            "verdict": verdict,
            "confidence": "low" if low else "normal",
            "why_low": tuple(remarks.why_low),
            "observed": observed,
            "evidence": evidence,
            "sentence": text,
            "resolution": lead.resolution,
            "repeats_needed": repeats_needed,
            "repeats_note": how,
            "too_good": suspicion(
                sides, lead, verdict, difference_meant=bool(blank.differing_keys)
            ),
            "warnings": tuple(remarks.warnings),
            "notes": tuple(remarks.notes),
            "metrics": comparisons,
        }
    )


def _without_figures(sides: Pair, text: str, margin: float) -> Comparison:
    n_a, n_b = sides.n_a_and_b
    return Comparison(
        verdict="invalid",
        confidence="low",
        sentence=text,
        n_a=n_a,
        n_b=n_b,
        margin=margin,
        repeats_needed=None,
        causes=causes(sides),
        warnings=left_out(sides),
        baseline=_summary(sides.baseline),
        candidate=_summary(sides.candidate),
    )


def _low_confidence(reasons: Sequence[str]) -> str:
    """Return the reasons in short, without names and remedies, which the warnings give."""
    heads = [
        "unstated settings are assumed equal"
        if reason.startswith("assumed equal")
        else reason.partition(":")[0]
        for reason in reasons
    ]
    return f"Low confidence: {'; '.join(dict.fromkeys(heads))}."


def _summary(side: ComparisonSide) -> SideSummary:
    return SideSummary(
        name=side.name,
        kind="reference" if side.published else "runs",
        runs=tuple(member.name for member in side.valid_runs),
        left_out=side.left_out,
        source=side.source,
    )


def _fair(sides: Pair, alike: ComparabilityReport, remarks: Remarks) -> str:
    """Return the metric to judge by, and add a note when it is not the step time."""

    def has_values(name: str) -> bool:
        return all(finite_value(m) is not None for side in sides.each for m in side.metric(name))

    name, why = fair_metric(alike.keys)
    if name == "step_time_s" and not has_values(name):
        name = next(filter(has_values, RATES), name)
        why = f"no step times are known, so {name} is compared" if name in RATES else why
    if name == "model_flops_per_s_per_device" and not has_values(name):
        name = "tokens_per_s_per_device"
        why = "FLOP/s are unknown, so tokens/s per device are compared, although the work differs"
    if why:
        remarks.notes.append(why)
    return name


def _gate_verdicts(primaries: Sequence[MetricComparison]) -> list[Verdict]:
    """Return the verdict of each primary metric.

    With several metrics, a difference must remain significant after the correction for multiple
    tests.
    """
    with_p = [comparison for comparison in primaries if comparison.p is not None]
    p_values = correct_p_values([comparison.p or 0.0 for comparison in with_p])
    weak = {
        comparison.metric
        for comparison, p in zip(with_p, p_values, strict=True)
        if p > 1 - CONFIDENCE
    }
    return [_gate_verdict(comparison, comparison.metric in weak) for comparison in primaries]


def _gate_verdict(comparison: MetricComparison, weak: bool) -> Verdict:
    if comparison.verdict == "unknown":
        return "invalid"
    return "undecided" if weak and comparison.verdict != "same" else comparison.verdict


def has_level_shift(sides: Pair, margin: float) -> bool:
    """Return whether the step time of some run has a level that differs by more than the margin."""
    windows = [member.window for side in sides.each for member in side.valid_runs]
    return any(w and w.shift and abs(w.shift.ratio - 1) > margin for w in windows)


def _repeats(
    primaries: Sequence[MetricComparison],
    verdict: Verdict,
    sides: Pair,
) -> tuple[int | None, str | None]:
    """Return the number of further repeats per side, and how it was determined."""
    is_open = {"undecided", *LIKELY}
    if verdict not in is_open:
        return 0, None
    fewest = min(sides.sizes)
    if fewest < MIN_REPEATS:
        return MIN_REPEATS - fewest, "minimum for a test; about 5 are needed to show `same`"
    plans = [comparison.repeats_needed for comparison in primaries if comparison.verdict in is_open]
    if None in plans:
        return MAX_FURTHER_REPEATS, (
            "at least: the difference is too close to the margin for the spread between repeats; a "
            "quieter machine or another margin decides sooner"
        )
    most = max((plan for plan in plans if plan is not None), default=1)
    order = RunOrder(sides)
    turns = "interleaved (A B A B ...); " if order.confounding or order.blocks else ""
    chance = "decides with 80% probability if ratio and spread stay as they are"
    return max(most, 1), turns + chance


def single_run_verdict(
    status: Status,
    reason: str | None,
    window: WindowRecord | None,
    comparisons: tuple[ReferenceComparison, ...],
) -> RunVerdict:
    """Return the verdict on one run: "invalid" without a valid figure, "none" without a reference.

    Otherwise a single run is "undecided", as in `compare --against`. The sentence reports its ratio
    to the reference, and the number of runs needed.
    """
    if status != "ok" or window is None:
        why = reason or ("too few steps for a steady window" if status == "ok" else status)
        return RunVerdict(kind="invalid", sentence=f"Not judged: {why}.")
    comparable = [c for c in comparisons if c.comparable and c.ratio is not None]
    if not comparable:
        why = next((c.why_not for c in comparisons if c.why_not), None)
        return RunVerdict(
            kind="none",
            sentence=f"No comparable published figure: {why or 'the recipe names none'}.",
        )
    if window.state == "uneven" or window.shift:
        reference = comparable[0].reference
        sentence = f"Undecided against {reference}: step time is not stationary."
        return RunVerdict(kind="undecided", sentence=sentence)
    return _against(comparable[0])


def _against(best: ReferenceComparison) -> RunVerdict:
    """Return the verdict on one run and a published row: their ratio, and the runs needed."""
    ratio = best.ratio or 0.0
    printed = f", printed to within {percent(best.resolution, 2)}" if best.resolution > 5e-4 else ""
    place = f"{percent(abs(ratio - 1))} {'slower' if ratio < 1 else 'faster'}"
    suspicious = ratio - 1 > TOO_GOOD + best.resolution
    doubt = "; suspiciously fast" if suspicious else ""
    sentence = (
        f"Undecided against {best.reference}: {place}{printed}, but one run does not show the "
        f"run-to-run variation{doubt}. {MIN_REPEATS} runs decide: "
        f"`--repeat {MIN_REPEATS}`, then `paceline compare GROUP --against reference`."
    )
    return RunVerdict(kind="undecided", sentence=sentence)
