"""Runs made by hand: realistic step series through the package's own measurement."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, get_args

import numpy as np

from paceline.compare.judge import single_run_verdict
from paceline.core.hardware import Cluster
from paceline.core.layout import Layout
from paceline.core.metrics import measure
from paceline.core.ranks import find_straggler, merge_ranks, rank_summaries
from paceline.core.result import (
    MemoryByPart,
    RankMemory,
    ReferenceComparison,
    Result,
    RunVerdict,
    Status,
    WaterfallLevel,
)
from paceline.core.run import RunSettings, RunSpec
from paceline.core.run_report import RunReport
from paceline.core.shape import DecoderShape
from paceline.core.steps import Step, Steps
from paceline.core.timed_run import timed_run
from paceline.core.training import Data, Training
from paceline.core.units import GIB, MIB
from paceline.core.window import steady_window
from paceline.report.html import render_document
from paceline.report.run_document import run_document

SEQ_LEN = 256
BATCH_PER_RANK = 8
STATUSES: tuple[Status, ...] = get_args(Status)
REASONS = {
    "oom": "Rank 1 ran out of memory: 2.00 GiB asked for, 0.71 GiB free.",
    "nan": "The loss of rank 0 became NaN at step 41.",
    "timeout": "The time limit of 600 s ended the run.",
    "failed": "Rank 1 ended with exit code 1.",
}
HOSTILE = "</script><img src=x onerror=alert(1)>"


def spec(num_ranks: int = 2, steps: int = 60) -> RunSpec:
    """A small Llama on `num_ranks` processes of a CPU."""
    return RunSpec(
        recipe="tiny-llama",
        model=DecoderShape(
            num_layers=4,
            hidden_size=256,
            num_heads=8,
            num_kv_heads=4,
            ffn_size=768,
            vocab_size=512,
            gated_ffn=True,
            activation="silu",
            norm="rmsnorm",
            positions="rope",
            max_positions=256,
            bias=False,
            tied_embeddings=False,
        ),
        training=Training(
            seq_len=SEQ_LEN, steps=steps, global_batch=BATCH_PER_RANK * num_ranks, dtype="bf16"
        ),
        data=Data(source="stdlib"),
        layout=Layout(micro_batch=8),
        cluster=Cluster(
            name="here",
            device="cpu",
            device_label="Epyc 9654",
            devices_per_node=num_ranks,
            device_memory_bytes=8 * GIB,
        ),
    )


def rank_steps(
    num_ranks: int = 2, num_steps: int = 60, slow_rank: int | None = None, seed: int = 5
) -> dict[int, Steps]:
    """Steps of every rank: a slow start, correlated noise, rare spikes; collectives equalise."""
    rng = np.random.default_rng(seed)
    number = np.arange(num_steps)
    warm = 1 + 1.9 * np.exp(-number / 0.6) + 0.05 * np.exp(-number / 2.5)
    noise = np.zeros((num_ranks, num_steps))
    for step in range(1, num_steps):
        noise[:, step] = 0.4 * noise[:, step - 1] + rng.normal(0, 0.004, num_ranks)
    busy = 0.219 * warm * (1 + noise)
    busy[:, rng.random(num_steps) < 0.03] *= 1.12
    if slow_rank is not None:
        busy[slow_rank] *= 1.021
    step_time = busy.max(axis=0) + 0.011 + rng.gamma(4.0, 0.0002, num_steps)
    loss = 2.6 + 3.6 * np.exp(-number / 18) + rng.normal(0, 0.03, (num_ranks, num_steps))
    return {
        rank: Steps.of(
            Step(
                index=int(i) + 1,
                step_time_s=float(step_time[i]),
                loss=float(loss[rank, i]),
                grad_norm=1.0,
                tokens=SEQ_LEN * BATCH_PER_RANK,
                samples=BATCH_PER_RANK,
                global_batch=BATCH_PER_RANK * num_ranks,
                seq_len=SEQ_LEN,
                busy_time_s=float(busy[rank, i]),
                comm_wait_s=float(step_time[i] - busy[rank, i]),
                data_wait_s=0.0002,
                resident_bytes=0.61 * GIB + rank * 2e6,
            )
            for i in range(num_steps)
        )
        for rank in range(num_ranks)
    }


def rank_memory(rank: int, resident: float = 0.61 * GIB, **changes: Any) -> RankMemory:
    """One rank's memory by part on a CPU; `changes` replace fields."""
    at_peak = {
        "weights": 13.0 * MIB,
        "gradients": 13.0 * MIB,
        "optimizer": 26.0 * MIB,
        "buffers": 2.0**15,
        "gathered": 0.0,
        "activations": 143.0 * MIB,
        "other": 0.0,
    }
    values: dict[str, Any] = {
        "rank": rank,
        "step": 2,
        "kind": "tracked",
        "watcher_bytes": 20.0 * MIB,
        "parts_bytes": {**at_peak, "context": 300.0 * MIB},
        "at_peak_bytes": at_peak,
        "peak_bytes": {"resident": resident, "tracked": sum(at_peak.values())},
        "watched_step_s": 0.4,
    }
    return RankMemory.model_validate({**values, **changes})


