"""NVIDIA's published procedure for NeMo: its command, variables, overrides and result folders."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from paceline.core.run import RunSettings, RunSpec
from paceline.engines import engine
from paceline.engines.nemo.launch import launch_text
from paceline.machines import slurm
from tests.command import paceline
from tests.engines.batch_site import NEMO, site, spec_of

PUBLISHED = """
training.model.tensor_model_parallel_size=4
training.model.pipeline_model_parallel_size=4
training.model.virtual_pipeline_model_parallel_size=5
training.model.context_parallel_size=2
"""
"""What the recipe's README says must not be changed."""
COMMAND = (
    "DTYPE=<fp8/bf16> MODEL_SIZE=70b "
    "sbatch -A ${SBATCH_ACCOUNT} -p ${SBATCH_PARTITION} -N ${NUM_NODES} ./launch.sh"
)
RESULTS = "results/$GSW_VERSION/${DTYPE}/70b/$JOB_TOTAL_GPUS"


def llama_70b(nodes: int = 16, variant: str | None = None, **settings: Any) -> RunSpec:
    cluster = site(nodes, 8, "H100-SXM", account="acct", partition="batch", gres="none")
    return spec_of("nemo", "llama31-70b", cluster, {**NEMO, **settings}, variant)


def test_the_overrides_are_those_that_must_not_be_changed() -> None:
    overrides = engine("nemo").settings(llama_70b())["overrides"]
    assert overrides[:4] == PUBLISHED.split()
    assert overrides[4:] == ["training.model.micro_batch_size=1",
                             "training.model.global_batch_size=256"]  # fmt: skip


@pytest.mark.parametrize("nodes", [8, 16, 256])
def test_the_batch_is_sixteen_a_node(nodes: int) -> None:
    variables = engine("nemo").settings(llama_70b(nodes))["variables"]
    assert (variables["GBS"], variables["JOB_TOTAL_GPUS"]) == (str(16 * nodes), str(8 * nodes))
    assert variables["MAX_STEPS"] == "50"


@pytest.mark.parametrize(("variant", "dtype"), [(None, "bf16"), ("fp8", "fp8")])
def test_the_published_command_is_called(variant: str | None, dtype: str) -> None:
    job = engine("nemo").job(llama_70b(16, variant, script="/recipe/launch.sh"), "x")
    lines = slurm.render(job).splitlines()
    assert lines[-2] == "cd -- /recipe"
    values = {"${SBATCH_ACCOUNT}": "acct", "${SBATCH_PARTITION}": "batch", "${NUM_NODES}": "16"}
    words = COMMAND.partition("sbatch ")[2]
    for name, value in values.items():
        words = words.replace(name, value)
    assert lines[-1].endswith(f' "$@" {words}')
    assert f"export DTYPE={dtype}" in lines and "export MODEL_SIZE=70b" in lines
    place = RESULTS.replace("$GSW_VERSION", "25.01").replace("${DTYPE}", dtype)
    place = place.replace("$JOB_TOTAL_GPUS", "128")
    assert f'export RUN_CONF_RESULT_DIR="$folder"/{place}' in lines
    assert "export STAGE_PATH=/lustre/nemo" in lines
    assert set(job.files) == {"nemo.json"} and job.timeout_s is None, "its own #SBATCH lines decide"


def test_a_sites_gpus_are_asked_for_unless_it_has_none_to_ask_for() -> None:
    spec = llama_70b(8)
    slurm_site = spec.cluster.slurm.model_copy(update={"gres": None})
    cluster = spec.cluster.model_copy(update={"slurm": slurm_site})
    batch = engine("nemo").job(spec.model_copy(update={"cluster": cluster}), "x").batch
    assert batch and batch.options == ("-A", "acct", "-p", "batch", "--gres=gpu:8", "-N", "8")


def test_our_own_script_says_all_that_the_run_is() -> None:
    text = engine("nemo").job(llama_70b(8), "x").files["launch.sh"]
    words = text.replace("\\\n", "").split()
    for override in (
        *(line.removeprefix("training.") for line in PUBLISHED.split()[:3]),
        "++model.context_parallel_size=2",
        "trainer.num_nodes=8",
        "trainer.devices=8",
        "trainer.max_steps=50",
        "model.num_layers=80",
        "model.ffn_hidden_size=28672",
        "++model.num_query_groups=8",
        "model.kv_channels=128",
        "++model.override_vocab_size=128256",
        "model.optim.sched.warmup_steps=2000",
        "model.data.data_impl=mock",
    ):
        assert override in words
    assert "#SBATCH --ntasks-per-node=8" in text


