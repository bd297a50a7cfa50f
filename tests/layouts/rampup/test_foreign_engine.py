"""The study's schedule as batch scripts that start Megatron-DeepSpeed's own program."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from paceline.files.recipe import load_recipe
from tests.cli.test_errors import paceline

STUDY = ("rampup", "gpt-1b3", "--variant", "ramp-up", "--cluster", "jean-zay-v100-32g")
SHORT = ("--engine", "megatron_deepspeed", "--stages", "32,512", "--max-nodes", "4")


@pytest.fixture(scope="module")
def changes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a site says of its checkout and data."""
    data = tmp_path_factory.mktemp("data") / "pile_text_document.bin"
    data.touch()
    values = ("engine_settings.checkout=/code/megatron", "data.source=tokens", f"data.path={data}")
    return [word for value in values for word in ("--set", value)]


def test_each_stage_is_a_job_of_pretrain_gpt(changes: list[str], tmp_path: Path):
    done = paceline(*STUDY, *SHORT, *changes, "--scripts", str(tmp_path), runs=tmp_path / "runs")
    assert done.returncode == 0, done.stderr
    script = (tmp_path / "stage-2-batch-512.sh").read_text()
    line = next(line for line in script.splitlines() if line.startswith("exec "))
    words = shlex.split(line.removeprefix("exec "))
    overrides = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
    recipe = load_recipe("gpt-1b3", "ramp-up", overrides)

    assert recipe.engine == "megatron_deepspeed" and recipe.layout.recompute != "selective"
    started = paceline(*words[1:], "--dry-run", runs=tmp_path / "runs")
    assert started.returncode == 0, started.stderr
    text, program = started.stdout, started.stderr
    assert " pretrain_gpt.py " in program and " --global-batch-size 512 " in program
    assert f" --micro-batch-size {recipe.layout.micro_batch} " in program
    for option in ("constraint=v100-32g", "gres=gpu:4", "cpus-per-task=40", "hint=nomultithread"):
        assert f"#SBATCH --{option}\n" in text and f"#SBATCH --{option}\n" in script


def test_what_the_engine_refuses_is_said_before_anything_is_planned(tmp_path: Path):
    done = paceline(*STUDY, *SHORT, runs=tmp_path)
    assert done.returncode == 1
    assert "engine_settings.checkout is not set" in done.stderr


def test_stages_cannot_go_on_from_its_checkpoints(changes: list[str], tmp_path: Path):
    more = ("--every-batch", "--scripts", str(tmp_path))
    done = paceline(*STUDY, *SHORT, *changes, *more, runs=tmp_path / "runs")
    assert done.returncode == 1 and "--every-batch" in done.stderr


def test_two_engines_are_one_too_many(tmp_path: Path):
    done = paceline(*STUDY, *SHORT, "--set", "engine=native", runs=tmp_path)
    assert done.returncode == 1 and "--engine" in done.stderr
