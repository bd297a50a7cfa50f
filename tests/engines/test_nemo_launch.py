"""NVIDIA's published procedure for NeMo: its command, variables, overrides and result folders."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from paceline.core.run import RunSettings, RunSpec
from paceline.engines import engine
from paceline.engines.nemo.launch import launch_script, launch_text, notes, staged_pieces
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


@pytest.mark.parametrize(("mem", "options"), [("none", ()), ("900G", ("--mem=900G",))])
def test_a_site_replaces_or_omits_the_memory_of_our_script(
    mem: str, options: tuple[str, ...]
) -> None:
    spec = llama_70b(8)
    slurm_site = spec.cluster.slurm.model_copy(update={"mem": mem})
    cluster = spec.cluster.model_copy(update={"slurm": slurm_site})
    job = engine("nemo").job(spec.model_copy(update={"cluster": cluster}), "x")
    assert "#SBATCH --mem" not in job.files["launch.sh"] and job.batch
    assert tuple(word for word in job.batch.options if "mem" in word) == options


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
        "model.tokenizer.library=huggingface",
        "model.tokenizer.type=/tokenizer",
        "trainer.limit_val_batches=1",
        "++trainer.num_sanity_val_steps=0",
        "model.optim.lr=0.0003",
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
    usual = launch_text(llama_70b(8, profile=True))
    assert f"model.nsys_profile.ranks=[{','.join(map(str, range(16)))}]" in usual
    assert '"$RESULT_DIR/nsys/llama3.1-${MODEL_SIZE}-${DTYPE}_${JOB_TOTAL_GPUS}g_' in usual
    assert "--gpu-metrics-device" not in usual
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
        (llama_70b(stage_path=""), "stage_path is missing: set STAGE_PATH as folder of the image"),
        (llama_70b(stage_path="", image="x.sqsh"), "or set engine_settings.tokenizer"),
        (llama_70b(tokenizer="/a:b"), "tokenizer /a:b must not contain `:` or `,`"),
        (llama_70b(profile=True, nccl_trace=True), "exclude each other"),
        (llama_70b(stage_path="/a:b"), "stage_path /a:b must not contain `:` or `,`"),
        (llama_70b(profile=True, profile_ranks="$(id)"), "ranks $(id) must be a list of ranks"),
        (llama_70b(profile=True, profile_stop_step="3;id"), "stop_step 3;id must be a whole"),
        (llama_70b(profile="no"), "engine_settings.profile no must be true or false"),
        (llama_70b(environment="GBS=64"), "environment: GBS follows from the run"),
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


def test_a_pipeline_that_nemo_cannot_split_is_refused() -> None:
    """The layout of llama31-405b counts embedding and head as layers, which NeMo 1 cannot."""
    of_128 = site(128, 8, "H100-SXM")
    (problem,) = engine("nemo").unsupported(spec_of("nemo", "llama31-405b", of_128, NEMO))
    assert problem.startswith("126 layers cannot be split over pp 8 x vp 8 = 64 stages")
    of_72 = site(72, 8, "H100-SXM")
    published = spec_of("nemo", "llama31-405b", of_72, NEMO, "dgxc")
    assert engine("nemo").unsupported(published) == []
    variables = engine("nemo").settings(published)["variables"]
    layout = {name: variables[name] for name in ("TP", "PP", "CP", "VP", "GBS")}
    assert layout == {"TP": "8", "PP": "9", "CP": "2", "VP": "7", "GBS": "252"}


RECIPE_FILES = ("launch.sh", "configure.sh", "cfg/llama3.1_70b.yaml")
"""Files that the recipe's setup.sh copies to STAGE_PATH."""
READS = "RUN_CONF_PROFILE_START_STEP RUN_CONF_PROFILE_STOP_STEP RUN_CONF_PROFILE_GPU_METRICS"
"""Profiler variables that configure.sh of tag v25.01 reads; its README lists two more."""


def staged(folder: Path) -> Path:
    """STAGE_PATH as the recipe's setup.sh leaves it, without image, tokenizer and data."""
    for name in RECIPE_FILES:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("#!/bin/bash\n#SBATCH --ntasks-per-node=8\n")
    (folder / "configure.sh").write_text(f"# {READS}\n")
    return folder


def test_the_recipes_script_in_stage_path_is_the_default(tmp_path: Path) -> None:
    stage = str(staged(tmp_path))
    spec = llama_70b(8, stage_path=stage)
    assert launch_script(spec) == tmp_path / "launch.sh" and notes(spec) == []
    job = engine("nemo").job(spec, "x")
    assert set(job.files) == {"nemo.json"} and job.batch and job.batch.folder == stage
    assert job.env["RUN_CONF_INDEX_DIR"] == "{folder}", "STAGE_PATH may be read-only"
    own = llama_70b(8, stage_path=stage, script="own")
    assert launch_script(own) is None and "launch.sh" in engine("nemo").job(own, "x").files
    (note,) = notes(own)
    assert "lacks the recipe's user-buffer overlap" in note and "trains on mock data" in note


