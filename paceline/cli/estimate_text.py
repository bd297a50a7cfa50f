"""An estimate in words, and as one line of a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.estimate.costs import Bill, Saving
    from paceline.estimate.estimate import Estimate, Measured
    from paceline.estimate.trace import Tracing


def flat(one: Estimate) -> dict[str, Any]:
    """The estimate's figures side by side, for csv and md."""
    content = one.model_dump(mode="json")
    parts, costs = content.pop("parts"), content.pop("bill") or {}
    memory = content.pop("memory_bytes")
    content |= {
        f"memory_{name}_bytes": memory[name] for name in ("allocated", "reserved", "device_used")
    }
    content["notes"] = "; ".join(content["notes"])
    del content["waterfall"]
    measured = content.pop("measured") or {}
    content |= {
        f"measured_{name}": measured.get(name) for name in ("step_time_s", "ratio", "in_interval")
    }
    content |= {f"{name}_rests_on": kind for name, kind in content.pop("evidence").items()}
    saving = costs.pop("checkpoints", None) or {}
    saving = {f"checkpoint_{name}": value for name, value in saving.items() if name != "goodput"}
    return {**content, **{f"{name}_s": value for name, value in parts.items()}, **costs, **saving}


def text(one: Estimate) -> str:
    """All that is known of one offer, a line a subject."""
    from paceline.core.units import percent, si

    shown = sorted(one.parts.items(), key=lambda item: -item[1])
    shares = ", ".join(
        f"{name} {percent(value / one.step_time_s, 1)}"
        for name, value in shown
        if value >= 0.005 * one.step_time_s
    )
    share = "MFU unknown" if one.mfu is None else f"MFU {percent(one.mfu, 1)}"
    lines = [
        f"{one.recipe} · {one.devices} x {one.device} · {one.dtype} · {one.layout} · {one.stack}",
        f"  step {one.step_time_s:.4g} s   80 % interval {one.low_s:.4g}-{one.high_s:.4g} s",
        *([f"  {_measured_line(one.measured)}"] if one.measured else []),
        f"  {one.tokens_per_s:,.0f} tokens/s · {one.samples_per_s:.4g} samples/s · "
        f"{si(one.flops_per_s_per_device, 'FLOP/s')} a device · {share} ({one.convention})",
        f"  of the step: {shares}",
        f"  peak to {one.waterfall[-1].name.replace('estimated', 'estimate')}: {_levels(one)}",
        f"  {_memory_line(one)}",
    ]
    lines += [f"  {line}" for line in _bill_lines(one.bill)]
    lines += [f"  note: {note}" for note in one.notes]
    basis = one.evidence.model_dump()
    lines.append(f"  rests on: {basis.pop('title')}")
    kinds = [f"{name.replace('_', ' ')}: {kind}" for name, kind in basis.items()]
    return "\n".join([*lines, f"  {', '.join(kinds)}"])


def _measured_line(one: Measured) -> str:
    """What was measured, of what, and how far the estimate is off."""
    from paceline.core.units import percent

    of = "" if one.n is None else f", median of {one.n:,} steps"
    spread = "" if one.spread is None else f", spread {percent(one.spread, 1)}"
    where = "in" if one.in_interval else "outside"
    return (
        f"measured {one.step_time_s:.4g} s ({one.source}{of}{spread}): {one.ratio:.3f} of the "
        f"estimate, {where} the 80 % interval"
    )


def _levels(one: Estimate) -> str:
    """What is left of the peak after each cause, in turn."""
    from paceline.core.units import percent

    return ", ".join(f"{level.name} {percent(level.share, 1)}" for level in one.waterfall)


def _memory_line(one: Estimate) -> str:
    from paceline.core.units import gib, percent
    from paceline.estimate.memory.device_memory import verdict

    used, chance = one.memory_bytes, "unknown size"
    if one.p_oom is not None:
        chance = f"P(out of memory) {percent(one.p_oom, 0)}: {verdict(one.p_oom)}"
    return (
        f"memory of the fullest device {gib(used.device_used)} (allocated {gib(used.allocated)}, "
        f"reserved {gib(used.reserved)}) · {chance}"
    )


def trace_lines(tracing: Tracing) -> list[str]:
    """The followed ranks, most needy first."""
    from paceline.core.units import gib, percent

    told: list[str] = []
    for one in sorted(tracing.stages, key=lambda stage: -stage.trace.peak_bytes):
        parts = sorted(one.trace.at_peak_bytes.items(), key=lambda item: -item[1])
        shown = ", ".join(f"{name} {gib(value)}" for name, value in parts if value)
        told.append(
            f"followed rank {one.trace.rank} of {tracing.devices} (native trainer, {one.trace.kernels} "
            f"kernels, live tensors): {gib(one.trace.peak_bytes)} = {shown}; the formulas say "
            f"{gib(one.estimated_bytes)}, {percent(abs(one.ratio - 1), 1)} {'more' if one.ratio > 1 else 'less'}"
        )
    return told


def _bill_lines(costs: Bill | None) -> list[str]:
    from paceline.core.units import count, percent

    if costs is None:
        return []
    told = [f"{costs.days:,.1f} days", f"{costs.device_hours:,.0f} device hours"]
    if costs.goodput is not None:
        told.append(f"goodput {percent(costs.goodput, 1)}")
    if costs.cost is not None:
        told.append(f"cost {costs.cost:,.0f}")
    if costs.spot_cost is not None:
        told.append(f"spot {costs.spot_cost:,.0f}")
    if costs.energy_kwh is not None:
        told.append(f"at most {costs.energy_kwh:,.0f} kWh")
    if costs.carbon_kg is not None:
        told.append(f"{costs.carbon_kg:,.0f} kg CO2")
    lines = [f"{count(costs.total_tokens)} tokens: {', '.join(told)}"]
    return lines + ([_saving_line(costs.checkpoints)] if costs.checkpoints else [])


def _saving_line(saving: Saving) -> str:
    """How often the state is saved, and what Young's interval would leave."""
    from paceline.core.units import percent

    own, young = (_seconds(s) for s in (saving.interval_s, saving.young_interval_s))
    if saving.interval_s == saving.young_interval_s:
        return f"a checkpoint every {own} of training (Young's interval, which loses least)"
    return (
        f"a checkpoint every {own} of training; every {young} (Young's interval) "
        f"the goodput would be {percent(saving.young_goodput, 1)}"
    )


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s"
