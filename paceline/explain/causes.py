"""What can slow a run: one function a cause, each with its evidence and what to try.

A cause takes what its part of the step is longer than the baseline's; against the run itself a wait
counts whole. The ranks' own work is divided among what differs in how they do it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from paceline.core.flops import hardware_flops_per_token, model_flops_per_token
from paceline.core.memory import memory_per_device
from paceline.explain.account import Parts
from paceline.explain.baseline import Baseline
from paceline.explain.explanation import Cause, CauseName, Evidence
from paceline.explain.observed import ObservedRun
from paceline.machines.placement import find_device

NAMED_SHARE = 0.05
"""Of the step: what takes less is not worth a name."""
NAMED_ALONE = 0.1
"""The same where no baseline tells how much is usual."""
BEYOND_ERROR = 3.0
"""Standard errors that a change of the ranks' own work must exceed."""
THROTTLED_SHARE = 0.1
"""Of the waits for cores, in time that the quota was spent, from which the quota is to blame."""
SYSTEM_CHANGE = 0.05
"""Growth of the kernel's share of processor time from which the allocator is asked about."""
CLOCK_CHANGE = 0.03
"""Relative; a clock that is less lower explains nothing."""
LOW_CLOCK = 0.75
"""Of the highest clock: a device under load need not run at that, but hardly below this."""
FITS = 0.9
"""Of the device's memory, which the static bound may take for a layout to be advised."""


@dataclass(frozen=True)
class Question:
    """A run, what it is held against, and what a profile tells of it."""

    run: ObservedRun
    base: Baseline
    profile: Mapping[str, float]

    @property
    def parts(self) -> Parts:
        return self.run.account.parts

    def excess(self, name: str) -> float:
        """Seconds that a part is longer than the baseline's."""
        past = getattr(self.base.parts, name) if self.base.parts else 0.0
        return getattr(self.parts, name) - past

    def figures(self, what: str, name: str) -> list[Evidence]:
        """A part of the run's step, and the same of the baseline where that is known."""
        account, base = self.run.account, self.base
        ours = Evidence(
            what=what,
            value=getattr(self.parts, name),
            unit="s/step",
            n=account.n,
            source=self.run.source,
        )
        if base.parts is None:
            return [ours]
        n = base.run.account.n if base.run else None
        value = getattr(base.parts, name)
        return [ours, Evidence(what=what, value=value, unit="s/step", n=n, source=base.title)]


@dataclass(frozen=True)
class Finding:
    """A cause before its share is known."""

    cause: CauseName
    seconds: float
    evidence: tuple[Evidence, ...]
    remedy: str

    def of(self, lost_s: float) -> Cause:
        """The cause, of so much lost time."""
        seconds = min(self.seconds, lost_s)
        return Cause(
            cause=self.cause,
            share=seconds / lost_s,
            seconds=seconds,
            evidence=self.evidence,
            remedy=self.remedy,
        )


def findings(question: Question) -> list[Finding]:
    """Everything that takes enough of the step to be named, the largest first."""
    alone = question.base.step_s is None
    least = (NAMED_ALONE if alone else NAMED_SHARE) * question.parts.total
    named = [f for look in WAITS for f in look(question) if f.seconds >= least]
    named += [f for f in _of_work(question) if f.seconds >= least]
    return sorted(named, key=lambda finding: -finding.seconds)


def _data(q: Question) -> Iterator[Finding]:
    yield Finding(
        "data starvation",
        q.excess("data"),
        tuple(q.figures("wait for the loader, slowest rank", "data")),
        "put the data on faster or nearer storage, tokenize before the run, pack samples, or share "
        "the loading out over more processes",
    )


def _checkpoints(q: Question) -> Iterator[Finding]:
    spec = q.run.spec
    every = spec.checkpoint.every if spec else None
    setting = _setting("steps between checkpoints", every, q.run) if every else ()
    yield Finding(
        "checkpoint stalls",
        q.excess("checkpoint"),
        (*q.figures("wait for the checkpoint", "checkpoint"), *setting),
        "save less often (checkpoint.every), in the background (checkpoint.asynchronous=true), or "
        "to faster storage",
    )


