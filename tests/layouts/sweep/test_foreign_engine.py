"""The study of layouts by Megatron-DeepSpeed's own program, for which one stands in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_errors import paceline

STAND_IN = Path(__file__).parents[2] / "engines" / "fake_pretrain.py"
LISTS = ["--pp", "1,2", "--mbs", "2,16"]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[tuple[str, ...], Any]]:
    """Runs folder, and the rows of a sweep by their settings."""
    folder = tmp_path_factory.mktemp("study")
    shutil.copy(STAND_IN, folder / "pretrain_gpt.py")
    (folder / "data").mkdir()
    for name in ("gpt2-vocab.json", "gpt2-merges.txt"):
        (folder / "data" / name).touch()
    data = folder / "text.bin"
    data.touch()
    settings = (
        f"engine_settings.checkout={folder}",
        "data.source=tokens",
        f"data.path={data}",
        "steps=20",
    )
    changes = [word for change in settings for word in ("--set", change)]
    done = paceline(
        *("sweep", "gpt-1b3-tiny", "--variant", "whole-batch", "--engine", "megatron_deepspeed"),
        *("--devices", "2", *LISTS, *changes, "--json"),
        runs=folder / "runs",
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    return folder / "runs", {tuple(row["settings"].values()): row for row in rows}


def test_layouts_are_ranked_by_the_times_that_its_log_tells(
    swept: tuple[Path, dict[tuple[str, ...], Any]],
):
    _, rows = swept
    plain, staged = rows["1", "2"], rows["2", "2"]
    assert plain["best"] and plain["status"] == staged["status"] == "ok"
    assert plain["step_time_s"] == pytest.approx(0.4, rel=0.01)
    assert staged["step_time_s"] == pytest.approx(0.8 * 1.1, rel=0.01)
    assert plain["tokens_per_s"] == pytest.approx(16 * 128 / plain["step_time_s"])


def test_memory_that_another_rank_tells_counts(swept: tuple[Path, dict[tuple[str, ...], Any]]):
    _, rows = swept
    assert rows["1", "2"]["memory_bytes"] == 11_000 * 2**20
    assert rows["2", "2"]["memory_bytes"] == 6_500 * 2**20
    assert {row["memory_kind"] for row in rows.values() if row["status"] == "ok"} == {"reserved"}


def test_a_layout_without_memory_is_a_row_that_says_so(
    swept: tuple[Path, dict[tuple[str, ...], Any]],
):
    _, rows = swept
    assert rows["2", "16"]["status"] == "oom" and rows["1", "16"]["status"] == "refused"


def test_what_the_log_says_of_the_layout_is_held_against_the_plan(
    swept: tuple[Path, dict[tuple[str, ...], Any]],
):
    runs, _ = swept
    results = [json.loads(path.read_text()) for path in runs.glob("*/result.json")]
    warnings = [warning for result in results for warning in result["warnings"]]
    assert len(results) == 3
    assert not [warning for warning in warnings if "but the plan" in warning]
