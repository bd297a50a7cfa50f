"""What the comparison with published results begins with: the score and its nearest peer."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.core.text import one_line
from paceline.core.units import counted, percent, significant
from paceline.mlperf.compare.comparison import ComparedScore, PublishedPeer, ScoreComparison
from paceline.mlperf.rules import NOT_A_METRIC
from paceline.report.figures import written
from paceline.report.head import Card, PageHead, card, unknown_card

LABELS = ("Score", "Against published", "Samples to target", "Strong scaling")


def compared_head(comparison: ScoreComparison) -> PageHead:
    """Head of the page: the label that no own score may be without, the answer, four figures."""
    return PageHead(
        eyebrow="scores beside published results",
        name=f"{comparison.benchmark}, MLPerf Training {comparison.ruleset}",
        chip=comparison.label,
        tone="plain",
        setup=(f"{comparison.division} division", f"published results: {comparison.source}"),
        sentences=tuple(answers(comparison)),
        cards=compared_cards(comparison),
    )


def answers(comparison: ScoreComparison) -> Iterator[str]:
    """Of each set of runs in one sentence: minutes, on what, and the nearest published result."""
    for score in comparison.own:
        if score.score_minutes is None:
            yield one_line(f"{score.name}: no score, {score.status}: {score.reason}")
            continue
        where = f"{score.num_devices or 'not known how many'} x {score.accelerator or 'not known'}"
        peer = nearest(score)
        beside = "no published result beside it"
        if peer is not None:
            beside = (
                f"{peer.time_ratio:.3f} of the {peer.score_minutes:.4f} minutes that "
                f"{peer.submitter} published ({peer.system})"
            )
        yield one_line(f"{score.name}: {score.score_minutes:.4f} minutes on {where}, {beside}")


def nearest(score: ComparedScore) -> PublishedPeer | None:
    """The published result that is nearest in time, itself only where there is no other."""
    others = [peer for peer in score.beside if not peer.itself] or list(score.beside)
    return min(others, key=lambda peer: abs(peer.time_ratio - 1), default=None)


def compared_cards(comparison: ScoreComparison) -> tuple[Card, ...]:
    """Minutes, ratio to what was published, samples to the target, and strong scaling."""
    if not comparison.own:
        return tuple(unknown_card(label, "there are no runs") for label in LABELS)
    first, *others = comparison.own
    return (
        _score_card(first, others),
        _peer_card(first),
        _samples_card(first),
        _scaling_card(comparison),
    )


def _score_card(first: ComparedScore, others: list[ComparedScore]) -> Card:
    on = f"{first.num_devices or 'not known how many'} x {first.accelerator or 'not known'}"
    more = [
        f"{each.score_minutes:.4f} minutes on {each.num_devices or 'not known how many'}"
        for each in others
        if each.score_minutes is not None
    ]
    lines = [on, first.name, *more]
    if first.score_minutes is None:
        return unknown_card(LABELS[0], f"{first.status}: {first.reason}", lines)
    return card(LABELS[0], f"{first.score_minutes:.4f} minutes", "", lines)


def _peer_card(first: ComparedScore) -> Card:
    peer = nearest(first)
    if peer is None:
        why = "no published result on as many accelerators of the kind is known here"
        return unknown_card(LABELS[1], why)
    return card(
        LABELS[1],
        f"{peer.time_ratio:.3f}",
        f"of {peer.score_minutes:.4f} minutes, below 1 is faster",
        [f"{peer.submitter} {peer.system}", f"nearest of {len(first.beside)} beside it"],
    )


def _samples_card(first: ComparedScore) -> Card:
    rate, flops = first.samples_per_s, first.model_flops_per_s_per_device
    lines = [
        f"global batch {first.global_batch:,}" if first.global_batch else None,
        f"{significant(rate, 5)} samples/s with evaluations" if rate else None,
        f"{written(flops, 'FLOP/s', 4)} a device, {NOT_A_METRIC}" if flops else None,
    ]
    if first.mean_samples_to_target is None:
        return unknown_card(LABELS[2], "no run converged", lines)
    return card(LABELS[2], f"{first.mean_samples_to_target:,.0f} samples", "", ["mean", *lines])


def _scaling_card(comparison: ScoreComparison) -> Card:
    if not comparison.scaling:
        why = "takes two sets of runs on different numbers of accelerators"
        return unknown_card(LABELS[3], why)
    last = comparison.scaling[-1]
    fewest = comparison.scaling[0].num_devices
    return card(
        LABELS[3],
        percent(last.efficiency, 1),
        f"on {last.num_devices:,} against {counted(fewest, 'accelerator')}",
        [
            f"{percent(last.samples_factor, 1)} by samples",
            f"{percent(last.throughput_factor, 1)} by throughput",
        ],
    )
