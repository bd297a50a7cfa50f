"""Causes that make the ranks' own work longer, divided among what differs in how they do it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from paceline.core.flops import hardware_flops_per_token, model_flops_per_token
from paceline.core.memory import memory_per_device
from paceline.core.result import finite_value
from paceline.explain.explanation import CauseEvidence, CauseName
from paceline.explain.inquiry import Finding, Inquiry, setting
from paceline.explain.observed import ObservedRun
from paceline.machines.placement import find_device

BEYOND_ERROR = 3.0
"""Standard errors that a change of the ranks' own work must exceed."""
SYSTEM_CHANGE = 0.05
"""Growth of the kernel's share of processor time from which the allocator is asked about."""
CLOCK_CHANGE = 0.03
"""Relative; a clock that is less lower explains nothing."""
LOW_CLOCK = 0.75
"""Of the highest clock: a device under load need not run at that, but hardly below this."""
FITS = 0.9
"""Of the device's memory, which the static bound may take for a layout to be advised."""


def of_work(q: Inquiry) -> Iterator[Finding]:
    """What makes the ranks' own work longer; each takes what those before it have left."""
    if q.base.parts is None:
        yield from avoidable_recompute(q)
        return
    left = q.excess("compute")
    noise = BEYOND_ERROR * (q.run.account.error_s**2 + q.base.error_s**2) ** 0.5
    if left <= noise:
        return
    figures = tuple(q.figures("the ranks' own work", "compute"))
    for look in OF_WORK:
        for name, seconds, evidence, remedy in look(q, left):
            yield Finding(name, seconds, (*figures, *evidence), remedy)
            left -= seconds


Piece = tuple[CauseName, float, tuple[CauseEvidence, ...], str]


def _recompute(q: Inquiry, left: float) -> Iterator[Piece]:
    other = q.base.run
    if other is None:
        return
    more = recomputed_share(q.run) - recomputed_share(other)
    if more <= 0:
        return
    alone = q.run.layout.micro_batch == other.layout.micro_batch
    seconds = left if alone else min(left, more * q.parts.compute)
    yield "recompute", seconds, (_again(q.run), _again(other)), LESS_RECOMPUTE


def _threads(q: Inquiry, left: float) -> Iterator[Piece]:
    ours, theirs = q.run.threads, q.base.run.threads if q.base.run else None
    if ours is None or theirs is None or ours >= theirs:
        return
    remedy = "give each rank as many threads as it has cores (cluster.threads_per_device)"
    yield "thread binding", left, setting("threads a rank", ours, q.run), remedy


def _clock(q: Inquiry, left: float) -> Iterator[Piece]:
    clock, other = q.run.clock, q.base.run.clock if q.base.run else None
    if clock is None:
        return
    usual = other[0] if other else (clock[1] or 0.0) * LOW_CLOCK
    if not usual or clock[0] > usual * (1 - CLOCK_CHANGE):
        return
    seconds = min(left, q.parts.compute * (1 - clock[0] / usual))
    mean = CauseEvidence(
        what="mean clock of the devices", value=clock[0], unit="MHz", n=clock[2], source="telemetry"
    )
    than = CauseEvidence(
        what="usual clock",
        value=usual,
        unit="MHz",
        n=other[2] if other else None,
        source=q.base.title if other else f"{LOW_CLOCK} of the highest",
    )
    remedy = "look at power limit, temperature and application clocks of the devices"
    yield "clock limit", seconds, (mean, than), remedy


def _micro_batch(q: Inquiry, left: float) -> Iterator[Piece]:
    other = q.base.run
    if other is None or q.run.layout.micro_batch >= other.layout.micro_batch:
        return
    sizes = (
        *setting("sequences of a micro-batch", q.run.layout.micro_batch, q.run),
        *setting("sequences of a micro-batch", other.layout.micro_batch, other),
    )
    yield "small micro-batch", left, sizes, "a larger layout.micro_batch, as far as memory allows"


def _allocator(q: Inquiry, left: float) -> Iterator[Piece]:
    ours, other = q.run.account.system_share, q.base.run
    theirs = other.account.system_share if other else None
    if ours is None or theirs is None or ours - theirs < SYSTEM_CHANGE:
        return
    share = CauseEvidence(
        what="processor time inside the kernel",
        value=ours,
        unit="fraction",
        n=q.run.account.n,
        source=q.run.source,
    )
    before = CauseEvidence(
        what="processor time inside the kernel",
        value=theirs,
        unit="fraction",
        n=other.account.n if other else None,
        source=q.base.title,
    )
    remedy = (
        "have the allocator keep freed memory (MALLOC_*, LD_PRELOAD of another allocator, "
        "transparent huge pages; PYTORCH_ALLOC_CONF on GPUs)"
    )
    yield "memory allocator", left, (share, before), remedy


OF_WORK: tuple[Callable[[Inquiry, float], Iterator[Piece]], ...] = (
    _recompute,
    _threads,
    _clock,
    _micro_batch,
    _allocator,
)
"""In this order: what a setting says before what is measured beside it."""
LESS_RECOMPUTE = (
    "layout.recompute=none or selective if memory allows, or shard more (ZeRO, tensor parallelism)"
)


def avoidable_recompute(q: Inquiry) -> Iterator[Finding]:
    """Recomputation that memory does not ask for, by the static bound."""
    share, limit = recomputed_share(q.run), _memory_limit(q.run)
    needed = _memory_without(q.run)
    if not share or limit is None or needed is None or needed > FITS * limit:
        return
    bound = CauseEvidence(
        what="static memory bound without it, of the device's memory",
        value=needed / limit,
        unit="fraction",
        n=None,
        source="paceline.core.memory",
    )
    seconds = share * q.parts.compute
    yield Finding("recompute", seconds, (_again(q.run), bound), LESS_RECOMPUTE)


def _again(run: ObservedRun) -> CauseEvidence:
    return CauseEvidence(
        what="work that is done again, by FLOPs",
        value=recomputed_share(run),
        unit="fraction",
        n=None,
        source=f"layout.recompute={run.layout.recompute}, run {run.result.run}",
    )


def recomputed_share(run: ObservedRun) -> float:
    """Share of the executed FLOPs that are recomputed, 0-1; 0 where it is not known."""
    x, convention = run.facts.flops_input, run.facts.flops_convention
    if x is None or convention is None or x.recompute == "none":
        return 0.0
    x = x.attending(finite_value(run.result.metrics.get("attended_share")))
    executed = hardware_flops_per_token(convention, x)
    return 1 - model_flops_per_token(convention, x) / executed


def _memory_limit(run: ObservedRun) -> float | None:
    device = find_device(run.facts.device) if run.facts.device else None
    return run.facts.device_memory_bytes or (device.memory_bytes if device else None)


def _memory_without(run: ObservedRun) -> float | None:
    """Bytes of the static bound without recomputation; None where it cannot be computed."""
    spec = run.spec
    if spec is None:
        return None
    layout = spec.layout.model_copy(update={"recompute": "none"})
    return memory_per_device(replace(spec.parallel, layout=layout)).total_bytes