def memory_by_part(**changes: Any) -> MemoryByPart:
    """Two ranks' memory with a limit and the static bound; `changes` replace fields."""
    values: dict[str, Any] = {
        "largest_rank": 0,
        "ranks": (rank_memory(0), rank_memory(1)),
        "limit_bytes": 8.0 * GIB,
        "limit": "the machine's memory / processes",
        "bound_bytes": {
            "weights": 13.0 * MIB,
            "gradients": 13.0 * MIB,
            "optimizer": 26.0 * MIB,
            "gathered": 0.0,
            "activations": 78.0 * MIB,
            "context": 0.0,
        },
        "watch_cost_s": 0.18,
    }
    return MemoryByPart.model_validate({**values, **changes})


def report(
    num_ranks: int = 2, num_steps: int = 60, slow_rank: int | None = 1, **changes: Any
) -> RunReport:
    """A finished run; `changes` replace fields of its Result."""
    full = finished(num_ranks, num_steps, slow_rank)
    return replace(full, result=full.result.model_copy(update=changes)) if changes else full


@cache
def finished(num_ranks: int, num_steps: int, slow_rank: int | None) -> RunReport:
    """A finished run, measured once per test session."""
    run_spec = spec(num_ranks, num_steps)
    ranks = rank_steps(num_ranks, num_steps, slow_rank)
    hosts = {rank: f"node-{rank // 8:03d}" for rank in ranks}
    steps = merge_ranks(ranks)
    window = steady_window(steps)
    numbers = steps.index[window.rows]
    metrics = measure(
        timed_run(
            RunSettings.of(run_spec),
            steps,
            steps.select(window.rows),
            achievable_flops_per_s=2.95e11 * num_ranks,
            achievable_source="GEMMs of 2048 on this machine",
            startup_s=2.31,
        )
    )
    result = Result(
        run="2026-11-20-tiny-llama-dp2-2xcpu-3fa9c0de",
        recipe="tiny-llama",
        status="ok",
        created="2026-11-20T14:03:12Z",
        metrics=metrics,
        window=window.record,
        conventions={"flops": "causal"},
        verdict=single_run_verdict("ok", None, window.record, ()),
        ranks=rank_summaries(ranks, hosts, numbers),
        straggler=find_straggler(ranks, hosts, numbers),
        memory=memory_by_part(),
        versions={"paceline": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
        num_parameters=3_541_248,
        steps_done=num_steps,
        steps_requested=num_steps,
    )
    return RunReport(
        result=result,
        steps=steps,
        spec=run_spec,
        facts=RunSettings.of(run_spec),
        command="paceline run tiny-llama --set steps=60",
        job_script="#!/bin/sh\nset -eu\ncd runs/2026-11-20-tiny-llama\n"
        "python -m torch.distributed.run \\\n  --nproc-per-node 2 --log-dir logs \\\n"
        "  trainer/main.py job.json\n",
        inventory={
            "host": "atlas",
            "cpu": {"model": "Epyc 9654", "cores": 2, "flags": ["avx2", "avx512_bf16"]},
            "memory_bytes": 16 * GIB,
            "devices": [],
        },
        folder="runs/2026-11-20-tiny-llama-dp2-2xcpu-3fa9c0de",
        files=(
            "run.json",
            "job.sh",
            "inventory.json",
            "result.json",
            "steps.jsonl",
            "steps/rank0.jsonl",
            "steps/rank1.jsonl",
            "logs/rank0.log",
            "logs/rank1.log",
        ),
    )


def referenced_report() -> RunReport:
    """A run with three references, one of which measures otherwise."""
    references = (
        reference("tiny-llama/epyc-9654", 17_310.0, 1.021),
        reference("tiny-llama/xeon-8480", 19_204.0, 0.921),
        reference("tiny-llama/forum-post", 15_800.0, 1.119, "prints the last step, not the median"),
    )
    verdict = RunVerdict(
        kind="faster",
        sentence="2.1% faster than tiny-llama/epyc-9654 (one run against a margin of 1%; "
        "repeats would make it certain).",
    )
    run = report(references=references, verdict=verdict)
    return replace(run, waterfall=levels(), expected="Expected 0.15 s a step.")


def levels() -> tuple[WaterfallLevel, ...]:
    """From a peak of 100 GFLOP/s, 0.1 s a step, over an estimate of 0.15 s to 0.2 s measured."""
    return tuple(
        WaterfallLevel(name=name, flops_per_s=share * 1e11, share=share, lost_s=lost)
        for name, share, lost in (
            ("peak", 1.0, 0.0),
            ("GEMM efficiency", 0.8, 0.025),
            ("memory-bound work", 2 / 3, 0.025),
            ("estimated", 2 / 3, 0.0),
            ("unexplained", 0.5, 0.05),
            ("measured", 0.5, 0.0),
        )
    )


def reference(
    name: str, value: float, ratio: float | None, why_not: str | None = None
) -> ReferenceComparison:
    """One published row compared with the run."""
    return ReferenceComparison(
        reference=name,
        source="Paceline's own measurement, 2026-10",
        metric="tokens_per_s",
        reference_value=value,
        unit="tokens/s",
        ratio=ratio,
        comparable=why_not is None,
        why_not=why_not,
    )


def failed_report(status: Status = "oom", num_steps: int = 0, **changes: Any) -> RunReport:
    """A run that ended without a figure, after `num_steps` steps."""
    full = report()
    reason = REASONS.get(status, f"the run is {status}")
    tail = ("loading 1,204 files", reason, "[rank 1] exit code 1")
    result = Result(
        run=full.result.run,
        recipe="tiny-llama",
        status=status,
        reason=reason,
        log_tail=tail,
        verdict=single_run_verdict(status, reason, None, ()),
        steps_done=num_steps,
        steps_requested=60,
    )
    return replace(
        full,
        result=result.model_copy(update=changes),
        steps=full.steps.select(slice(0, num_steps)),
    )


def single_step_report() -> RunReport:
    """A run of one step: a window too short for a figure."""
    full = report()
    steps = full.steps.select(slice(0, 1))
    changes = {
        "window": steady_window(steps).record,
        "metrics": {},
        "ranks": (),
        "straggler": None,
        "steps_done": 1,
        "steps_requested": 1,
    }
    return replace(full, result=full.result.model_copy(update=changes), steps=steps)


def hostile_report(text: str = HOSTILE) -> RunReport:
    """A run in which every free text is `text`."""
    full = referenced_report()
    result = full.result
    named = {
        key: m.model_copy(update={"note": text, "source": text, "convention": text})
        for key, m in result.metrics.items()
    }
    changes: dict[str, Any] = {
        "run": text,
        "recipe": text,
        "reason": text,
        "log_tail": (text, text),
        "metrics": {**named, text: named["mfu"].model_copy(update={"value": 2.0, "unit": text})},
        "verdict": RunVerdict(kind="slower", sentence=text),
        "references": tuple(
            r.model_copy(update={"reference": text, "source": text}) for r in result.references
        ),
        "ranks": tuple(r.model_copy(update={"host": text}) for r in result.ranks),
        "versions": {text: text},
        "warnings": (text,),
    }
    assert full.spec is not None
    return RunReport(
        result=result.model_copy(update=changes),
        steps=full.steps,
        spec=full.spec.model_copy(update={"recipe": text, "variant": text}),
        facts=full.facts.model_copy(update={"recipe": text, "variant": text}),
        command=text,
        job_script=text,
        inventory={text: {text: [text]}},
        folder=text,
        files=(text, "javascript:alert(1)"),
    )


def render_html(run: RunReport) -> str:
    """The page of a run."""
    return render_document(run_document(run))
