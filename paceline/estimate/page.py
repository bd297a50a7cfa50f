"""The page of an estimate or of several offers: the answer, charts from the peak down, tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from paceline.core.text import one_line, printable
from paceline.core.units import count, day_count, days, gib, percent, si, step_seconds
from paceline.core.waterfall import WaterfallLevel
from paceline.estimate.answer import Estimate
from paceline.estimate.elasticity import Elasticity
from paceline.estimate.headline import (
    TO_TARGET,
    batch,
    beside_line,
    energy,
    fit_words,
    layout,
    money,
    of_interval,
    offer_heads,
    offer_rows,
    place,
    rates,
    software,
    speed,
    speed_unit,
)
from paceline.estimate.memory.device_memory import verdict
from paceline.estimate.offers import Against
from paceline.report.head import Card, PageHead, Tone, card, unknown_card
from paceline.report.html import render_page
from paceline.report.theme import ON_PAGE
from paceline.report.waterfall import waterfall_chart

TONES: dict[str, Tone] = {"fits": "good", "borderline": "plain", "out of memory": "alert"}
ELASTICITY_HEADS = ("figure", "taken as", "elasticity", "80 %", "step if twice as fast")
LEVEL_HEADS = ("cause", "left of the peak", "FLOP/s a device", "seconds of the step")


def estimate_html(
    estimates: Sequence[Estimate],
    beside: Sequence[Against],
    texts: Sequence[str],
    elasticities: Sequence[Sequence[Elasticity]] = (),
) -> str:
    """The page of one estimate, or of several offers; it loads nothing.

    `beside` holds all but the first estimate against it; `texts` say of each what the terminal
    does; `elasticities` are each one's, or nothing.
    """
    names = offer_names(estimates)
    charts = {
        f"waterfall-{number}": waterfall_chart(
            estimate.waterfall, ON_PAGE, name, convention=estimate.convention
        )
        for number, (estimate, name) in enumerate(zip(estimates, names, strict=True), start=1)
    }
    return render_page(
        "estimate.html.j2",
        _head(estimates, beside),
        charts,
        offer_heads=offer_heads(estimates[0]),
        speed_unit=speed_unit(estimates[0]),
        offer_rows=list(offer_rows(estimates, beside)) if beside else [],
        level_heads=LEVEL_HEADS,
        levels=[
            (name, [_cells(level) for level in estimate.waterfall])
            for estimate, name in zip(estimates, names, strict=True)
        ],
        elasticity_heads=ELASTICITY_HEADS,
        elasticities=[
            (name, [_elasticity_cells(each, estimate) for each in by_figure])
            for name, estimate, by_figure in zip(names, estimates, elasticities, strict=False)
        ],
        notes=list(dict.fromkeys(note for each in estimates for note in _basis(each))),
        texts=[
            (name, [one_line(line) for line in text.splitlines()])
            for name, text in zip(names, texts, strict=True)
        ],
    )


def offer_names(estimates: Sequence[Estimate]) -> list[str]:
    """Of each offer: recipe, devices and layout, and its number where these are alike."""
    names = [f"{each.recipe} on {place(each)}, {each.layout}" for each in estimates]
    alike = Counter(names)
    return [
        one_line(f"{name}, offer {number}" if alike[name] > 1 else name)
        for number, name in enumerate(names, start=1)
    ]


def _basis(estimate: Estimate) -> list[str]:
    """Where the coefficients are from, and what was taken to be so."""
    kinds = estimate.evidence.model_dump(exclude={"title"})
    words = ", ".join(f"{name.replace('_', ' ')}: {kind}" for name, kind in kinds.items())
    notes = [f"{place(estimate)}: {note}" for note in estimate.notes]
    return [one_line(line) for line in (estimate.evidence.title, words, *notes)]


def _head(estimates: Sequence[Estimate], beside: Sequence[Against]) -> PageHead:
    first = estimates[0]
    measured = first.measured is not None
    fits = None if first.p_oom is None else verdict(first.p_oom)
    return PageHead(
        eyebrow="an estimate beside a measured step" if measured else "an estimate: nothing ran",
        name=one_line(f"{first.recipe} on {place(first)}"),
        chip=fit_words(first),
        tone=TONES.get(fits or "", "plain"),
        setup=(first.dtype, one_line(layout(first)), f"stack {one_line(software(first))}"),
        sentences=(
            *_answer(first),
            *(
                one_line(beside_line(first, each, offer)) + "; in brackets 80 %."
                for each, offer in zip(estimates[1:], beside, strict=True)
            ),
        ),
        cards=estimate_cards(first),
    )


def _answer(estimate: Estimate) -> tuple[str, ...]:
    measured = estimate.measured
    if measured is None:
        return ()
    step_s = step_seconds(measured.step_time_s)
    where = "in" if measured.in_interval else "outside"
    return (
        f"Measured were {step_s} s a step ({one_line(measured.source)}): "
        f"{measured.ratio:.3f} of the estimate, {where} its 80 % interval.",
    )


def estimate_cards(estimate: Estimate) -> tuple[Card, ...]:
    """Step time, throughput, the whole training with its money, and memory."""
    ends = (speed(estimate, step_time_s) for step_time_s in _ends(estimate))
    main, other = rates(estimate)
    share = "no data-sheet peak" if estimate.mfu is None else f"MFU {percent(estimate.mfu, 1)}"
    slowest = max(estimate.parts.items(), key=lambda part: part[1])
    return (
        card(
            "Step time",
            f"{step_seconds(estimate.step_time_s)} s",
            f"{step_seconds(estimate.low_s)} to {step_seconds(estimate.high_s)} s (80 %)",
            [
                batch(estimate),
                f"largest part: {slowest[0]}, {percent(slowest[1] / estimate.step_time_s)}",
            ],
        ),
        card(
            "Throughput",
            main,
            " to ".join(ends) + " (80 %)",
            [
                other,
                f"{si(estimate.flops_per_s_per_device, 'FLOP/s')} a device",
                f"{share} ({estimate.convention})",
            ],
        ),
        _training_card(estimate),
        _memory_card(estimate),
    )


def _ends(estimate: Estimate) -> tuple[float, float]:
    """The slowest step first, so that rates rise."""
    return estimate.high_s, estimate.low_s


def _training_card(estimate: Estimate) -> Card:
    bill, label = estimate.bill, "Whole training"
    if bill is None:
        no_length = "the recipe states no number of tokens; --tokens does"
        return unknown_card(label, TO_TARGET if estimate.to_target else no_length)
    cost = "cost not known: no price; --price states one"
    if bill.cost is not None:
        cost = f"cost {money(estimate)}, {of_interval(estimate, bill.cost)} (80 %)"
    return card(
        label,
        days(bill.days),
        f"{of_interval(estimate, bill.days, day_count)} days (80 %)",
        [
            cost,
            None if bill.spot_cost is None else f"spot {bill.spot_cost:,.0f}",
            f"{count(bill.total_tokens)} tokens, {bill.device_hours:,.0f} device hours",
            None if bill.goodput is None else f"goodput {percent(bill.goodput, 1)}",
            energy(estimate),
        ],
    )


def _memory_card(estimate: Estimate) -> Card:
    used = estimate.memory_bytes
    odds = "whether it fits is not known: nobody states the device's memory"
    if estimate.p_oom is not None:
        odds = f"P(out of memory) {percent(estimate.p_oom, 0)}"
    largest = sorted(used.parts.items(), key=lambda part: -part[1])[:2]
    return card(
        "Memory of the fullest device",
        gib(used.device_used),
        odds,
        [
            f"allocated {gib(used.allocated)}, reserved {gib(used.reserved)}",
            *(f"{name.replace('_', ' ')} {gib(value)}" for name, value in largest),
        ],
    )


def _cells(level: WaterfallLevel) -> list[str]:
    seconds = step_seconds(level.lost_s) if level.lost_s else ""
    return [
        printable(level.name),
        percent(level.share, 1),
        si(level.flops_per_s, "FLOP/s"),
        seconds,
    ]


def _elasticity_cells(each: Elasticity, estimate: Estimate) -> tuple[str, ...]:
    less = 1 - each.doubled_s / estimate.step_time_s
    return (
        each.figure,
        "not stated" if each.value is None or each.unit is None else si(each.value, each.unit),
        f"{each.elasticity:.3f}",
        f"{each.low:.3f} to {each.high:.3f}",
        f"{step_seconds(each.doubled_s)} s ({percent(less, 1)} less)",
    )
