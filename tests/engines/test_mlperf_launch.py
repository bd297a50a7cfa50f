"""A submission's own procedure: the published commands, its config sourced, and contradictions."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import UserError
from paceline.core.run import RunSpec
from paceline.engines import engine
from paceline.engines.mlperf import config_sizes, preset_variables, source_config
from paceline.machines import slurm
from paceline.machines.placement import HostPlacement, Request
from paceline.mlperf.rules import BENCHMARKS
from paceline.mlperf.run.request import trial_variant
from paceline.runs.plan import Plan
from tests.command import paceline
from tests.engines.batch_site import CONFIG, MLPERF, SYSTEM, site, spec_of

MODEL = {"model": "/data/model"}
LOGDIR = "{folder}/results"
COMMON = {"CONT": "registry/image:1", "LOGDIR": LOGDIR, "NEXP": "1", "SEED": "1234"}


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
    assert preset_variables(spec, spec.cluster) == {**COMMON, **variables}


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


SIZES = {
    "cluster.nodes": 2,
    "cluster.devices_per_node": 2,
    "layout.tp": 1,
    "layout.pp": 1,
    "layout.cp": 1,
    "layout.vp": 1,
    "layout.micro_batch": 1,
    "training.global_batch": 32,
}
"""Sizes of the fake submission's config."""


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({}, {}),
        ({"TENSOR_MODEL_PARALLEL": "2"}, {"layout.tp": 2, "training.global_batch": 16}),
        ({"CONTEXT_PARALLEL": "4"}, {"layout.cp": 4, "training.global_batch": 8}),
        ({"DGXNNODES": "18", "DGXNGPU": "4"}, {
            "cluster.nodes": 18, "cluster.devices_per_node": 4, "training.global_batch": 576
        }),
        ({"INTERLEAVED_PIPELINE": "'5'"}, {"layout.vp": 5}),
        ({"MICRO_BATCH_SIZE": "4"}, {"layout.micro_batch": 4}),
        ({"BATCHSIZE": "512"}, {"training.global_batch": 512}),
    ],
)  # fmt: skip
def test_the_config_sets_layout_and_batch(changes: dict[str, str], sizes: dict[str, int]) -> None:
    variables = source_config(SYSTEM / CONFIG, {"NEXP": "1"}) | changes
    stated = {field: size.value for field, size in config_sizes(variables, 8).items()}
    assert stated == SIZES | sizes


PUBLISHED_CONFIGS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "mlperf_configs.json").read_text()
)["configs"]
"""Sizes in 234 published configs of v5.1, each set once, and the layout that they make."""


@pytest.mark.parametrize(
    "row",
    PUBLISHED_CONFIGS,
    ids=lambda row: " ".join([row["benchmark"], row["layout"], str(row["global_batch"])]),
)
def test_the_published_configs_run_as_they_are(tmp_path: Path, row: dict[str, Any]) -> None:
    variables = {**row["variables"], "WALLTIME": "30"}
    config = tmp_path / "config_x.sh"
    config.write_text("".join(f"export {name}={value}\n" for name, value in variables.items()))
    (tmp_path / "run.sub").touch()
    nodes, devices = variables["DGXNNODES"], variables.get("DGXNGPU", 8)
    (tmp_path / "site.yaml").write_text(
        f"name: site\ndevice: GB300\nnodes: {nodes}\ndevices_per_node: {devices}\nlauncher: slurm\n"
    )
    settings = {**MLPERF, "config": str(config)}
    if row["benchmark"] == "llama2_70b_lora":
        settings |= MODEL
    overrides = [f"engine_settings.{name}={value}" for name, value in settings.items()]
    spec = trial_variant(
        Request(
            BENCHMARKS[row["benchmark"]].recipe,
            overrides=("engine=mlperf", *overrides),
            cluster=str(tmp_path / "site.yaml"),
        )
    ).plan.spec
    assert spec.layout.label(spec.world_size) == row["layout"]
    assert spec.training.global_batch == row["global_batch"]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"MINIBS": "many"}, "MINIBS: 'many' is not a whole number"),
        ({"TENSOR_MODEL_PARALLEL": "3"}, "not a multiple of the config's tp x pp x cp, 3"),
    ],
)
def test_sizes_that_make_no_layout_are_refused(changes: dict[str, str], complaint: str) -> None:
    variables = source_config(SYSTEM / CONFIG, {"NEXP": "1"}) | changes
    with pytest.raises(UserError, match=complaint):
        config_sizes(variables, 8)


