"""Questions about the user's own model: typed as a stranger would, answered in one command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command import paceline
from tests.files.published_models import MODELS


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with the configurations of two models, as a download leaves them."""
    for name in ("meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-0.5B"):
        folder = tmp_path / name.rpartition("/")[2]
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(MODELS[name][0]))
    return tmp_path


@pytest.mark.parametrize("model", ["Llama-3.1-8B", "Llama-3.1-8B/config.json"])
def test_how_fast_would_my_model_train(here: Path, model: str):
    answer = paceline("estimate", model, "--device", "H100", "--gpus", 64, cwd=here)
    assert answer.returncode == 0, answer.stderr
    assert "Llama-3.1-8B on 64 x H100-SXM" in answer.stdout
    assert "sequences of 8,192 tokens" in answer.stdout


def test_what_mfu_is_it_for_my_model(here: Path):
    options = ("--from", "causal", "--device", "H100", "--dtype", "bf16")
    answer = paceline(
        "table", "convert", "400TFLOP/s", "--model", "Llama-3.1-8B", *options, cwd=here
    )
    assert answer.returncode == 0 and "40.42% MFU" in answer.stdout


def test_which_layout_suits_my_model(here: Path):
    options = ("--device", "H100", "--gpus", 16, "--estimate-only")
    answer = paceline("tune", "Llama-3.1-8B", *options, cwd=here)
    assert answer.returncode == 0, answer.stderr


def test_a_recipe_for_my_model_runs_here(here: Path):
    made = paceline("recipes", "new", "--from", "Qwen2.5-0.5B", "--output", "mine.yaml", cwd=here)
    assert made.returncode == 0 and "wrote mine.yaml" in made.stderr
    again = paceline("recipes", "new", "--from", "Qwen2.5-0.5B", "--output", "mine.yaml", cwd=here)
    assert again.returncode == 1 and "exists" in again.stderr
    estimate = paceline("estimate", "mine.yaml", "--device", "H100", "--gpus", 8, cwd=here)
    assert estimate.returncode == 0 and "Qwen2.5-0.5B on 8 x H100-SXM" in estimate.stdout
    sizes = ("num_layers=1", "hidden_size=112", "ffn_size=64", "vocab_size=300")
    small = [word for size in sizes for word in ("--set", f"model.{size}")]
    settings = ("--set", "seq_len=32", "--set", "global_batch=4", "--set", "steps=6")
    run = paceline("run", "mine.yaml", *small, *settings, runs=here / "runs", cwd=here)
    assert run.returncode in (0, 4), run.stderr
    assert "6 of 6 steps done" in run.stdout + run.stderr
    sweep = paceline("sweep", "mine.yaml", "--tp", "1,2", "--dry-run", runs=here / "runs", cwd=here)
    assert sweep.returncode == 0, sweep.stderr


def test_new_needs_a_model():
    answer = paceline("recipes", "new")
    assert answer.returncode == 1 and "recipes new: needs --from MODEL" in answer.stderr
    answer = paceline("recipes", "tiny-llama", "--from", "x/y")
    assert answer.returncode == 1 and "recipes new --from x/y" in answer.stderr