def test_the_vocabulary_is_the_recipes_padded_for_its_tensor_ranks() -> None:
    spec = llama_70b(8)
    odd = {"vocab_size": 50257, "vocab_multiple": 128, "head_size": 96}
    text = launch_text(spec.model_copy(update={"model": spec.model.model_copy(update=odd)}))
    assert "  ++model.override_vocab_size=50688 \\\n" in text, "99 x 128 x 4"
    assert "  model.kv_channels=96 \\\n" in text


PROFILE = {"profile": True, "profile_ranks": "0", "profile_gpu_metrics": True}


def test_the_profilers_switches_are_handed_on() -> None:
    variables = engine("nemo").settings(llama_70b(8, **PROFILE))["variables"]
    assert variables["ENABLE_PROFILE"] == "true"
    assert variables["RUN_CONF_PROFILE_RANKS"] == "0"
    assert variables["RUN_CONF_PROFILE_GPU_METRICS"] == "true"
    text = engine("nemo").job(llama_70b(8, **PROFILE), "x").files["launch.sh"]
    assert "nsys profile" in text and "model.nsys_profile.start_step=20" in text
    spec = llama_70b(8, nccl_trace=True)
    traced = engine("nemo").settings(spec)["variables"]
    assert traced["ENABLE_NCCL_TRACE"] == "true"
    assert traced["RUN_CONF_RESULT_DIR"].endswith("results/25.01-nccl-trace/bf16/70b/64")
    assert "export NCCL_DEBUG=INFO" in engine("nemo").job(spec, "x").files["launch.sh"]


def test_a_profiled_run_is_known_as_one() -> None:
    assert RunSettings.of(llama_70b()).profiled is False
    for spec in (llama_70b(profile=True), llama_70b(nccl_trace=True)):
        assert RunSettings.of(spec).profiled is True


def tiny() -> RunSpec:
    return spec_of("nemo", "tiny-opt", site(), {**NEMO, "script": "/recipe/launch.sh"})


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (llama_70b(stage_path=""), "engine_settings.stage_path is missing"),
        (llama_70b(profile=True, nccl_trace=True), "exclude each other"),
        (llama_70b(stage_path="/a:b"), "stage_path /a:b must not contain `:` or `,`"),
        (llama_70b(profile=True, profile_ranks="$(id)"), "ranks $(id) must be a list of ranks"),
        (llama_70b(profile=True, profile_stop_step="3;id"), "stop_step 3;id must be a whole"),
        (llama_70b(profile="no"), "engine_settings.profile no must be true or false"),
        (llama_70b(profile_cpu=True), "needs engine_settings.profile=true"),
        (
            llama_70b(nccl_trace=True),
            "training.steps must be 10 with engine_settings.nccl_trace (--set steps=10)",
        ),
        (tiny(), "the recipe's launch.sh trains only Llama 3.1 with 8b, 70b, 405b"),
    ],
)
def test_what_it_cannot_do_is_told(spec: RunSpec, sentence: str) -> None:
    assert any(sentence in problem for problem in engine("nemo").unsupported(spec))


NOT_HANDED_ON = {
    "layout.zero_stage=3": "layout.zero_stage 3",
    "layout.dp_shard=2": "layout.dp_shard",
    "layout.schedule=gpipe": "layout.schedule gpipe",
    "model.embedding_norm=true": "model.embedding_norm",
    "model.activation=gelu_tanh": "model.activation gelu_tanh with a gate",
    "training.compile=blocks": "training.compile blocks",
    "checkpoint.every=5": "checkpoint.every",
    "checkpoint.resume=x": "checkpoint.resume",
    "training.lr_schedule={kind: constant, warmup: 3}": "training.lr_schedule.warmup",
    "data={source: text, path: x.txt}": "data.source text",
}