def planned(tmp_path: Path, *more: str, config: str = "", cluster: str = "") -> Plan:
    """Plan of the fake submission, whose config ends with the lines of `config`."""
    shutil.copytree(SYSTEM, tmp_path / "system", dirs_exist_ok=True)
    path = tmp_path / "system" / CONFIG
    path.write_text(f"{path.read_text()}\n{config}\n")
    site = f"name: site\ndevice: GB300\nnodes: 2\ndevices_per_node: 2\nlauncher: slurm\n{cluster}"
    (tmp_path / "site.yaml").write_text(site)
    settings = {**MLPERF, "config": str(path)}
    overrides = [f"engine_settings.{name}={value}" for name, value in settings.items()]
    request = Request(
        "llama31-8b",
        overrides=("engine=mlperf", *overrides, *more),
        cluster=str(tmp_path / "site.yaml"),
        where=HostPlacement(),
    )
    return trial_variant(request).plan


def test_a_config_without_devices_per_node_counts_the_clusters() -> None:
    variables = {"DGXNNODES": "8", "MINIBS": "1", "TENSOR_MODEL_PARALLEL": "2"}
    assert config_sizes(variables, 8)["training.global_batch"].value == 32


def test_a_run_follows_its_config_and_lists_what_differs_from_the_recipe(tmp_path: Path) -> None:
    plan = planned(tmp_path, config="export CONTEXT_PARALLEL=2 MINIBS=6 MICRO_BATCH_SIZE=3")
    spec = plan.spec
    assert (spec.layout.cp, spec.layout.micro_batch, spec.training.global_batch) == (2, 3, 12)
    assert plan.differences == (
        "layout.cp 2 (recipe: 1)",
        "layout.micro_batch 3 (recipe: 1)",
        "training.global_batch 12 (recipe: 32)",
    )
    assert any("layout.cp 2 (recipe: 1)" in notice for notice in plan.notices)
    assert planned(tmp_path / "same").differences == ()


def test_every_variable_of_the_config_is_in_the_script_and_the_record(tmp_path: Path) -> None:
    lines = ("TOKENIZERS_PARALLELISM=False", "MAX_TOKENS=4096", "WANDB_API_KEY=plainword")
    plan = planned(tmp_path, config="".join(f"export {line}\n" for line in lines))
    stored = engine("mlperf").settings(plan.spec)["variables"]
    for line in lines[:2]:
        name, _, value = line.partition("=")
        assert f"export {line}\n" in plan.script and stored[name] == value
    assert "plainword" not in plan.script and "WANDB_API_KEY" not in stored


@pytest.mark.parametrize(
    ("container", "cont"),
    [
        ("images/a.sqsh", "{here}/images/a.sqsh"),
        ("./a", "{here}/a"),
        ("built", "{here}/built"),
        ("~/a.sqsh", "{home}/a.sqsh"),
        ("/images/a.sqsh", "/images/a.sqsh"),
        ("nvcr.io#team/llama31_8b:20251008", "nvcr.io#team/llama31_8b:20251008"),
        ("docker://registry/llama31_8b:1", "docker://registry/llama31_8b:1"),
    ],
)
def test_paths_are_absolute_because_sbatch_is_called_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, container: str, cont: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "built").mkdir()
    settings = {**MLPERF, "container": container, "data": "gov", "model": "ckpt"}
    spec = spec_of("mlperf", "llama2-70b-lora", site(nodes=1, devices=8), settings)
    variables = preset_variables(spec, spec.cluster)
    assert variables["CONT"] == cont.format(here=tmp_path, home=Path.home())
    assert variables["DATADIR"] == f"{tmp_path}/gov" and variables["MODEL"] == f"{tmp_path}/ckpt"


