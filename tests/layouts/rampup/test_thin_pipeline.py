"""A pipeline with fewer micro-batches than stages, as the 16 GB schedule of the 1.3B study has."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.test_errors import paceline
from tests.runs.test_flow import SMALL_SETTINGS

RAMP_UP = (
    *SMALL_SETTINGS,
    "global_batch=8",
    "training.ramp_up={start: 4, increment: 4, samples: 16}",
    "micro_batch=4",
    "recompute=none",
    "model.num_layers=2",
    "steps=60",
)


def test_a_ramp_up_that_begins_with_one_micro_batch_runs_and_is_judged(tmp_path: Path):
    sets = [word for setting in RAMP_UP for word in ("--set", setting)]
    done = paceline(
        *("run", "gpt-1b3-tiny", "--variant", "pp", "--no-probe", *sets, "--json"), runs=tmp_path
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["status"] == "ok" and result["metrics"]["step_time_s"]["value"] > 0
    file = min(tmp_path.glob("*/steps/rank-*.jsonl"))
    steps = map(json.loads, file.read_text().splitlines())
    batches = [step["global_batch"] for step in steps if step.get("event") == "step"]
    assert batches[:5] == [4, 4, 4, 4, 8] and len(batches) == 60


def test_a_sweep_has_it_as_a_row_that_can_run(tmp_path: Path):
    done = paceline(
        *("sweep", "gpt-1b3-tiny", "--devices", "2", "--pp", "1,2", "--mbs", "8,16"),
        *("--dry-run", "--json"),
        runs=tmp_path,
    )
    rows = {tuple(row["settings"].values()): row for row in json.loads(done.stdout)["rows"]}
    assert rows[("2", "16")]["status"] == "waiting" and rows[("1", "16")]["status"] == "refused"
