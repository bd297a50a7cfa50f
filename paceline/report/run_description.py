"""A run in words: its setup, its window, how far it came, and what to do after a failure."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import numpy.typing as npt

from paceline.core.result import Result, WindowRecord
from paceline.core.run import RunSettings
from paceline.core.run_report import RunReport
from paceline.core.shape import trainable_parameters
from paceline.core.units import count, counted

STATUS_ADVICE: dict[str, str] = {
    "oom": "Use a smaller layout.micro_batch or training.seq_len, a higher layout.zero_stage, "
    "layout.recompute=full, or more devices.",
    "nan": "Lower training.lr, train in bf16 or fp32, and look at the last losses before the NaN.",
    "timeout": "Raise time_limit_s or ask for fewer training.steps; the log's end shows what it "
    "waited for.",
    "failed": "Read the log's end below; the whole log is in the run folder, and job.sh repeats "
    "the start.",
    "incomplete": "Start it again, with more training.steps if it came to its end; what it has "
    "is shown.",
    "cancelled": "It was stopped on request; start it again for a figure.",
    "running": "It is still running; the figures are preliminary.",
    "queued": "It has not started yet.",
}
PROGRAM_ADVICE: dict[str, str] = {
    "oom": "Give the program smaller micro-batches, shorter sequences or more devices.",
    "nan": "Lower its learning rate, train in bf16 or fp32, and look at the last losses before the "
    "NaN.",
    "timeout": "Raise time_limit_s or let the program take fewer steps; the log's end shows what "
    "it waited for.",
    "incomplete": "Let the program take more steps if it came to its end; where its log tells "
    "none, `paceline.steplog` in its loop does. What it has is shown.",
}
"""Of a program of the user's own, which no field of a recipe changes."""


def advice(report: RunReport) -> str:
    """What to do after a run of this status; empty after a good one."""
    status = report.result.status
    program_advice = PROGRAM_ADVICE if report.facts.engine == "command" else {}
    return program_advice.get(status) or STATUS_ADVICE.get(status, "")


def window_mask(report: RunReport) -> npt.NDArray[np.bool_]:
    """Which of the report's steps lie in its window and have a time."""
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
        else n and counted(n, "device"),
        facts.dtype,
        _layout(facts),
        f"seq {facts.seq_len:,} tokens" if facts.seq_len else None,
        f"global batch {counted(facts.global_batch, facts.batch_of)}"
        if facts.global_batch
        else None,
        _parameters(result, facts),
    ]
    return [part for part in parts if part]


def _layout(facts: RunSettings) -> str | None:
    """The layout in words; of a log its axes, because few logs state the rest."""
    layout, n = facts.layout, facts.num_devices
    if layout is None or not n:
        return None
    return layout.label(n) if facts.origin == "imported" else layout.full_label(n)


def _parameters(result: Result, facts: RunSettings) -> str | None:
    """`4.93M parameters`, and with adapters how many of them are trained."""
    if result.num_parameters is None:
        return None
    trainable = ""
    if facts.lora and facts.model and facts.model.kind == "decoder":
        tp = facts.layout.tp if facts.layout else 1
        trainable = f", {count(trainable_parameters(facts.model, facts.lora, tp))} trained"
    return f"{count(result.num_parameters)} parameters{trainable}"


def describe_window(result: Result) -> str:
    """The window in words: `52 steady steps (9-60)`."""
    return "no window" if result.window is None else describe_window_record(result.window)


def describe_window_record(window: WindowRecord) -> str:
    """A window in words, as describe_window."""
    if window.n == 0:
        return "no steps with a time"
    if window.rule == "as printed":
        return "one figure as the source prints it"
    kinds = {"steady": "steady steps", "drifting": "drifting steps", "uneven": "uneven steps"}
    kind = kinds.get(window.state, "steps")
    kind = kind.removesuffix("s") if window.n == 1 else kind
    few = ", too few for a figure" if window.state == "short" else ""
    return f"{window.n:,} {kind} ({step_range(window)}{few})"


def step_range(window: WindowRecord) -> str:
    """First and last step number of a window that has steps: `9-60`."""
    first, last = window.first_step or 0, window.last_step or 0
    return f"{first:,}" if first == last else f"{first:,}-{last:,}"


def describe_rule(report: RunReport) -> str:
    """By which rule the window was chosen and what was left out."""
    window = report.result.window
    if window is None:
        return "no window"
    parts = [f"rule {window.rule}", f"{counted(window.n_warmup, 'warm-up step')} left out"]
    if num_untimed := num_untimed_steps(report, window):
        parts.append(
            f"{counted(num_untimed, 'step')} inside not timed (one is watched for its memory)"
        )
    if window.global_batch is not None and window.seq_len is not None:
        parts.append(f"global batch {window.global_batch:,} x {window.seq_len:,} tokens throughout")
    if window.drift is not None:
        # Adding 0.0 turns a rounded minus zero into zero.
        parts.append(f"drift {round(100 * window.drift, 1) + 0.0:+.1f}% over the window")
    return ", ".join(parts)


def num_untimed_steps(report: RunReport, window: WindowRecord) -> int:
    """How many of a native run's steps within the window have no time of their own."""
    if report.facts.engine != "native" or window.first_step is None or window.last_step is None:
        return 0
    index, times = report.steps.index, report.steps["step_time_s"]
    inside = (index >= window.first_step) & (index <= window.last_step)
    return int((inside & ~np.isfinite(times)).sum())


def describe_time(iso_time: str | None) -> str:
    """An ISO time as `2026-11-20 14:03:12 UTC`; what is no such time as it is."""
    try:
        return f"{datetime.fromisoformat(iso_time or '').astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    except ValueError:
        return iso_time or ""


def progress(result: Result) -> str:
    """How many steps were done of those asked for."""
    num_steps = result.resumed_after + result.steps_done
    resumed_text = (
        f", the first {result.resumed_after:,} by an earlier run" if result.resumed_after else ""
    )
    if result.steps_asked:
        return f"{num_steps:,} of {counted(result.steps_asked, 'step')} done{resumed_text}"
    return f"{counted(num_steps, 'step')} done{resumed_text}"
