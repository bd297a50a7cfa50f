"""A run whose devices tell their power has an energy of a token, and says when it was throttled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.core.hardware import Cluster
from paceline.core.result import Result
from paceline.files.documents import write_text
from paceline.runs.outcome import evaluate
from paceline.runs.run_energy import ENERGY_PER_TOKEN
from tests.example import make_spec
from tests.files.test_events import START
from tests.runs.example import STEPS, write_run

SECONDS = 12
TRAINING = make_spec(ranks=2).training
TOKENS = STEPS * TRAINING.global_batch * TRAINING.seq_len
"""Of both ranks."""


def gpu(second: int, **changes: Any) -> dict[str, Any]:
    return {"index": 0, "power_w": 500.0, "throttle": [], "ecc_uncorrected": 2} | changes


def result(
    folder: Path, by_second: dict[str, dict[str, Any]] | None = None, device: str = "H100-SXM"
) -> Result:
    """A run of SECONDS whose device tells what `gpu` does, changed in the seconds named `at_N`."""
    changes = by_second or {}
    cluster = Cluster(name="one", device=device, nodes=1, devices_per_node=2)
    write_run(folder.parent, folder.name, spec=make_spec(ranks=2, cluster=cluster))
    begin = START["time_unix"]
    for path in (folder / "steps").iterdir():
        end = {"event": "end", "status": "ok", "reason": None, "steps": STEPS}
        text = path.read_text() + json.dumps(end | {"time_unix": begin + SECONDS}) + "\n"
        write_text(path, text)
    samples = [
        {
            "event": "sample",
            "time_unix": begin + second,
            "gpus": [gpu(second, **changes.get(f"at_{second}", {}))],
        }
        for second in range(-1, SECONDS + 2)
    ]
    sources = {"gpu": "NVML power"}
    start = {"event": "telemetry", "host": "n1", "interval_s": 1, "sources": sources, "unknown": {}}
    texts = [json.dumps(line) for line in (start, *samples)]
    write_text(folder / "telemetry/n1.jsonl", "\n".join(texts) + "\n")
    return evaluate(folder).result


def test_energy_of_a_token_is_all_energy_over_all_tokens(tmp_path: Path):
    metric = result(tmp_path / "run").metrics[ENERGY_PER_TOKEN]
    assert metric.value == pytest.approx(500 * SECONDS / TOKENS)
    assert (metric.unit, metric.n, metric.source) == ("J/token", STEPS, "NVML power")
    assert (
        metric.note is not None and "Wh per million tokens; 6,000 J of gpu in 12.0 s" in metric.note
    )
    assert "power was sampled every 1 s: step times near" in metric.note


def test_the_counter_of_energy_goes_before_sampled_power(tmp_path: Path):
    counters = {f"at_{s}": {"energy_j": 1000.0 + 300 * s} for s in range(-1, SECONDS + 2)}
    metric = result(tmp_path / "run", counters).metrics[ENERGY_PER_TOKEN]
    assert metric.value == pytest.approx(300 * SECONDS / TOKENS)
    assert "power was sampled" not in (metric.note or "")
    counters["at_5"] = {}
    sampled = result(tmp_path / "other", counters).metrics[ENERGY_PER_TOKEN]
    assert sampled.value == pytest.approx(500 * SECONDS / TOKENS)


def test_a_throttled_run_and_memory_errors_are_warned_of(tmp_path: Path):
    healthy = result(tmp_path / "healthy")
    assert not any("throttled" in text or "memory error" in text for text in healthy.warnings)
    hot: dict[str, dict[str, Any]] = {
        f"at_{second}": {"throttle": ["thermal"]} for second in range(4, 13)
    }
    hot["at_12"] = {"throttle": ["thermal"], "ecc_uncorrected": 3}
    throttled = result(tmp_path / "hot", hot)
    warnings = " ".join(throttled.warnings)
    assert "throttled" not in healthy.verdict.sentence
    assert "The run was throttled: thermal reduced" in throttled.verdict.sentence
    assert "throttled: thermal reduced the clocks of 1 of 1 device, in 69% of" in warnings
    assert "n1 device 0: 1 memory error (uncorrectable)" in warnings


def test_energy_of_other_devices_than_those_that_train_is_no_energy_of_a_token(tmp_path: Path):
    metric = result(tmp_path / "processors", device="cpu").metrics[ENERGY_PER_TOKEN]
    assert metric.value is None and "cpu: n1: not recorded" in (metric.note or "")


def test_energy_that_nobody_tells_is_no_figure(tmp_path: Path):
    dark = {f"at_{s}": {"power_w": None} for s in range(-1, SECONDS + 2)}
    metric = result(tmp_path / "dark", dark).metrics[ENERGY_PER_TOKEN]
    assert metric.value is None and "n1" in (metric.note or "")
    assert ENERGY_PER_TOKEN not in evaluate(write_run(tmp_path, "without")).result.metrics
