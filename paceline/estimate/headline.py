"""The answer of an estimate in a line, and offers side by side, for terminal and page alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from paceline.core.layout import beside_axes
from paceline.core.units import count, counted, days, gib, percent, step_seconds, trimmed
from paceline.estimate.answer import Estimate
from paceline.estimate.calibrate.lookup import is_cpu
from paceline.estimate.fit.origin import ANY
from paceline.estimate.memory.device_memory import verdict
from paceline.estimate.offers import Against, Ratio

NO_LENGTH = "not known: how long the training is; --tokens says it"
TO_TARGET = "it trains to a target: --mlperf ROUND says how long, --tokens states another length"


def offer_heads(first: Estimate) -> tuple[str, ...]:
    """Of the table of offers."""
    return (
        *("offer", "step", "80 % interval", speed_unit(first), "of the first", "training", "cost"),
        *("memory", "P(out of memory)"),
    )


def speed_unit(estimate: Estimate) -> str:
    """Unit of the rate that the estimate is known by."""
    return "samples/s" if estimate.headline == "samples_per_s" else "tokens/s"


def rates(estimate: Estimate) -> tuple[str, str]:
    """Tokens and samples a second, the one that the estimate is known by first."""
    samples = f"{trimmed(estimate.samples_per_s)} samples/s"
    both = f"{estimate.tokens_per_s:,.0f} tokens/s", samples
    return both if estimate.headline == "tokens_per_s" else (both[1], both[0])


def speed(estimate: Estimate, step_time_s: float | None = None) -> str:
    """That rate without its unit, at the estimated step time or another one."""
    rate: float = getattr(estimate, estimate.headline)
    rate *= estimate.step_time_s / (step_time_s or estimate.step_time_s)
    return f"{rate:,.0f}" if estimate.headline == "tokens_per_s" else trimmed(rate)


def place(estimate: Estimate) -> str:
    """On what: `1,024 x H100-SXM`."""
    return f"{estimate.devices:,} x {estimate.device}"


def setup(estimate: Estimate) -> str:
    """What is trained and on what, in a line; the batch, because a step is of it."""
    return (
        f"{estimate.recipe} · {place(estimate)} · {estimate.dtype} · {layout(estimate)} · "
        f"seq {estimate.seq_len:,} · {batch(estimate)} · {software(estimate)}"
    )


def layout(estimate: Estimate) -> str:
    """Axes, micro-batch and recomputation: `dp 4 tp 2 micro-batch 1 recompute full`."""
    return beside_axes(estimate.layout, estimate.micro_batch, estimate.recompute)


def software(estimate: Estimate) -> str:
    """What was asked for and how it computes there: `nemo@26.02 (fused)`, or that alone."""
    named = estimate.software not in (ANY, estimate.stack)
    return f"{estimate.software} ({estimate.stack})" if named else estimate.stack


def batch(estimate: Estimate) -> str:
    """Of a step: `global batch 512 sequences`."""
    of = "sample" if estimate.headline == "samples_per_s" else "sequence"
    return f"global batch {counted(estimate.global_batch, of)}"


def headline(estimate: Estimate) -> str:
    """Step time with its interval, the rate, days and money of the whole training, memory."""
    parts = [
        f"step {step_seconds(estimate.step_time_s)} s   80 % interval "
        f"{step_seconds(estimate.low_s)}-{step_seconds(estimate.high_s)} s",
        rates(estimate)[0],
    ]
    if estimate.bill is not None:
        parts.append(f"{training_time(estimate)} for {count(estimate.bill.total_tokens)} tokens")
        parts += [f"cost {money(estimate)}"] if estimate.bill.cost is not None else []
    return " · ".join([*parts, fit_words(estimate)])


def fit_words(estimate: Estimate) -> str:
    """Whether it fits into the device's memory, in a word or two."""
    if estimate.p_oom is None:
        return "whether it fits is not known"
    return {"borderline": "memory borderline"}.get(verdict(estimate.p_oom), verdict(estimate.p_oom))


def training_time(estimate: Estimate) -> str:
    """Days of the whole training, or that they are not known."""
    return "not known" if estimate.bill is None else days(estimate.bill.days)


def money(estimate: Estimate) -> str:
    """Return what the whole training costs, in the currency of the price."""
    cost = estimate.bill.cost if estimate.bill else None
    return "not known" if cost is None else f"{cost:,.0f}"


def energy(estimate: Estimate) -> str:
    """What the whole training takes at most, or why that is not known."""
    if estimate.bill is None:
        return "not known"
    if estimate.bill.energy_kwh is not None:
        return f"at most {estimate.bill.energy_kwh:,.0f} kWh"
    device = "this processor" if is_cpu(estimate.device) else estimate.device
    return f"energy not known: no data sheet states the power of {device}"


def of_interval(
    estimate: Estimate, value: float, written: Callable[[float], str] = "{:,.0f}".format
) -> str:
    """Both ends of the 80 % interval of what grows with the step time and is `value` at it."""
    low, high = (value * s / estimate.step_time_s for s in (estimate.low_s, estimate.high_s))
    return f"{written(low)} to {written(high)}"


def offer_rows(estimates: Sequence[Estimate], beside: Sequence[Against]) -> Iterator[list[str]]:
    """A row an offer under `offer_heads`, the first one first."""
    ratios = ["1", *(ratio_text(offer.tokens_per_s) for offer in beside)]
    for estimate, ratio in zip(estimates, ratios, strict=True):
        yield [
            place(estimate),
            f"{step_seconds(estimate.step_time_s)} s",
            f"{step_seconds(estimate.low_s)} to {step_seconds(estimate.high_s)} s",
            speed(estimate),
            ratio,
            training_time(estimate),
            money(estimate),
            gib(estimate.memory_bytes.device_used),
            "not known" if estimate.p_oom is None else percent(estimate.p_oom, 0),
        ]


def offer_table(estimates: Sequence[Estimate], beside: Sequence[Against]) -> list[dict[str, Any]]:
    """The same rows by head."""
    heads = offer_heads(estimates[0])
    return [dict(zip(heads, row, strict=True)) for row in offer_rows(estimates, beside)]


def beside_line(first: Estimate, second: Estimate, offer: Against) -> str:
    """The ratios in a sentence; says so where a step is of another batch."""
    other = f" with {offer.batch:.3g} of the batch" if offer.batch != 1 else ""
    cost = f", money {ratio_text(offer.cost)}" if offer.cost else ""
    return (
        f"{place(second)} against {place(first)}: "
        f"{speed_unit(first)} {ratio_text(offer.tokens_per_s)}, "
        f"step time {ratio_text(offer.step_time)}{other}{cost}"
    )


def ratio_text(ratio: Ratio) -> str:
    """A ratio with its 80 % interval."""
    return f"{ratio.value:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"