def test_what_nemo_is_not_told_of_is_refused_and_the_rest_is_handed_on() -> None:
    usual = llama_70b(8)
    assert engine("nemo").unsupported(usual) == []
    changed = spec_of("nemo", "llama31-70b", usual.cluster, NEMO, None, *NOT_HANDED_ON)
    problems = engine("nemo").unsupported(changed)
    assert len(problems) == len(NOT_HANDED_ON)
    for sentence in NOT_HANDED_ON.values():
        assert any(problem.startswith(sentence) for problem in problems), sentence
    eps = usual.training.model_copy(update={"eps": 1e-5})
    text = launch_text(usual.model_copy(update={"training": eps}))
    assert "  ++model.optim.eps=1e-05 \\\n" in text


def test_the_recipes_own_script_is_told_its_variables_alone() -> None:
    spec = llama_70b(8, script="/recipe/launch.sh", dataset=True)
    layout = spec.layout.model_copy(update={"micro_batch": 2, "recompute": "full"})
    problems = engine("nemo").unsupported(spec.model_copy(update={"layout": layout}))
    assert [problem.split(":")[0] for problem in problems] == [
        "layout.micro_batch 2 is not supported",
        "layout.recompute full is not supported",
        "engine_settings.dataset needs Paceline's launch.sh; remove script or dataset",
    ]


def test_the_published_run_is_refused_for_nothing_but_what_is_not_there(tmp_path: Path) -> None:
    spec = llama_70b(8, stage_path=str(tmp_path))
    assert engine("nemo").unsupported(spec) == []
    assert "nvidia+nemo+24.09.sqsh does not exist" in str(engine("nemo").missing(spec))
    (tmp_path / "nvidia+nemo+24.09.sqsh").touch()
    assert engine("nemo").missing(spec) is None


def test_the_published_run_is_shown_before_it_is_submitted(tmp_path: Path) -> None:
    (tmp_path / "nvidia+nemo+24.09.sqsh").touch()
    chosen = ("--set", "engine=nemo", "--set", f"engine_settings.stage_path={tmp_path}")
    words = ("run", "llama31-70b", "--cluster", "dgx-h100", *chosen, "--dry-run")
    done = paceline(*words, runs=tmp_path / "runs")
    assert done.returncode == 0, done.stderr
    assert "-N 8 ./launch.sh\n" in done.stdout, "job.sh"
    assert "  model.tensor_model_parallel_size=4 \\\n" in done.stdout, "launch.sh of our own"
    assert "and launch.sh, which job.sh submits:" in done.stderr
    assert "on every node" not in done.stderr, "the script's matter"


def test_the_list_of_engines_says_what_is_not_here(tmp_path: Path) -> None:
    done = paceline("recipes", "engines", "--json", env={"PATH": str(tmp_path)})
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows["nemo"]["state"] == "missing" and "sbatch" in rows["nemo"]["remedy"]
    assert "Pyxis" in rows["mlperf"]["requires"][0]


SRUN = '#!/bin/bash\nprintf "%s\\0" "$@" >"$RESULT_DIR/words"\n'


def test_no_setting_becomes_a_command_of_our_script(tmp_path: Path) -> None:
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(SRUN)
    srun.chmod(0o755)
    stage = f"{tmp_path}/a $(touch {tmp_path}/x)`touch {tmp_path}/y`\"'"
    ranks = f"$(touch {tmp_path}/z)"
    hostile = {"stage_path": stage, "profile": True, "profile_ranks": ranks, "dataset": True}
    job = engine("nemo").job(llama_70b(8, **hostile), "x")
    (tmp_path / "launch.sh").write_text(job.files["launch.sh"])
    env = {name: value.replace("{folder}", str(tmp_path)) for name, value in job.env.items()}
    env |= {"PATH": f"{srun.parent}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    subprocess.run(["/bin/bash", "launch.sh"], cwd=tmp_path, env=env, check=True)

    (seen,) = tmp_path.glob("results/*/*/*/*/words")
    words = seen.read_text().split("\0")
    mounts = f"{seen.parent},{seen.parent}/index_mapping,{stage}/llama3.1-dataset:/dataset"
    assert f"--container-mounts={mounts}" in words
    assert f"model.nsys_profile.ranks=[{ranks}]" in words
    assert f"exp_manager.explicit_log_dir={seen.parent}/results" in words
    assert f"model.data.index_mapping_dir={seen.parent}/index_mapping" in words
    assert {path.name for path in tmp_path.iterdir()} == {"bin", "launch.sh", "results"}
