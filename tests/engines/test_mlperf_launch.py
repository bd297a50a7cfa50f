"""A submission's own procedure: the published commands, its config sourced, and contradictions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import UserError
from paceline.core.run import RunSpec
from paceline.engines import engine
from paceline.engines.mlperf import contradictions, preset_variables, source_config
from paceline.machines import slurm
from tests.command import paceline
from tests.engines.batch_site import CONFIG, MLPERF, SYSTEM, site, spec_of

MODEL = {"model": "/data/model"}
LOGDIR = "{folder}/results"
COMMON = {"CONT": "image.sqsh", "LOGDIR": LOGDIR, "NEXP": "1", "SEED": "1234"}


def llama_8b(**settings: Any) -> RunSpec:
    return spec_of("mlperf", "llama31-8b", site(), {**MLPERF, **settings}, "mlperf-trial")


@pytest.mark.parametrize(
    ("recipe", "settings", "variables"),
    [
        ("llama2-70b-lora", MODEL, {"DATADIR": "/data", "MODEL": "/data/model"}),
        ("llama31-8b", {}, {"DATADIR": "/data"}),
        ("flux1-schnell", {}, {"DATAROOT": "/data"}),
    ],
)
def test_each_workload_exports_what_its_published_procedure_does(
    recipe: str, settings: dict[str, str], variables: dict[str, str]
) -> None:
    spec = spec_of("mlperf", recipe, site(nodes=1, devices=8), {**MLPERF, **settings})
    assert preset_variables(spec) == {**COMMON, **variables}


def test_the_published_command_is_called_where_run_sub_lies() -> None:
    spec = llama_8b()
    lines = slurm.render(engine("mlperf").job(spec, "trial")).splitlines()
    assert lines[-2] == f"cd -- {SYSTEM}"
    assert lines[-1].endswith(' "$@" -N 2 -t 15 run.sub')
    assert 'export LOGDIR="$folder"/results' in lines and "export SEED=1234" in lines
    asking = spec.model_copy(update={"cluster": site(account="bench", partition="gpu")})
    words = engine("mlperf").job(asking, "trial").batch
    assert words and words.options == ("-N", "2", "-t", "15", "-A", "bench", "-p", "gpu")


def test_walltime_decides_unless_a_limit_is_asked_for() -> None:
    spec = llama_8b()
    assert spec.time_limit_s == 3600, "of a recipe that says nothing"
    asked = spec.model_copy(update={"time_limit_s": 90.0})
    assert engine("mlperf").job(spec, "trial").timeout_s is None
    assert engine("mlperf").job(asked, "trial").timeout_s == 90


def test_the_config_is_sourced_in_a_clean_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEXP", "7")
    monkeypatch.setenv("STRAY", "1")
    variables = source_config(SYSTEM / CONFIG, {"NEXP": "3"})
    assert variables["WALLTIME"] == "35", "5 + NEXP (5 + 5), by the NEXP that is exported"
    assert variables["DGXSYSTEM"] == "BED_2x2x8xtp1pp1cp1_8b"
    assert variables["STEPS_BETWEEN"] == "two words" and variables["CLEAR_CACHES"] == "0"
    assert not variables.keys() & {"STRAY", "PATH", "PWD", "SHLVL", "_", "BASH_FUNC_x%%"}
    settings = engine("mlperf").settings(llama_8b())
    assert settings["variables"]["MINIBS"] == "8" and "CONT" in settings["exported"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("export DGXNNODES=2", "does not set WALLTIME"),
        ("source $(dirname ${BASH_SOURCE[0]})/absent.sh", "absent.sh: No such file or directory"),
        ("exit 3", "cannot be sourced"),
        (
            "export DGXNNODES=2 WALLTIME=9; echo busy >&2; source ./absent.sh; MINIBS=1",
            "cannot be sourced: .*line 1: ./absent.sh: No such file or directory",
        ),
        ("echo noise; export DGXNNODES=2 WALLTIME=", "does not set WALLTIME"),
    ],
)
def test_a_config_that_lacks_something_is_refused(
    tmp_path: Path, text: str, complaint: str
) -> None:
    config = tmp_path / "config_x.sh"
    config.write_text(text + "\n")
    with pytest.raises(UserError, match=complaint):
        source_config(config, {})
    (problem,) = engine("mlperf").unsupported(llama_8b(config=str(config)))
    assert re.search(complaint, problem)


@pytest.mark.parametrize("name", ["LOGDIR", "NEXP", "SEED"])
def test_a_config_that_takes_over_what_is_the_runs_is_refused(tmp_path: Path, name: str) -> None:
    config = tmp_path / "config_x.sh"
    config.write_text(f"export DGXNNODES=2 WALLTIME=9 {name}=${{{name}:-1}}\n")
    asked = {"LOGDIR": LOGDIR, "NEXP": "3", "SEED": "4"}
    assert source_config(config, asked)[name] == asked[name]
    for change in (f"export {name}=7", f"unset {name}"):
        config.write_text(f"export DGXNNODES=2 WALLTIME=9; {change}\n")
        with pytest.raises(UserError, match=f"sets {name}, which each run sets itself"):
            source_config(config, asked)


@pytest.mark.parametrize("name", ["LOGDIR", "NEXP", "SEED"])
def test_extra_variables_come_after_the_config_and_leave_those_of_the_run(name: str) -> None:
    spec = llama_8b(environment="MINIBS=8 SOME_NEW=1")
    variables = engine("mlperf").job(spec, "x").env
    assert (variables["MINIBS"], variables["SOME_NEW"]) == ("8", "1")
    problems = engine("mlperf").unsupported(llama_8b(environment=f"{name}=1"))
    assert f"engine_settings.environment: {name} is set by each run; leave it out" in problems


def test_what_a_config_prints_and_asks_does_no_harm(tmp_path: Path) -> None:
    config = tmp_path / "config_x.sh"
    text = "echo A=1; read -r B; export DGXNNODES=2 WALLTIME=9\ncat ./absent\nf() { :; }\n"
    config.write_text(text)
    assert source_config(config, {}) == {"B": "", "DGXNNODES": "2", "WALLTIME": "9"}


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("DGXNNODES", "18", "the config has DGXNNODES 18, but the recipe has --nodes 2"),
        ("TENSOR_MODEL_PARALLEL", "2", "layout.tp 1 (--set layout.tp=2)"),
        ("PIPELINE_MODEL_PARALLEL", "4", "layout.pp 1 (--set layout.pp=4)"),
        ("CP", "8", "layout.cp 1 (--set layout.cp=8)"),
        ("INTERLEAVED_PIPELINE", "5", "layout.vp 1 (--set layout.vp=5)"),
        ("MICRO_BATCH_SIZE", "4", "layout.micro_batch"),
        ("OVERWRITTEN_NUM_LAYERS", "8", "model.num_layers 32 (--set model.num_layers=8)"),
        ("MINIBS", "9", "MINIBS 9 on 4 replicas (36 per step), but the recipe has"),
        ("BATCHSIZE", "512", "training.global_batch 32 (--set training.global_batch=512)"),
    ],
)
def test_what_contradicts_the_recipe_is_told(name: str, value: str, sentence: str) -> None:
    agreed = {"DGXNNODES": "2", "TP": "1", "INTERLEAVED_PIPELINE": "null", "MINIBS": "8"}
    assert contradictions(llama_8b(), agreed) == []
    (problem,) = contradictions(llama_8b(), {name: value})
    assert sentence in problem


def test_what_it_needs_is_told_before_anything_starts() -> None:
    mlperf = engine("mlperf")
    assert mlperf.unsupported(llama_8b()) == [] and mlperf.missing(llama_8b()) is None
    problems = mlperf.unsupported(llama_8b(container="", data=None))
    assert [problem.split()[0] for problem in problems] == [
        "engine_settings.container",
        "engine_settings.data",
    ]
    (problem,) = mlperf.unsupported(
        spec_of("mlperf", "llama2-70b-lora", site(nodes=1, devices=8), MLPERF)
    )
    assert "engine_settings.model is missing" in problem
    (problem,) = mlperf.unsupported(
        llama_8b().model_copy(update={"cluster": site(allocation="12")})
    )
    assert "cannot use allocation 12" in problem
    assert "run.py does not exist" in str(mlperf.missing(llama_8b(script="run.py")))


def test_the_config_is_sought_beside_the_script(tmp_path: Path) -> None:
    spec = llama_8b(config=CONFIG, implementation=str(SYSTEM))
    assert engine("mlperf").settings(spec)["config"] == str(SYSTEM / CONFIG)
    batch = (
        engine("mlperf")
        .job(llama_8b(config=str(SYSTEM / CONFIG), implementation=str(tmp_path)), "x")
        .batch
    )
    assert batch and batch.folder == str(tmp_path)


PUBLISHED = {
    "llama31-8b": "MINIBS=1 TENSOR_MODEL_PARALLEL=1 PIPELINE_MODEL_PARALLEL=1 CONTEXT_PARALLEL=2 "
    "INTERLEAVED_PIPELINE=null MICRO_BATCH_SIZE=1 WALLTIME_RUNANDTIME=30",
    "llama2-70b-lora": "MINIBS=1 CP=8 WALLTIME_RUNANDTIME=10",
}
"""Sizes of the published results on 72 GB300."""


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_the_published_sizes_are_planned_by_the_variant_that_agrees(
    recipe: str, tmp_path: Path
) -> None:
    (tmp_path / "run.sub").touch()
    sizes = f"export DGXNNODES=18 DGXNGPU=4 {PUBLISHED[recipe]}\n"
    walltime = "export WALLTIME=$((5 + ${NEXP:-1} * ($WALLTIME_RUNANDTIME + 5)))\n"
    (tmp_path / "config_GB300_18x4.sh").write_text(sizes + walltime)
    settings = {"config": tmp_path / "config_GB300_18x4.sh", "container": "c", "model": "/m"}
    if recipe == "llama31-8b":
        del settings["model"]
    done = paceline(
        *("mlperf", "run", recipe, "--engine", "mlperf", "--cluster", "lambda-gb300-nvl72"),
        *(w for n, v in settings.items() for w in ("--set", f"engine_settings.{n}={v}")),
        *("--data", tmp_path, "--dry-run"),
        runs=tmp_path / "runs",
    )
    assert done.returncode == 0, done.stderr
    minutes = 40 if recipe == "llama31-8b" else 20
    assert done.stdout.splitlines()[-1].endswith(f"-N 18 -t {minutes} run.sub")
    assert f"export DATADIR={tmp_path}" in done.stdout
    assert "mlperf-trial-72" in done.stderr


@pytest.mark.parametrize("option", ["--tiny", "--synthetic"])
def test_what_is_the_native_trainers_alone_is_refused(option: str, tmp_path: Path) -> None:
    words = ("mlperf", "run", "llama31-8b", "--engine", "mlperf", option)
    done = paceline(*words, runs=tmp_path)
    assert done.returncode == 1
    assert f"{option}: applies to the native trainer, not to engine mlperf" in done.stderr
