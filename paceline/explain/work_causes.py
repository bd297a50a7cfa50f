"""Causes that make the ranks' own work longer, found by comparing settings and clocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from paceline.core.flops import hardware_flops_per_token, model_flops_per_token
from paceline.core.memory import memory_per_device
from paceline.core.result import finite_value
from paceline.explain.context import DiagnosisContext, Finding, setting
from paceline.explain.explanation import CauseEvidence, CauseName
from paceline.explain.observed_run import ObservedRun
from paceline.machines.placement import find_device

BEYOND_ERROR = 3.0
"""Standard errors that a change of the ranks' own work must exceed."""
SYSTEM_CHANGE = 0.05
"""Increase of the kernel's share of CPU time from which the allocator is suspected."""
CLOCK_CHANGE = 0.03
"""Minimum relative decrease of the clock that counts as a cause."""
LOW_CLOCK = 0.75
"""Share of the maximum clock below which a device under load counts as throttled."""
FITS = 0.9
"""Share of the device memory that the static bound may fill for a layout to be recommended."""


def work_causes(q: DiagnosisContext) -> Iterator[Finding]:
    """Yield causes of slower own work; each takes the time that earlier causes left over."""
    if q.base.parts is None:
        yield from avoidable_recompute_findings(q)
        return
    remaining_s = q.excess("compute")
    noise = BEYOND_ERROR * (q.run.account.error_s**2 + q.base.error_s**2) ** 0.5
    if remaining_s <= noise:
        return
    figures = tuple(q.figures("the ranks' own work", "compute"))
    for find in WORK_CAUSES:
        for name, seconds, evidence, remedy in find(q, remaining_s):
            yield Finding(name, seconds, (*figures, *evidence), remedy)
            remaining_s -= seconds


WorkCause = tuple[CauseName, float, tuple[CauseEvidence, ...], str]


def _recompute(q: DiagnosisContext, remaining_s: float) -> Iterator[WorkCause]:
    other = q.base.run
    if other is None:
        return
    more = recomputed_share(q.run) - recomputed_share(other)
    if more <= 0:
        return
    alone = q.run.layout.micro_batch == other.layout.micro_batch
    seconds = remaining_s if alone else min(remaining_s, more * q.parts.compute)
    yield (
        "recompute",
        seconds,
        (_recompute_evidence(q.run), _recompute_evidence(other)),
        LESS_RECOMPUTE,
    )


def _threads(q: DiagnosisContext, remaining_s: float) -> Iterator[WorkCause]:
    ours, theirs = q.run.threads, q.base.run.threads if q.base.run else None
    if ours is None or theirs is None or ours >= theirs:
        return
    remedy = "give each rank as many threads as it has cores (cluster.threads_per_device)"
    yield "thread binding", remaining_s, setting("threads per rank", ours, q.run), remedy


def _clock(q: DiagnosisContext, remaining_s: float) -> Iterator[WorkCause]:
    clock, other = q.run.clock, q.base.run.clock if q.base.run else None
    if clock is None:
        return
    normal = other[0] if other else (clock[1] or 0.0) * LOW_CLOCK
    if not normal or clock[0] > normal * (1 - CLOCK_CHANGE):
        return
    seconds = min(remaining_s, q.parts.compute * (1 - clock[0] / normal))
    mean = CauseEvidence(
        what="mean device clock", value=clock[0], unit="MHz", n=clock[2], source="telemetry"
    )
    than = CauseEvidence(
        what="normal clock",
        value=normal,
        unit="MHz",
        n=other[2] if other else None,
        source=q.base.title if other else f"{LOW_CLOCK} of the maximum",
    )
    remedy = "check the devices' power limit, temperature and application clocks"
    yield "clock limit", seconds, (mean, than), remedy


def _micro_batch(q: DiagnosisContext, remaining_s: float) -> Iterator[WorkCause]:
    other = q.base.run
    if other is None or q.run.layout.micro_batch >= other.layout.micro_batch:
        return
    sizes = (
        *setting("sequences per micro-batch", q.run.layout.micro_batch, q.run),
        *setting("sequences per micro-batch", other.layout.micro_batch, other),
    )
    yield "small micro-batch", remaining_s, sizes, "increase layout.micro_batch if memory allows"


def _allocator(q: DiagnosisContext, remaining_s: float) -> Iterator[WorkCause]:
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
        "configure the allocator to keep freed memory (MALLOC_*, LD_PRELOAD of another allocator, "
        "transparent huge pages; PYTORCH_ALLOC_CONF on GPUs)"
    )
    yield "memory allocator", remaining_s, (share, before), remedy


WORK_CAUSES: tuple[Callable[[DiagnosisContext, float], Iterator[WorkCause]], ...] = (
    _recompute,
    _threads,
    _clock,
    _micro_batch,
    _allocator,
)
"""Detectors in order: settings before measurements."""
LESS_RECOMPUTE = "set layout.recompute=none or selective if memory allows, or shard more"


def avoidable_recompute_findings(q: DiagnosisContext) -> Iterator[Finding]:
    """Yield recomputation that is not needed to fit into memory, by the static bound."""
    share, limit_bytes = recomputed_share(q.run), _memory_limit(q.run)
    needed_bytes = _memory_without(q.run)
    if (
        not share
        or limit_bytes is None
        or needed_bytes is None
        or needed_bytes > FITS * limit_bytes
    ):
        return
    bound = CauseEvidence(
        what="static memory bound without recomputation, of the device memory",
        value=needed_bytes / limit_bytes,
        unit="fraction",
        n=None,
        source="paceline.core.memory",
    )
    seconds = share * q.parts.compute
    yield Finding("recompute", seconds, (_recompute_evidence(q.run), bound), LESS_RECOMPUTE)


def _recompute_evidence(run: ObservedRun) -> CauseEvidence:
    return CauseEvidence(
        what="recomputed share of the FLOPs",
        value=recomputed_share(run),
        unit="fraction",
        n=None,
        source=f"layout.recompute={run.layout.recompute}, run {run.result.run}",
    )


def recomputed_share(run: ObservedRun) -> float:
    """Return the recomputed share of the executed FLOPs, 0-1; 0 if unknown."""
    x, convention = run.facts.flops_input, run.facts.flops_convention
    if x is None or convention is None or x.recompute == "none":
        return 0.0
    x = x.with_attended_share(finite_value(run.result.metrics.get("attended_share")))
    hardware_flops = hardware_flops_per_token(convention, x)
    return 1 - model_flops_per_token(convention, x) / hardware_flops


def _memory_limit(run: ObservedRun) -> float | None:
    device = find_device(run.facts.device) if run.facts.device else None
    return run.facts.device_memory_bytes or (device.memory_bytes if device else None)


def _memory_without(run: ObservedRun) -> float | None:
    """Return the static memory bound without recomputation in bytes; None if unknown."""
    spec = run.spec
    if spec is None:
        return None
    layout = spec.layout.model_copy(update={"recompute": "none"})
    return memory_per_device(replace(spec.parallel, layout=layout)).total_bytes