def _slow_rank(q: Question) -> Iterator[Finding]:
    account = q.run.account
    slow = next((r for r in q.run.result.ranks if r.rank == account.slow_rank), None)
    if slow is None:
        return
    busy = [
        Evidence(
            what=f"median busy time of rank {rank.rank} ({rank.host})",
            value=rank.busy_time_s,
            unit="s/step",
            n=account.n,
            source=q.run.source,
        )
        for rank in (slow, *(r for r in q.run.result.ranks if r.stage == slow.stage and r != slow))
        if rank.busy_time_s is not None
    ][:4]
    campaign = q.run.blamed.get(slow.host)
    blame = (
        Evidence(what=f"{slow.host} was flagged slow", value=1, unit="campaign", n=None,
                 source=f"campaign {campaign}"),
    ) if campaign else ()  # fmt: skip
    yield Finding(
        "slow rank",
        q.excess("straggler"),
        (*q.figures("work of the slowest rank beyond the others'", "straggler"), *busy, *blame),
        f"run `paceline check` on {slow.host}, leave it out (--hosts), and look at its "
        "clocks, temperature and other programs",
    )


def _core_wait(q: Question) -> Iterator[Finding]:
    account, waited = q.run.account, q.excess("core_wait")
    figures = q.figures(f"wait for a core, rank {account.waiting_rank} most", "core_wait")
    throttled = account.throttled_s or 0.0
    if throttled >= THROTTLED_SHARE * q.parts.core_wait and throttled > 0:
        spent = Evidence(
            what="quota of the cores was spent, added up over cores",
            value=throttled,
            unit="s/step",
            n=account.n,
            source=f"cpu.stat of the control groups, {q.run.source}",
        )
        yield Finding(
            "clock limit",
            waited,
            (*figures, spent),
            "raise the control group's CPU quota (cpu.max, the container's or job's limit of "
            "cores)",
        )
    elif bound := q.run.overcommitted:
        place = Evidence(
            what=bound, value=account.n, unit="steps", n=account.n, source=q.run.source
        )
        yield Finding(
            "thread binding",
            waited,
            (*figures, place),
            "bind each rank to cores of its own (--bind auto) and give it no more threads than "
            "cores (cluster.threads_per_device)",
        )
    else:
        yield Finding(
            "other load",
            waited,
            tuple(figures),
            "end the other programs on the host, or ask for the whole node; `top` shows them",
        )


def _bubble(q: Question) -> Iterator[Finding]:
    spec, layout = q.run.spec, q.run.layout
    if layout.pp == 1 or spec is None:
        return
    count = layout.num_microbatches(spec.world_size, spec.training.global_batch)
    yield Finding(
        "pipeline bubble",
        q.excess("bubble"),
        (
            *q.figures("stages without a micro-batch", "bubble"),
            *_setting(f"micro-batches over {layout.pp} stages", count, q.run),
        ),
        "more micro-batches a step (smaller layout.micro_batch, larger global batch), "
        "layout.schedule=zero-bubble, layout.vp=2, or fewer stages",
    )


def _communication(q: Question) -> Iterator[Finding]:
    # Nobody knows what it should be without a baseline that tells it.
    if q.base.parts is None:
        return
    yield Finding(
        "slow link",
        q.excess("communication"),
        tuple(q.figures("all ranks wait for collectives", "communication")),
        "measure the link (`paceline probe collective`), look at the interface that is used "
        "(--interface), or exchange less often (larger micro-batch or batch, other layout)",
    )


def _host_gap(q: Question) -> Iterator[Finding]:
    gap = q.profile.get("host_gap")
    if gap is None:
        return
    share = Evidence(what="device idle between kernels", value=gap, unit="s/step", n=None,
                     source="profile")  # fmt: skip
    yield Finding(
        "host gap",
        gap,
        (share,),
        "compile (training.compile=blocks), make the micro-batch larger, or free the host's cores",
    )


WAITS: tuple[Callable[[Question], Iterator[Finding]], ...] = (
    _data,
    _checkpoints,
    _slow_rank,
    _core_wait,
    _bubble,
    _communication,
    _host_gap,
)


def _of_work(q: Question) -> Iterator[Finding]:
    """What makes the ranks' own work longer; each takes what those before it have left."""
    if q.base.parts is None:
        yield from _avoidable_recompute(q)
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


Piece = tuple[CauseName, float, tuple[Evidence, ...], str]


def _recompute(q: Question, left: float) -> Iterator[Piece]:
    other = q.base.run
    if other is None or q.run.layout.recompute in ("none", other.layout.recompute):
        return
    share = recomputed_share(q.run)
    alone = q.run.layout.micro_batch == other.layout.micro_batch
    seconds = left if alone else min(left, share * q.parts.compute)
    again = Evidence(what="work that is done again, by FLOPs", value=share, unit="fraction", n=None,
                     source=f"layout.recompute={q.run.layout.recompute}")  # fmt: skip
    yield "recompute", seconds, (again,), LESS_RECOMPUTE


