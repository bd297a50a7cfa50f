"""Descriptions of a run: setup, window, progress, and advice after a failure."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import numpy.typing as npt

from paceline.core.result import Result, WindowRecord
from paceline.core.run import RunSettings
from paceline.core.run_report import RunReport
from paceline.core.shape import trainable_parameters
from paceline.core.units import count, pluralize

STATUS_ADVICE: dict[str, str] = {
    "oom": "Use a smaller layout.micro_batch or training.seq_len, a higher layout.zero_stage, "
    "layout.recompute=full, or more devices.",
    "nan": "Lower training.lr, train in bf16 or fp32, and check the last losses before the NaN.",
    "timeout": "Raise time_limit_s or lower training.steps. The end of the log shows what the run "
    "was waiting for.",
    "failed": "Read the end of the log below. The run folder has the complete log, and job.sh to "
    "start the run again.",
    "incomplete": "Start the run again, with more training.steps if it reached its end. The report "
    "shows the steps so far.",
    "cancelled": "The run was stopped by the user. Start it again for a result.",
    "running": "The run is in progress; its figures are preliminary.",
    "queued": "The run has not started yet.",
}
PROGRAM_ADVICE: dict[str, str] = {
    "oom": "Give the program smaller micro-batches, shorter sequences or more devices.",
    "nan": "Lower the learning rate, train in bf16 or fp32, and check the last losses before the "
    "NaN.",
    "timeout": "Raise time_limit_s or run fewer steps. The end of the log shows what the program "
    "was waiting for.",
    "incomplete": "Run more steps if the program reached its end. If its log has no step times, "
    "print them in a supported format or add paceline.steplog to the training loop.",
}
"""Advice for a user's own program, which recipe fields do not change."""


FABRIC_ADVICE = (
    "Fix the network settings of the nodes, the image or the cluster file. On GPUs, NCCL's log of "
    "its set-up is logs/nccl.*.log."
)
"""Advice for a run whose collectives do not use the required transport."""


def advice(report: RunReport) -> str:
    """Return what to do after a run of this status; empty after a successful run."""
    status = report.result.status
    if status == "failed" and report.result.fabric and report.result.fabric.problem:
        return FABRIC_ADVICE
    program_advice = PROGRAM_ADVICE if report.facts.engine == "command" else {}
    return program_advice.get(status) or STATUS_ADVICE.get(status, "")


def window_mask(report: RunReport) -> npt.NDArray[np.bool_]:
    """Return the mask of the steps that are in the window and have a time."""
    window = report.result.window
    has_time = np.isfinite(report.steps["step_time_s"])
    if window is None or window.first_step is None or window.last_step is None:
        return np.zeros(len(report.steps), dtype=np.bool_)
    index = report.steps.index
    return has_time & (index >= window.first_step) & (index <= window.last_step)


def describe_setup(report: RunReport) -> list[str]:
    """Return what ran in short parts: recipe, variant, engine, devices, dtype, layout, batch."""
    result, facts = report.result, report.facts
    label = f" ({facts.device_label})" if facts.device_label else ""
    n = facts.num_devices
    parts = [
        result.recipe,
        f"variant {facts.variant}" if facts.variant else None,
        f"{facts.engine} log" if facts.origin == "imported" else facts.engine,
        f"{n or 'unknown number'} x {facts.device}{label}"
        if facts.device
        else n and pluralize(n, "device"),
        facts.dtype,
        _layout(facts),
        f"seq {facts.seq_len:,} tokens" if facts.seq_len else None,
        f"global batch {pluralize(facts.global_batch, facts.batch_unit)}"
        if facts.global_batch
        else None,
        _parameters(result, facts),
        f"routing {facts.routing}" if facts.routing else None,
    ]
    return [part for part in parts if part]


def _layout(facts: RunSettings) -> str | None:
    """Return the layout as text; for a log only its axes, because few logs report more."""
    layout, n = facts.layout, facts.num_devices
    if layout is None or not n:
        return None
    return layout.label(n) if facts.origin == "imported" else layout.full_label(n)


def _parameters(result: Result, facts: RunSettings) -> str | None:
    """Return `4.93M parameters`, and for LoRA the number of trainable ones."""
    if result.num_parameters is None:
        return None
    trainable = ""
    if facts.lora and facts.model and facts.model.kind == "decoder":
        tp = facts.layout.tp if facts.layout else 1
        trainable = f", {count(trainable_parameters(facts.model, facts.lora, tp))} trained"
    return f"{count(result.num_parameters)} parameters{trainable}"


def describe_window(result: Result) -> str:
    """Return the window as text: `52 steady steps (9-60)`."""
    return "no window" if result.window is None else describe_window_record(result.window)


def describe_window_record(window: WindowRecord) -> str:
    """Return a window as text, like describe_window."""
    if window.n == 0:
        return "no steps with a time"
    if window.rule == "as printed":
        return "one value as printed by the source"
    kinds = {"steady": "steady steps", "drifting": "drifting steps", "uneven": "uneven steps"}
    kind = kinds.get(window.state, "steps")
    kind = kind.removesuffix("s") if window.n == 1 else kind
    few = ", too few for a figure" if window.state == "short" else ""
    return f"{window.n:,} {kind} ({step_range(window)}{few})"


def step_range(window: WindowRecord) -> str:
    """Return first and last step number of a window: `9-60`."""
    first, last = window.first_step or 0, window.last_step or 0
    return f"{first:,}" if first == last else f"{first:,}-{last:,}"


def describe_rule(report: RunReport) -> str:
    """Return the rule of the window, and which steps are excluded."""
    window = report.result.window
    if window is None:
        return "no window"
    parts = [f"rule {window.rule}", f"{pluralize(window.n_warmup, 'warm-up step')} left out"]
    if num_untimed := num_untimed_steps(report, window):
        parts.append(f"{pluralize(num_untimed, 'step')} without a time (used to measure memory)")
    if window.global_batch is not None and window.seq_len is not None:
        parts.append(f"global batch {window.global_batch:,} x {window.seq_len:,} tokens throughout")
    if window.drift is not None:
        # Adding 0.0 turns a rounded minus zero into zero.
        parts.append(f"drift {round(100 * window.drift, 1) + 0.0:+.1f}% over the window")
    return ", ".join(parts)


def num_untimed_steps(report: RunReport, window: WindowRecord) -> int:
    """Return the number of steps in a native run's window without a step time."""
    if report.facts.engine != "native" or window.first_step is None or window.last_step is None:
        return 0
    index, times = report.steps.index, report.steps["step_time_s"]
    inside = (index >= window.first_step) & (index <= window.last_step)
    return int((inside & ~np.isfinite(times)).sum())


def describe_time(iso_time: str | None) -> str:
    """Return an ISO time as `2026-11-20 14:03:12 UTC`; other text unchanged."""
    try:
        return f"{datetime.fromisoformat(iso_time or '').astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    except ValueError:
        return iso_time or ""


def progress(result: Result) -> str:
    """Return the number of completed steps of those requested."""
    num_steps = result.resumed_after + result.steps_done
    resumed_text = (
        f", the first {result.resumed_after:,} by an earlier run" if result.resumed_after else ""
    )
    if result.steps_requested:
        return f"{num_steps:,} of {pluralize(result.steps_requested, 'step')} done{resumed_text}"
    return f"{pluralize(num_steps, 'step')} done{resumed_text}"
