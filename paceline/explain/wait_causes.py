"""Causes that keep ranks waiting; each takes the time that its wait exceeds the baseline's.

Without a baseline the whole wait counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from paceline.explain.context import DiagnosisContext, Finding, setting
from paceline.explain.explanation import CauseEvidence
from paceline.explain.step_breakdown import SPIKE

THROTTLED_SHARE = 0.1
"""Minimum share of the core waits with an exhausted quota from which the quota is the cause."""


def _data(q: DiagnosisContext) -> Iterator[Finding]:
    yield Finding(
        "data starvation",
        q.excess("data"),
        tuple(q.figures("wait for the data loader, slowest rank", "data")),
        "put the data on faster or local storage, tokenize before the run, pack samples, or use "
        "more loader processes",
    )


def _checkpoints(q: DiagnosisContext) -> Iterator[Finding]:
    spec = q.run.spec
    every = spec.checkpoint.every if spec else None
    saving = setting("steps between checkpoints", every, q.run) if every else ()
    yield Finding(
        "checkpoint stalls",
        q.excess("checkpoint"),
        (*q.figures("wait for checkpoints", "checkpoint"), *saving),
        "save less often (checkpoint.every), asynchronously (checkpoint.asynchronous=true), or "
        "to faster storage",
    )


def _slow_rank(q: DiagnosisContext) -> Iterator[Finding]:
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
    campaign = q.run.flagged_hosts.get(slow.host)
    blame = (
        (
            CauseEvidence(
                what=f"{slow.host} was flagged slow",
                value=1,
                unit="scaling test",
                n=None,
                source=f"scaling test {campaign}",
            ),
        )
        if campaign
        else ()
    )
    # Of n expert ranks, one with o times the mean load has n (o - 1) / (n - 1) more than others.
    by_load_s = q.imbalance_s * q.run.layout.ep / max(1, q.run.layout.ep - 1)
    yield Finding(
        "slow rank",
        q.excess("straggler") - by_load_s,
        (*q.figures("extra work time of the slowest rank", "straggler"), *busy, *blame),
        f"run `paceline check` on {slow.host}, exclude it (--hosts), and check its "
        "clocks, temperature and other processes",
    )


def _core_wait(q: DiagnosisContext) -> Iterator[Finding]:
    account, wait_s = q.run.account, q.excess("core_wait")
    figures = q.figures(f"wait for a CPU core, longest on rank {account.waiting_rank}", "core_wait")
    throttled_s = account.throttled_s or 0.0
    if throttled_s >= THROTTLED_SHARE * q.parts.core_wait and throttled_s > 0:
        quota = CauseEvidence(
            what="time with exhausted CPU quota, summed over cores",
            value=throttled_s,
            unit="s/step",
            n=account.n,
            source=f"cpu.stat of the control groups, {q.run.source}",
        )
        yield Finding(
            "clock limit",
            wait_s,
            (*figures, quota),
            "raise the CPU quota of the control group (cpu.max, or the CPU limit of the container "
            "or job)",
        )
    elif bound := q.run.overcommitment:
        place = CauseEvidence(
            what=bound, value=account.n, unit="steps", n=account.n, source=q.run.source
        )
        yield Finding(
            "thread binding",
            wait_s,
            (*figures, place),
            "bind each rank to its own cores (--bind auto), with at most as many threads as "
            "cores (cluster.threads_per_device)",
        )
    else:
        yield Finding(
            "other load",
            wait_s,
            tuple(figures),
            "stop other processes on the host (see `top`), or request the node exclusively",
        )


def _bubble(q: DiagnosisContext) -> Iterator[Finding]:
    layout, count = q.run.layout, q.run.num_microbatches
    if layout.pp == 1 or count is None:
        return
    yield Finding(
        "pipeline bubble",
        q.excess("bubble"),
        (
            *q.figures("stages without a micro-batch", "bubble"),
            *setting(f"micro-batches over {layout.pp} stages", count, q.run),
        ),
        "use more micro-batches per step (smaller layout.micro_batch, larger global batch), "
        "layout.schedule=zero-bubble, layout.vp=2, or fewer stages",
    )


def _communication(q: DiagnosisContext) -> Iterator[Finding]:
    # Without a baseline communication has no expected time.
    if q.base.parts is None:
        return
    yield Finding(
        "slow link",
        q.excess("communication") - max(0.0, q.dispatch_s),
        tuple(q.figures("all ranks wait for collectives", "communication")),
        "measure the link (`paceline probe collective`), check the network interface "
        "(--interface), or communicate less often (larger micro-batch or batch, other layout)",
    )


def _experts(q: DiagnosisContext) -> Iterator[Finding]:
    """Yield unequal loads of expert ranks, and slower exchanges of tokens."""
    experts, account = q.run.account.experts, q.run.account
    if experts is None:
        return

    def figure(what: str, value: float, unit: str, source: str = q.run.source) -> CauseEvidence:
        return CauseEvidence(what=what, value=value, unit=unit, n=account.n, source=source)

    step_s = q.parts.total
    exchange = figure("exchanges of tokens, least waiting rank", experts.dispatch_s, "s/step")
    yield Finding(
        "expert imbalance",
        q.imbalance_s,
        (
            figure("largest load of an expert rank, mean over layers", experts.overload, "x mean"),
            figure("time of the experts, mean over ranks", experts.experts_s, "s/step"),
            exchange,
            figure("step with equal loads", step_s - experts.imbalance_s, "s"),
            figure("tokens/s with equal loads", step_s / (step_s - experts.imbalance_s), "x"),
        ),
        "balance the router (training.router_aux_loss), spread hot experts over the ranks, or use "
        "fewer expert ranks (layout.ep)",
    )
    expected_s = q.base.dispatch_s
    if expected_s is not None:
        what = "exchanges of tokens, at equal loads"
        ours = figure(what, experts.balanced_dispatch_s, "s/step")
        expected = figure(what, expected_s, "s/step", q.base.title)
        yield Finding(
            "dispatch",
            q.dispatch_s,
            (ours, expected),
            "measure it alone (`paceline probe experts`), keep expert ranks within a node, or use "
            "larger micro-batches",
        )


def _host_gap(q: DiagnosisContext) -> Iterator[Finding]:
    # On CPUs an idle step waits for a core, which _core_wait already covers.
    if q.host_gap_s is None or q.run.facts.device == "cpu":
        return
    gaps = tuple(
        CauseEvidence(
            what="device idle, waiting for kernel launches from the CPU",
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
        "compile (training.compile=blocks), use a larger micro-batch, or free CPU cores",
    )


def _spikes(q: DiagnosisContext) -> Iterator[Finding]:
    slow = CauseEvidence(
        what=f"steps slower than {SPIKE} times the median",
        value=q.run.account.num_spikes,
        unit="steps",
        n=q.run.account.n,
        source=q.run.source,
    )
    yield Finding(
        "slow steps",
        q.excess("spikes"),
        (*q.figures("extra time of the slow steps", "spikes"), slow),
        "find what happens in these steps: evaluation, checkpoints, garbage collection, other jobs "
        "on the network or storage (`paceline runs report` shows the step times)",
    )


WAIT_CAUSES: tuple[Callable[[DiagnosisContext], Iterator[Finding]], ...] = (
    _data,
    _checkpoints,
    _slow_rank,
    _core_wait,
    _bubble,
    _communication,
    _experts,
    _host_gap,
    _spikes,
)