def test_what_of_the_cluster_file_does_not_reach_the_script_is_listed(tmp_path: Path) -> None:
    cluster = (
        "env: {MICRO_BATCH_SIZE: '4', NEXP: '10', DATADIR: /elsewhere, KEPT: '1', LR: '1e-3'}\n"
        "slurm: {container_image: a.sqsh, container_mounts: ['/a:/a'], requeue: true, time: '9'}\n"
    )
    plan = planned(tmp_path, 'engine_settings.environment="LR=2e-3"', cluster=cluster)
    ignored = [notice.split(" ")[0] for notice in plan.notices if "has no effect" in notice]
    assert ignored == [
        *("MICRO_BATCH_SIZE", "NEXP", "DATADIR"),
        *("slurm.container_image", "slurm.container_mounts", "slurm.requeue", "slurm.time"),
    ]
    assert "export KEPT=1\n" in plan.script and "export LR=2e-3\n" in plan.script


def test_a_config_of_fewer_devices_uses_part_of_the_cluster(tmp_path: Path) -> None:
    spec = planned(tmp_path, config="export DGXNNODES=1", cluster="hosts: [node-1, node-2]\n").spec
    assert (spec.cluster.nodes, spec.cluster.hosts) == (1, ("node-1",))
    assert spec.training.global_batch == 16
    for setting in ("DGXNNODES=18", "DGXNGPU=8"):
        with pytest.raises(UserError, match=r"own files set cluster\.\w+ \d+, but it is 2 here"):
            planned(tmp_path / setting, config=f"export {setting}")


@pytest.mark.parametrize(
    ("field", "sentence"),
    [
        ("layout.cp=2", "the config has CONTEXT_PARALLEL 1, but the run has layout.cp 2"),
        ("layout.micro_batch=2", "has MICRO_BATCH_SIZE 1, but the run has layout.micro_batch 2"),
        (
            "training.global_batch=64",
            r"has MINIBS 8 on 4 replicas \(32 per step\), but the run has training.global_batch 64",
        ),
    ],
)
def test_a_field_that_the_user_sets_and_the_config_contradicts_is_refused(
    tmp_path: Path, field: str, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        planned(tmp_path, field)


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("MODEL_SIZE=405b", r"is for a model of 405b \(MODEL_SIZE\), but the recipe's has 8b"),
        ("OVERWRITTEN_NUM_LAYERS=8", "has OVERWRITTEN_NUM_LAYERS 8, but the model has 32 layers"),
    ],
)
def test_a_config_of_another_model_is_refused_by_its_model(
    tmp_path: Path, setting: str, complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint):
        planned(tmp_path, config=f"export {setting} MICRO_BATCH_SIZE=3")


def test_a_missing_sourced_file_is_the_whole_answer(tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        planned(tmp_path, config="source ./absent.sh; export MINIBS=7 MICRO_BATCH_SIZE=3")
    assert "absent.sh: No such file or directory" in str(raised.value)
    assert "batch" not in str(raised.value)


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
    words = (
        *("mlperf", "run", recipe, "--engine", "mlperf", "--cluster", "lambda-gb300-nvl72"),
        *(w for n, v in settings.items() for w in ("--set", f"engine_settings.{n}={v}")),
        *("--data", tmp_path, "--dry-run"),
    )
    done = paceline(*words, runs=tmp_path / "runs")
    assert done.returncode == 0, done.stderr
    minutes = 40 if recipe == "llama31-8b" else 20
    assert done.stdout.splitlines()[-1].endswith(f"-N 18 -t {minutes} run.sub")
    assert f"export DATADIR={tmp_path}" in done.stdout
    assert "mlperf-trial-72" in done.stderr
    ten = paceline(*words, "--set", "engine_settings.nexp=10", runs=tmp_path / "runs")
    assert ten.stdout.splitlines()[-1].endswith(f"-N 18 -t {10 * minutes - 45} run.sub")
    assert "export NEXP=10\n" in ten.stdout
    assert "export NEXP=1\n" in done.stdout


@pytest.mark.parametrize("option", ["--tiny", "--synthetic"])
def test_what_is_the_native_trainers_alone_is_refused(option: str, tmp_path: Path) -> None:
    words = ("mlperf", "run", "llama31-8b", "--engine", "mlperf", option)
    done = paceline(*words, runs=tmp_path)
    assert done.returncode == 1
    assert f"{option}: applies to the native trainer, not to engine mlperf" in done.stderr
