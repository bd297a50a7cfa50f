"""The study's schedule planned for Megatron-DeepSpeed's own program."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.test_errors import paceline

STUDY = ("estimate", "rampup", "gpt-1b3", "--variant", "ramp-up", "--cluster", "jean-zay-v100-32g")
SHORT = ("--engine", "megatron_deepspeed", "--stages", "32,512", "--max-nodes", "4")


def test_layouts_that_the_engine_cannot_run_are_left_out(tmp_path: Path):
    data = tmp_path / "pile_text_document.bin"
    data.touch()
    values = ("engine_settings.checkout=/code/megatron", "data.source=tokens", f"data.path={data}")
    changes = [word for value in values for word in ("--set", value)]
    done = paceline(*STUDY, *SHORT, *changes, "--json", runs=tmp_path / "runs")
    assert done.returncode == 0, done.stderr
    layouts = [stage["layout"] for stage in json.loads(done.stdout)["stages"]]
    assert all(layout["recompute"] != "selective" for layout in layouts)


def test_the_memory_of_a_stage_is_that_of_the_engines_software(tmp_path: Path):
    """The study measured 27 GB without activation checkpointing, which 16 GB cannot hold."""
    data = tmp_path / "pile_text_document.bin"
    data.touch()
    values = ("engine_settings.checkout=/code/megatron", "data.source=tokens", f"data.path={data}")
    changes = [word for value in values for word in ("--set", value)]
    on_16_gb = (*STUDY[:-1], "jean-zay-v100-16g", *SHORT, "--stages", "512", *changes, "--json")
    done = paceline(*on_16_gb, runs=tmp_path / "runs")
    assert done.returncode == 0, done.stderr
    plans = json.loads(done.stdout)["alternatives"]
    one_device = [p for p in plans if p["layout"]["tp"] == p["layout"]["pp"] == 1]
    assert all(plan["layout"]["recompute"] == "full" for plan in one_device)


def test_what_the_engine_refuses_is_said_before_anything_is_planned(tmp_path: Path):
    done = paceline(*STUDY, *SHORT, runs=tmp_path)
    assert done.returncode == 1
    assert "engine_settings.checkout is not set" in done.stderr


def test_two_engines_are_one_too_many(tmp_path: Path):
    done = paceline(*STUDY, *SHORT, "--set", "engine=native", runs=tmp_path)
    assert done.returncode == 1 and "--engine" in done.stderr
