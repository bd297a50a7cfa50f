"""Logs of MLPerf runs as launch scripts write them, for tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TARGETS = {
    "llama2_70b_lora": 0.925,
    "llama31_8b": 3.3,
    "flux1": 0.586,
    "gpt_oss_20b": 3.34,
    "deepseekv3_671b": 3.6,
}
EPOCH_MS = 1_760_000_000_000


def line(key: str, value: Any = None, time_ms: float = EPOCH_MS, **metadata: Any) -> str:
    """One result line."""
    record = {
        "namespace": "",
        "time_ms": time_ms,
        "event_type": "POINT_IN_TIME",
        "key": key,
        "value": value,
        "metadata": {"file": "train.py", "lineno": 1, **metadata},
    }
    return f":::MLLOG {json.dumps(record)}"


def trial(
    number: int = 0,
    *,
    minutes: float | None = 10.0,
    samples: int = 3456,
    benchmark: str = "llama2_70b_lora",
    batch: int = 8,
    status: str = "success",
    quality: float | None = None,
    org: str = "Example",
    seed: int | None = None,
    prefix: str = " 0: ",
) -> str:
    """One run; without `minutes` it is cut short behind its first block."""
    start = EPOCH_MS + number * 7_200_000
    run = start + 120_000
    reached = TARGETS[benchmark] - 0.001 if quality is None else quality
    lines = [
        '+ echo \':::SYSJSON {"number_of_nodes": "2"}\'',
        ":::DLPAL image 1 2 host[1-2] cluster config_2x8x1xtp1pp1cp1",
        line("cache_clear", True, start - 10),
        line("init_start", None, start),
        line("init_start", None, start + 1),
        line("submission_benchmark", benchmark, start + 2),
        line("submission_org", org, start + 2),
        line("submission_platform", "2xBox", start + 2),
        line("submission_division", "closed", start + 2),
        line("seed", 100 + number if seed is None else seed, start + 3),
        line("global_batch_size", batch, start + 3),
        line("init_stop", None, run - 1),
        line("run_start", None, run),
        line("tracked_stats", {"train_step_time": 2.0}, run + 9, step=48, samples_count=384),
    ]
    if minutes is not None:
        stop = run + minutes * 60_000
        lines += [
            line("eval_accuracy", 9.0, run + 10, samples_count=384),
            line("tracked_stats", {"train_step_time": 2.0}, stop - 5, step=96, samples_count=768),
            line("eval_accuracy", reached, stop - 1, samples_count=samples),
            line("run_stop", None, stop, samples_count=samples, status=status),
        ]
    return "".join(f"{prefix}{text}\n" for text in lines)


def submission(folder: Path, minutes: Sequence[float | None], **settings: Any) -> Path:
    """A folder of results, one a file, numbered from 0."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, value in enumerate(minutes):
        text = trial(number, minutes=value, **settings)
        (folder / f"result_{number}.txt").write_text(text)
    return folder


TEN = [10.0, 10.5, 11.0, 9.0, 10.0, 10.0, 10.0, 10.0, 10.0, 13.0]
"""Minutes of ten runs: the mean of the middle eight is 10.1875."""