def test_what_the_recipes_script_would_do_otherwise_is_refused(tmp_path: Path) -> None:
    stage = str(staged(tmp_path))
    profile = {"profile": True, "profile_ranks": "0", "profile_gpu_metrics": True}
    spec = llama_70b(8, stage_path=stage, dataset=False, tokenizer="/t", **profile)
    layout = spec.layout.model_copy(update={"micro_batch": 2, "recompute": "full"})
    problems = engine("nemo").unsupported(spec.model_copy(update={"layout": layout}))
    assert [problem.split(":")[0].split(";")[0] for problem in problems] == [
        "layout.micro_batch 2 is not supported",
        "layout.recompute full is not supported",
        "the recipe's launch.sh trains 70b on STAGE_PATH's data set",
        "engine_settings.tokenizer has no effect on the recipe's launch.sh",
        "engine_settings.profile_ranks has no effect, because configure.sh does not read "
        "RUN_CONF_PROFILE_RANKS",
    ]
    assert all("engine_settings.script=own" in problem or "own" in problem for problem in problems)
    four = spec_of("nemo", "llama31-70b", site(16, 4, "H100-SXM"), {"stage_path": stage})
    (problem,) = engine("nemo").unsupported(four)
    assert problem.startswith("devices_per_node 4 must be 8")


def test_the_recipes_405b_is_its_own_model(tmp_path: Path) -> None:
    stage = {"stage_path": str(staged(tmp_path))}
    released = spec_of("nemo", "llama31-405b", site(72, 8, "H100-SXM"), stage, None,
                       "layout.pp=9", "layout.vp=7", "global_batch=252")  # fmt: skip
    (problem,) = engine("nemo").unsupported(released)
    assert problem.startswith("model.num_kv_heads 8: the recipe's 405b has 16; use --variant dgxc")
    few = spec_of("nemo", "llama31-405b", site(24, 8, "H100-SXM"), stage, "dgxc", "layout.pp=6",
                  "layout.vp=7", "layout.cp=1", "global_batch=252")  # fmt: skip
    (problem,) = engine("nemo").unsupported(few)
    assert problem.startswith("the recipe's configure.sh trains only 42 of 126 layers on 192 GPUs")


def test_each_missing_file_is_listed_with_the_command_that_makes_it(tmp_path: Path) -> None:
    spec = llama_70b(8, stage_path=str(tmp_path))
    assert engine("nemo").unsupported(spec) == []
    missing = str(engine("nemo").missing(spec))
    assert "`paceline recipes stage llama31-70b --engine nemo` makes them all" in missing
    assert "nvidia+nemo+24.09.sqsh (to make: `enroot import --output" in missing
    assert "llama/tokenizer.json (to make: `huggingface-cli download meta-llama/" in missing
    for piece in staged_pieces(spec):
        piece.path.parent.mkdir(parents=True, exist_ok=True)
        piece.path.touch()
    assert engine("nemo").missing(spec) is None
    staged(tmp_path)
    missing = str(engine("nemo").missing(spec))
    assert "my-llama_00_text_document.bin" in missing and "generate_dataset.sh" in missing
    assert str(tmp_path / "launch.sh") not in missing


def test_image_and_tokenizer_are_enough_for_mock_data() -> None:
    given = {"stage_path": None, "image": "/i.sqsh", "tokenizer": "/tokenizers/llama"}
    spec = llama_70b(8, **given)
    assert engine("nemo").unsupported(spec) == []
    assert engine("nemo").job(spec, "x").env["TOKENIZER_PATH"] == "/tokenizers/llama"


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
    assert rows["megatron_bridge"]["state"] == "not checked", "its checkout is a setting of a run"


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
    data = f"{stage}/llama3.1-dataset"
    mounts = f"{seen.parent},{seen.parent}/index_mapping,{data}/llama:/tokenizer,{data}:/dataset"
    assert f"--container-mounts={mounts}" in words
    assert f"model.nsys_profile.ranks=[{ranks}]" in words
    assert f"exp_manager.explicit_log_dir={seen.parent}/results" in words
    assert f"model.data.index_mapping_dir={seen.parent}/index_mapping" in words
    assert {path.name for path in tmp_path.iterdir()} == {"bin", "launch.sh", "results"}


NSYS = '#!/bin/bash\nprintf "%s\\0" "$@" >"$RESULT_DIR/nsys-$SLURM_LOCALID"\n'
TASKS = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for SLURM_LOCALID in 0 1; do export SLURM_LOCALID; "$@"; done
"""


def test_only_the_first_task_of_a_node_counts_gpu_metrics(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"srun": TASKS, "nsys": NSYS}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    job = engine("nemo").job(llama_70b(8, **PROFILE), "x")
    (tmp_path / "launch.sh").write_text(job.files["launch.sh"])
    env = {name: value.replace("{folder}", str(tmp_path)) for name, value in job.env.items()}
    env |= {"PATH": f"{programs}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    subprocess.run(["/bin/bash", "launch.sh"], cwd=tmp_path, env=env, check=True)

    first, second = sorted(tmp_path.glob("results/*/*/*/*/nsys-*"))
    words = [path.read_text().split("\0")[:-1] for path in (first, second)]
    assert "--gpu-metrics-device=all" in words[0]
    assert [word for word in words[0] if word != "--gpu-metrics-device=all"] == words[1]
    report = "llama3.1-70b-bf16_64g_7_%q{SLURM_NODEID}_%q{SLURM_LOCALID}"
    assert f"{first.parent}/nsys/{report}" in words[1]
    assert words[1][-1].startswith("model.nsys_profile.ranks=[0]")
