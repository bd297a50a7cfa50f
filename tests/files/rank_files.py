"""Step files of all ranks of a run, as the built-in trainer writes them for the run's settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.core.run import RunSpec
from paceline.files.documents import write_text
from tests.files.test_events import END, START, STEP, lines


def write_ranks(
    folder: Path,
    spec: RunSpec,
    steps: Iterable[Mapping[str, Any]],
    *,
    changes: Mapping[int, Mapping[str, Any]] | None = None,
    ended: bool = True,
    first_step: int = 1,
    **start: Any,
) -> None:
    """Write the file of every rank: the same `steps`, with the fields of all start lines.

    `changes` are the fields of one rank's start line, or its own list of `steps`.
    """
    training, size = spec.training, spec.world_size
    samples = training.global_batch / size
    batch = {
        "samples": samples,
        "tokens": samples * training.seq_len,
        "seq_len": training.seq_len,
        "global_batch": training.global_batch,
    }
    facts = {"world_size": size, "num_parameters": spec.num_parameters, "first_step": first_step}
    steps = list(steps)
    for rank in range(size):
        own = dict((changes or {}).get(rank, {}))
        own_steps = list(own.pop("steps", steps))
        events = [
            {**STEP, **batch, "step": number, **_half_busy(step), **step}
            for number, step in enumerate(own_steps, first_step)
        ]
        seconds = sum(event["step_time_s"] for event in events)
        end = {**END, "steps": len(events), "time_unix": START["time_unix"] + seconds}
        begin = {**START, **facts, "rank": rank, **start, **own}
        text = "".join(lines(begin, *events, *([end] if ended else [])))
        write_text(folder / "steps" / f"rank-{rank:05d}.jsonl", text)


def _half_busy(step: Mapping[str, Any]) -> dict[str, float]:
    return {"busy_time_s": step["step_time_s"] / 2} if "step_time_s" in step else {}


def step_times(times: Iterable[float]) -> list[dict[str, float]]:
    """Steps that take these times."""
    return [{"step_time_s": float(time)} for time in times]
