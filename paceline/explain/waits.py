"""Causes that keep ranks from working: each takes what its wait is longer than the baseline's.

Against the run itself a wait counts whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from paceline.explain.explanation import CauseEvidence
from paceline.explain.inquiry import Finding, Inquiry, setting

THROTTLED_SHARE = 0.1
"""Of the waits for cores, in time that the quota was spent, from which the quota is to blame."""


def _data(q: Inquiry) -> Iterator[Finding]:
    yield Finding(
        "data starvation",
        q.excess("data"),
        tuple(q.figures("wait for the loader, slowest rank", "data")),
        "put the data on faster or nearer storage, tokenize before the run, pack samples, or share "
        "the loading out over more processes",
    )


def _checkpoints(q: Inquiry) -> Iterator[Finding]:
    spec = q.run.spec
    every = spec.checkpoint.every if spec else None
    saving = setting("steps between checkpoints", every, q.run) if every else ()
    yield Finding(
        "checkpoint stalls",
        q.excess("checkpoint"),
        (*q.figures("wait for the checkpoint", "checkpoint"), *saving),
        "save less often (checkpoint.every), in the background (checkpoint.asynchronous=true), or "
        "to faster storage",
    )


def _slow_rank(q: Inquiry) -> Iterator[Finding]:
    account = q.run.account
    slow = next((r for r in q.run.result.ranks if r.rank == account.slow_rank), None)
    if slow is None:
        return
    busy = [
        CauseEvidence(
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
        (
            CauseEvidence(
                what=f"{slow.host} was flagged slow",
                value=1,
                unit="campaign",
                n=None,
                source=f"campaign {campaign}",
            ),
        )
        if campaign
        else ()
    )
    yield Finding(
        "slow rank",
        q.excess("straggler"),
        (*q.figures("work of the slowest rank beyond the others'", "straggler"), *busy, *blame),
        f"run `paceline check` on {slow.host}, leave it out (--hosts), and look at its "
        "clocks, temperature and other programs",
    )


def _core_wait(q: Inquiry) -> Iterator[Finding]:
    account, waited = q.run.account, q.excess("core_wait")
    figures = q.figures(f"wait for a core, rank {account.waiting_rank} most", "core_wait")
    throttled = account.throttled_s or 0.0
    if throttled >= THROTTLED_SHARE * q.parts.core_wait and throttled > 0:
        spent = CauseEvidence(
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
        place = CauseEvidence(
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


def _bubble(q: Inquiry) -> Iterator[Finding]:
    spec, layout = q.run.spec, q.run.layout
    if layout.pp == 1 or spec is None:
        return
    count = layout.num_microbatches(spec.world_size, spec.training.global_batch)
    yield Finding(
        "pipeline bubble",
        q.excess("bubble"),
        (
            *q.figures("stages without a micro-batch", "bubble"),
            *setting(f"micro-batches over {layout.pp} stages", count, q.run),
        ),
        "more micro-batches a step (smaller layout.micro_batch, larger global batch), "
        "layout.schedule=zero-bubble, layout.vp=2, or fewer stages",
    )


def _communication(q: Inquiry) -> Iterator[Finding]:
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


def _host_gap(q: Inquiry) -> Iterator[Finding]:
    # On processor cores a step in which nothing runs waits for a core, which is told already.
    if q.host_gap_s is None or q.run.facts.device == "cpu":
        return
    gaps = tuple(
        CauseEvidence(
            what="nothing runs on the device, the program has not given it work",
            value=profile.host_gap,
            unit="of the step",
            n=profile.n,
            source=profile.source,
        )
        for profile in (q.profile, q.base.profile)
        if profile is not None
    )
    yield Finding(
        "host gap",
        q.host_gap_s,
        gaps,
        "compile (training.compile=blocks), make the micro-batch larger, or free the host's cores",
    )


WAITS: tuple[Callable[[Inquiry], Iterator[Finding]], ...] = (
    _data,
    _checkpoints,
    _slow_rank,
    _core_wait,
    _bubble,
    _communication,
    _host_gap,
)
