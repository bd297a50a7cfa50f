"""The scripts of a plan: what Slurm is asked for, and that `paceline run` takes their command."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.core.hardware import SlurmSettings
from paceline.files import catalog
from paceline.files.recipe import load_recipe
from paceline.layouts.rampup.plan import RampOptions
from paceline.layouts.rampup.scripts import SUBMIT, Chain, scripts
from tests.cli.test_errors import paceline
from tests.layouts.rampup.study import planned, question, setting

OPTIONS = RampOptions((32, 64, 128, 256, 512), most_nodes=16)
TRAINING = RampOptions((32, 64, 512), most_nodes=16, every_batch=True)


def chain(trains: bool, **changes: object) -> Chain:
    """The scripts of one of the plans, without a named cluster."""
    plan = planned(TRAINING if trains else OPTIONS)
    return Chain(setting(), plan, question("V100-32GB"), None, None, trains, **changes)  # type: ignore[arg-type]


def command(text: str) -> list[str]:
    """The words of what a script runs."""
    line = next(line for line in text.splitlines() if line.startswith("exec "))
    return shlex.split(line.removeprefix("exec "))


def settings(words: list[str]) -> list[str]:
    return [words[at + 1] for at, word in enumerate(words) if word == "--set"]


def test_there_is_one_script_a_stage_and_one_that_submits_them():
    texts = scripts(chain(trains=False))
    assert list(texts) == [
        "stage-1-batch-32.sh",
        "stage-2-batch-64.sh",
        "stage-3-batch-128.sh",
        "stage-4-batch-256.sh",
        "stage-5-batch-512.sh",
        SUBMIT,
    ]
    for text in texts.values():
        assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_slurm_is_asked_for_the_nodes_of_the_stage():
    for text, stage in zip(scripts(chain(False)).values(), planned(OPTIONS).stages, strict=False):
        assert f"#SBATCH --nodes={stage.nodes}\n" in text and "#SBATCH --gres=gpu:4\n" in text
        words = command(text)
        assert words[words.index("--nodes") + 1] == str(stage.nodes)
        minutes = int(text.split("#SBATCH --time=")[1].split()[0])
        assert 60 * minutes > 20 * stage.high_s


def test_the_overrides_make_the_very_layout_and_batch_of_the_stage():
    for text, stage in zip(scripts(chain(False)).values(), planned(OPTIONS).stages, strict=False):
        recipe = load_recipe("gpt-1b3", "ramp-up", settings(command(text)))
        assert recipe.layout == stage.layout and recipe.training.global_batch == stage.batch
        assert recipe.training.ramp_up is None and recipe.training.steps == 20


def test_run_takes_the_command(tmp_path: Path):
    whole = Chain(
        setting(),
        planned(OPTIONS),
        question("V100-32GB"),
        catalog.cluster("jean-zay-v100-32g"),
        "jean-zay-v100-32g",
        False,
    )
    words = command(scripts(whole)["stage-3-batch-128.sh"])
    done = paceline(*words[1:], "--dry-run", "--runs-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    nodes = planned(OPTIONS).stages[2].nodes
    assert f"--nodes={nodes}" in done.stdout


def test_stages_that_train_go_on_from_the_stage_before():
    texts = scripts(chain(trains=True))
    settings_of_stages = [settings(command(text)) for name, text in texts.items() if name != SUBMIT]
    stages = planned(TRAINING).stages
    done = 0
    for number, (changes, stage) in enumerate(zip(settings_of_stages, stages, strict=True)):
        done += stage.steps or 0
        recipe = load_recipe("gpt-1b3", "ramp-up", changes)
        assert recipe.training.steps == done and recipe.checkpoint.every
        assert recipe.training.ramp_up is not None and recipe.training.global_batch == 512
        before = f"gpt-1b3-batch-{stages[number - 1].batch}" if number else None
        assert recipe.checkpoint.resume == before
        assert f"--tag gpt-1b3-batch-{stage.batch}" in list(texts.values())[number]


def test_stages_without_steps_have_no_script_and_endless_ones_no_limit():
    short = planned(TRAINING, "V100-32GB", "training.total_tokens=200e6")
    texts = scripts(Chain(setting(), short, question("V100-32GB"), None, None, True))
    assert list(texts) == ["stage-1-batch-32.sh", SUBMIT]
    endless = planned(TRAINING, "V100-32GB", "training.total_tokens=null")
    texts = scripts(Chain(setting(), endless, question("V100-32GB"), None, None, True))
    last = texts["stage-3-batch-512.sh"]
    assert "--time=" not in last and "time_limit_s=null" in settings(command(last))


def test_each_stage_is_submitted_after_the_one_before(tmp_path: Path):
    for name, text in scripts(chain(trains=True)).items():
        (tmp_path / name).write_text(text)
    submitted = tmp_path / "submitted"
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f'#!/bin/sh\necho "$@" >>{submitted}\nwc -l <{submitted}\n')
    sbatch.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", tmp_path / SUBMIT], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert submitted.read_text().splitlines() == [
        "--parsable stage-1-batch-32.sh",
        "--parsable --dependency=afterok:1 stage-2-batch-64.sh",
        "--parsable --dependency=afterok:2 stage-3-batch-512.sh",
    ]
    assert "stage-3-batch-512.sh: job 3" in done.stdout


def test_files_are_named_by_their_whole_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("own.yaml", "site.yaml"):
        Path(name).write_text("")
    by_file = replace(question("V100-32GB"), recipe="own.yaml")
    site = catalog.cluster("jean-zay-v100-32g")
    whole = Chain(setting(), planned(OPTIONS), by_file, site, "site.yaml", False)
    words = command(scripts(whole)["stage-1-batch-32.sh"])
    assert words[2] == str(tmp_path / "own.yaml")
    assert words[words.index("--cluster") + 1] == str(tmp_path / "site.yaml")


def test_relative_data_are_named_by_their_whole_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("a: b.bin", "mask.bin", "held out.bin"):
        Path(name).write_bytes(b"1")
    Path("weights").mkdir()
    sets = (
        "data={source: tokens, path: 'a: b.bin', loss_mask: mask.bin}",
        "training.evaluation={every_samples: 512, samples: 8, path: held out.bin}",
        "training.initial_weights=weights",
    )
    asked = question("V100-32GB", *sets)
    whole = Chain(setting("V100-32GB", *sets), planned(OPTIONS), asked, None, None, False)
    changes = settings(command(scripts(whole)["stage-1-batch-32.sh"]))
    monkeypatch.chdir("/")
    recipe = load_recipe("gpt-1b3", "ramp-up", changes)
    assert recipe.data.path == str(tmp_path / "a: b.bin")
    assert recipe.data.loss_mask == str(tmp_path / "mask.bin")
    assert recipe.training.evaluation
    assert recipe.training.evaluation.path == str(tmp_path / "held out.bin")
    assert recipe.training.initial_weights == str(tmp_path / "weights")


def test_data_that_no_script_could_find_are_refused():
    asked = question("V100-32GB", "data={source: tokens, path: nowhere.bin}")
    away = setting("V100-32GB", *asked.overrides)
    with pytest.raises(UserError, match="neither from here nor beside the recipe"):
        scripts(Chain(away, planned(OPTIONS), asked, None, None, False))
    absolute = question("V100-32GB", "data={source: tokens, path: /cluster/only.bin}")
    away = setting("V100-32GB", *absolute.overrides)
    assert scripts(Chain(away, planned(OPTIONS), absolute, None, None, False))


def test_settings_of_the_site_reach_slurm_and_odd_ones_are_refused():
    site = catalog.cluster("jean-zay-v100-32g").model_copy(
        update={"slurm": SlurmSettings(partition="gpu", constraint="v100-32g")}
    )
    whole = Chain(setting(), planned(OPTIONS), question("V100-32GB"), site, "site.yaml", False)
    first = scripts(whole)["stage-1-batch-32.sh"]
    assert "#SBATCH --partition=gpu\n" in first and "#SBATCH --constraint=v100-32g\n" in first
    assert command(first)[command(first).index("--cluster") + 1] == "site.yaml"
    odd = site.model_copy(update={"slurm": SlurmSettings(account="a b")})
    with pytest.raises(UserError, match="cannot stand in an #SBATCH line"):
        scripts(Chain(setting(), planned(OPTIONS), question("V100-32GB"), odd, "site.yaml", False))