def _threads(q: Question, left: float) -> Iterator[Piece]:
    ours, theirs = q.run.threads, q.base.run.threads if q.base.run else None
    if ours is None or theirs is None or ours >= theirs:
        return
    remedy = "give each rank as many threads as it has cores (cluster.threads_per_device)"
    yield "thread binding", left, _setting("threads a rank", ours, q.run), remedy


def _clock(q: Question, left: float) -> Iterator[Piece]:
    clock, other = q.run.clock, q.base.run.clock if q.base.run else None
    if clock is None:
        return
    usual = other[0] if other else (clock[1] or 0.0) * LOW_CLOCK
    if not usual or clock[0] > usual * (1 - CLOCK_CHANGE):
        return
    seconds = min(left, q.parts.compute * (1 - clock[0] / usual))
    mean = Evidence(what="mean clock of the devices", value=clock[0], unit="MHz", n=clock[2],
                    source="telemetry")  # fmt: skip
    than = Evidence(what="usual clock", value=usual, unit="MHz", n=other[2] if other else None,
                    source=q.base.title if other else f"{LOW_CLOCK} of the highest")  # fmt: skip
    remedy = "look at power limit, temperature and application clocks of the devices"
    yield "clock limit", seconds, (mean, than), remedy


def _micro_batch(q: Question, left: float) -> Iterator[Piece]:
    other = q.base.run
    if other is None or q.run.layout.micro_batch >= other.layout.micro_batch:
        return
    sizes = (
        *_setting("sequences of a micro-batch", q.run.layout.micro_batch, q.run),
        *_setting("sequences of a micro-batch", other.layout.micro_batch, other),
    )
    yield "small micro-batch", left, sizes, "a larger layout.micro_batch, as far as memory allows"


def _allocator(q: Question, left: float) -> Iterator[Piece]:
    ours, other = q.run.account.system_share, q.base.run
    theirs = other.account.system_share if other else None
    if ours is None or theirs is None or ours - theirs < SYSTEM_CHANGE:
        return
    share = Evidence(what="processor time inside the kernel", value=ours, unit="fraction",
                     n=q.run.account.n, source=q.run.source)  # fmt: skip
    before = Evidence(what="processor time inside the kernel", value=theirs, unit="fraction",
                      n=other.account.n if other else None, source=q.base.title)  # fmt: skip
    remedy = (
        "have the allocator keep freed memory (MALLOC_*, LD_PRELOAD of another allocator, "
        "transparent huge pages; PYTORCH_ALLOC_CONF on GPUs)"
    )
    yield "memory allocator", left, (share, before), remedy


OF_WORK: tuple[Callable[[Question, float], Iterator[Piece]], ...] = (
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


def _avoidable_recompute(q: Question) -> Iterator[Finding]:
    """Recomputation that memory does not ask for, by the static bound."""
    share, limit = recomputed_share(q.run), _memory_limit(q.run)
    needed = _memory_without(q.run)
    if not share or limit is None or needed is None or needed > FITS * limit:
        return
    again = Evidence(what="work that is done again, by FLOPs", value=share, unit="fraction", n=None,
                     source=f"layout.recompute={q.run.layout.recompute}")  # fmt: skip
    bound = Evidence(what="static memory bound without it, of the device's memory",
                     value=needed / limit, unit="fraction", n=None,
                     source="paceline.core.memory")  # fmt: skip
    seconds = share * q.parts.compute
    yield Finding("recompute", seconds, (again, bound), LESS_RECOMPUTE)


def recomputed_share(run: ObservedRun) -> float:
    """Share of the executed FLOPs that are recomputed, 0-1; 0 where it is not known."""
    x, convention = run.facts.flops_input, run.facts.flops_convention
    if x is None or convention is None or x.recompute == "none":
        return 0.0
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
    count = layout.num_microbatches(spec.world_size, spec.training.global_batch)
    training = spec.training
    bound = memory_per_device(
        spec.model, layout, spec.dp, training.seq_len, training.dtype, spec.lora, count
    )
    return bound.total_bytes


def _setting(what: str, value: float, run: ObservedRun) -> tuple[Evidence, ...]:
    source = f"settings of run {run.result.run}"
    return (Evidence(what=what, value=value, unit="", n=None, source=source),)
