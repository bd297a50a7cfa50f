"""DeepSpeed-Chat's command line: the published runs' own, and what has no place in it."""

from __future__ import annotations

import ast
import base64
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.hardware import Cluster
from paceline.core.run import RunSpec
from paceline.engines import engine, last_step
from paceline.engines.deepspeed_chat import project_program
from paceline.engines.deepspeed_chat.launch import (
    arguments,
    command,
    launcher_files,
    world_info,
)
from paceline.files.recipe import load_recipe, resolve

ENGINE = engine("deepspeed_chat")
OPTIONS = Path(__file__).parent / "deepspeed_chat_options.json"
"""Accepted options of real programs by repository and commit, and the variables they read."""
LAMBDA = "LambdaLabsML/DeepSpeedExamples@7770cec"
DEEPSPEEDAI = "deepspeedai/DeepSpeedExamples@45b4b71"
ROOT = "/home/ubuntu/ml-1cc/benchmark"
MAIN = (
    f"{ROOT}/DeepSpeedExamples/applications/DeepSpeed-Chat/training/"
    "step1_supervised_finetuning/main.py"
)
LOGS = {
    "lambda_1cc-64xN_1node_1xN_opt-350m_bs24_zero0_opt-350m_1_1xN_batch0001.log": (
        "opt-350m-sft",
        "opt-350m_step1",
        ("ml-512-node-001",),
    ),
    "lambda_1cc-64xN_1node_1xN_opt-13b_bs16_zero0_opt-13b_1_1xN_batch0001.log": (
        "opt-13b-sft",
        "opt-13b_step1",
        ("ml-512-node-001",),
    ),
    "lambda_1cc-64xN_allnodes_2xN_opt-350m_bs24_zero0_opt-350m_1_2xN_batch0001.log": (
        "opt-350m-sft",
        "opt-350m_step1",
        ("ml-512-node-001", "ml-512-node-002"),
    ),
}


def spec_of(recipe: str, *changes: str, **cluster: object) -> RunSpec:
    """The recipe with this engine on one node of 8 GPUs."""
    place = {"name": "lab", "device": "H100-SXM", "devices_per_node": 8, **cluster}
    overrides = ("engine=deepspeed_chat", *changes)
    return resolve(load_recipe(recipe, None, overrides), Cluster.model_validate(place), True, None)


def published(recipe: str, cache: str, hosts: tuple[str, ...], *more: str) -> RunSpec:
    """The recipe on the hosts of a published run, with its paths."""
    return spec_of(
        recipe,
        f"engine_settings.program={MAIN}",
        f"engine_settings.data_output_path={ROOT}/.cache/data_files/{cache}",
        *more,
        nodes=len(hosts),
        hosts=hosts,
        launcher="ssh",
    )


@pytest.mark.parametrize("log", LOGS)
def test_the_published_command_lines_come_out_word_for_word(reference_data: Path, log: str):
    recipe, cache, hosts = LOGS[log]
    text = (reference_data / "logs" / log).read_text(errors="replace")
    info = re.search(r"--world_info=(\S+)", text)
    started = re.search(r"spawned with command: (\[.*\])", text)
    assert info is not None and started is not None
    spec = published(recipe, cache, hosts)
    assert ENGINE.unsupported(spec) == []
    assert world_info(spec) == info[1]
    words = [word.format(python="/usr/bin/python3", local_rank=0) for word in command(spec)]
    assert words == ast.literal_eval(started[1])


def test_deepspeeds_own_launcher_gets_hosts_and_master_and_its_two_files():
    hosts = ("n-1", "n-2")
    spec = published("opt-13b-sft", "x", hosts, "engine_settings.launcher=deepspeed")
    secret = {"NCCL_IB_HCA": "=mlx5_1", "HF_TOKEN": "hf_abcdefghijklmnop"}
    spec = spec.model_copy(update={"cluster": spec.cluster.model_copy(update={"env": secret})})
    words = command(spec)
    assert words[:4] == ["{python}", "-u", "-m", "deepspeed.launcher.launch"]
    info = next(word for word in words if word.startswith("--world_info=")).partition("=")[2]
    assert json.loads(base64.urlsafe_b64decode(info)) == {host: [*range(8)] for host in hosts}
    assert "--master_addr={master_addr}" in words and "--node_rank={node_rank}" in words
    assert not any(word.startswith("--local_rank") for word in words)
    files = launcher_files(spec)
    assert files["hostfile"] == "n-1 slots=8\nn-2 slots=8\n"
    assert files[".deepspeed_env"] == f"PROJECT_PATH={ROOT}\nNCCL_IB_HCA==mlx5_1\n"


def test_deepspeeds_own_launcher_is_started_once_a_node():
    spec = published("opt-13b-sft", "x", ("n-1", "n-2"), "engine_settings.launcher=deepspeed")
    job = ENGINE.job(spec, "x")
    assert job.ranks_per_node == 1 and job.program[1] == "node" and "hostfile" in job.files


def test_our_program_gets_the_recipes_shape_and_all_that_the_published_one_cannot_say():
    spec = spec_of("opt-350m-sft-tiny", device="cpu", devices_per_node=2)
    assert ENGINE.unsupported(spec) == []
    job = ENGINE.job(spec, "x")
    shape = json.loads(job.files["model/config.json"])
    assert (shape["num_hidden_layers"], shape["word_embed_proj_dim"]) == (4, 128)
    words = " ".join(arguments(spec))
    assert "--data_path stdlib --data_split 1,0,0" in words
    assert "--dtype bf16 --attention eager --steps_per_print 1 --gradient_clipping 1.0" in words
    assert "--lr_decay_steps 70" in words and "--lora_dim" not in words
    assert job.env["DS_ACCELERATOR"] == "cpu"
    assert {"sft_program.py", "sft_data_program.py", "sft_model_program.py"} < job.files.keys()


def test_settings_of_the_engine_reach_the_command_line(tmp_path: Path):
    data = tmp_path / "pairs.jsonl"
    data.write_text("{}\n")
    spec = spec_of(
        "opt-13b-sft-tiny",
        f"engine_settings.data={data},Dahoas/rm-static",
        "engine_settings.offload=true",
        "engine_settings.attention=sdpa",
        "engine_settings.epochs=3",
        "layout.zero_stage=2",
    )
    assert ENGINE.unsupported(spec) == []
    words = " ".join(arguments(spec))
    for part in (
        f"--data_path {data} Dahoas/rm-static --",
        "--zero_stage 2 --lora_dim 8 --lora_module_name decoder.layers. --lora_learning_rate 0.001",
        "--offload --deepspeed",
        "--num_train_epochs 3",
        "--attention sdpa",
    ):
        assert part in words


REFUSED = {
    "engine_settings.offload=true": "layout.zero_stage 1 or more",
    "engine_settings.launcher=pdsh": "must be one of paceline, deepspeed",
    "engine_settings.epochs=0": "must be a whole number of at least 1",
    "engine_settings.program=main.py": "must be an absolute path",
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_it_cannot_do_is_refused_with_the_reason(change: str):
    problems = ENGINE.unsupported(spec_of("opt-350m-sft", change))
    assert len(problems) == 1 and REFUSED[change] in problems[0]


def test_adapters_that_are_not_deepspeed_chats_are_refused():
    spec = spec_of("opt-13b-sft", "lora.alpha=2", "lora.targets=[q, v]", "lora.dropout=0.1")
    reasons = ("lora.alpha 2", "all of down, k, o, q, up, v", "lora.dropout 0.1")
    problems = " ".join(ENGINE.unsupported(spec))
    assert all(reason in problems for reason in reasons)


def test_a_checkouts_program_refuses_what_only_ours_can():
    changes = ("training.grad_clip=0.5", "training.dtype=fp32", "engine_settings.attention=sdpa")
    spec = spec_of("opt-350m-sft-tiny", f"engine_settings.program={MAIN}", *changes, device="cpu")
    problems = " ".join(ENGINE.unsupported(spec))
    for reason in (
        "clips gradients at 1;",
        "training.dtype fp32",
        "program only",
        "device cpu",
        "this shape",
    ):
        assert reason in problems


def test_a_checkouts_program_that_lacks_an_argument_is_refused(tmp_path: Path):
    main = tmp_path / "main.py"
    spec = spec_of("opt-350m-sft", f"engine_settings.program={main}")
    options = [word for word in arguments(spec) if word.startswith("--")]
    lines = [f'parser.add_argument("{name}")' for name in options if name != "--deepspeed"]
    main.write_text("\n".join(lines))
    assert engine("deepspeed_chat").unsupported(spec) == []
    main.write_text(main.read_text().replace("zero_stage", "stage").replace("--seed", "--seeds"))
    (problem,) = engine("deepspeed_chat").unsupported(spec)
    assert (
        "main.py does not accept --seed, --zero_stage: use the program of LambdaLabsML" in problem
    )


def checkout(root: Path, name: str, folder: str = "content") -> Path:
    """Write a program that has the options and reads the variables of a real one."""
    real = json.loads(OPTIONS.read_text())[name]
    main = root / folder / real["program"]
    main.parent.mkdir(parents=True)
    reads = [f'os.getenv("{variable}") + "/x"' for variable in real["environment"]]
    options = [f'parser.add_argument("{option}")' for option in real["options"]]
    main.write_text("\n".join([*reads, *options]))
    return main


def check_options(words: list[str], options: dict[str, str]) -> None:
    """Check that a program with these options and types accepts the words."""
    places = [place for place, word in enumerate(words) if word.startswith("--")]
    for start, end in zip(places, [*places[1:], len(words)], strict=True):
        name, values = words[start], words[start + 1 : end]
        kind = options[name]
        assert (len(values) == 0) == (kind == "flag"), name
        assert len(values) <= 1 or kind.startswith("list of"), name
        for value in values:
            {"int": int, "float": float}.get(kind, str)(value)


@pytest.mark.parametrize("recipe", ["opt-350m-sft", "opt-13b-sft"])
@pytest.mark.parametrize("name", [LAMBDA, DEEPSPEEDAI])
def test_both_forks_accept_every_argument_they_get(tmp_path: Path, name: str, recipe: str):
    spec = spec_of(recipe, f"engine_settings.program={checkout(tmp_path, name)}")
    assert ENGINE.unsupported(spec) == []
    check_options(arguments(spec), json.loads(OPTIONS.read_text())[name]["options"])


SCRIPTS = {
    "opt-350m-sft": "--per_device_train_batch_size 24 --num_warmup_steps 10 --max_steps 1000 "
    "--disable_dropout",
    "opt-13b-sft": "--per_device_train_batch_size 16 --num_warmup_steps 0 --max_steps 100 "
    "--gradient_checkpointing --lora_dim 128 --lora_module_name decoder.layers.",
}
"""Arguments that the two scripts of 7770cec do not share."""
SHARED = (
    "--data_path Dahoas/rm-static Dahoas/full-hh-rlhf --data_split 2,4,4 --max_seq_len 512 "
    "--per_device_eval_batch_size 4 --learning_rate 1e-10 --weight_decay 0.1 --zero_stage 0 "
    "--gradient_accumulation_steps 1 --lr_scheduler_type cosine --seed 1234 --deepspeed "
    "--num_train_epochs 10"
)


def options(text: str) -> dict[str, str]:
    """Return a command line's options with their values."""
    parts = [part.partition(" ") for part in f" {text}".split(" --")[1:]]
    return {name: values.strip() for name, _, values in parts}


@pytest.mark.parametrize("recipe", SCRIPTS)
def test_the_arguments_of_lambdas_present_scripts_are_a_variant(tmp_path: Path, recipe: str):
    program = f"engine_settings.program={checkout(tmp_path, LAMBDA)}"
    place = Cluster(name="lab", device="H100-SXM", devices_per_node=8)
    variant = load_recipe(recipe, "scripts-7770cec", (program,))
    spec = resolve(variant, place, True, None)
    assert ENGINE.unsupported(spec) == []
    words = options(" ".join(arguments(spec)))
    model = "facebook/" + recipe.removesuffix("-sft")
    assert words.pop("model_name_or_path") == model and words.pop("data_output_path")
    assert words == options(f"{SHARED} {SCRIPTS[recipe]}")


@pytest.mark.parametrize("recipe", ["opt-350m-sft-tiny", "opt-13b-sft-tiny"])
@pytest.mark.parametrize("name", [LAMBDA, DEEPSPEEDAI])
def test_both_forks_train_the_tiny_recipes(tmp_path: Path, name: str, recipe: str):
    program = f"engine_settings.program={checkout(tmp_path, name)}"
    place = Cluster(name="lab", device="H100-SXM", devices_per_node=2)
    spec = resolve(load_recipe(recipe, "deepspeed-chat", (program,)), place, True, None)
    assert ENGINE.unsupported(spec) == []
    check_options(arguments(spec), json.loads(OPTIONS.read_text())[name]["options"])


def test_an_own_project_folder_is_left_alone(tmp_path: Path):
    program = f"engine_settings.program={checkout(tmp_path, LAMBDA)}"
    own = spec_of("opt-350m-sft", program, "engine_settings.environment=PROJECT_PATH=/srv/chat")
    for spec in (own, spec_of("opt-350m-sft", program, env={"PROJECT_PATH": "/srv/chat"})):
        job = ENGINE.job(spec, "x")
        assert job.env["PROJECT_PATH"] == "/srv/chat"
        assert "project_program.py" not in job.program


def test_lambdas_fork_gets_its_project_folder_from_its_set_up_or_on_the_node(tmp_path: Path):
    main = checkout(tmp_path, LAMBDA, "DeepSpeedExamples")
    job = ENGINE.job(spec_of("opt-350m-sft", f"engine_settings.program={main}"), "x")
    assert job.env["PROJECT_PATH"] == str(tmp_path)
    assert "project_program.py" not in job.program
    job = ENGINE.job(
        spec_of("opt-350m-sft", f"engine_settings.program={checkout(tmp_path, LAMBDA)}"), "x"
    )
    start = job.program.index("project_program.py")
    assert job.program[start + 1].startswith("{tmp}/deepspeed_chat-")
    assert job.program[start + 2 : start + 4] == ("--", "{python}")
    assert "project_program.py" in job.files
    assert "PROJECT_PATH" not in job.env


def test_tokenized_data_is_on_the_node_and_shared_by_the_runs_of_one_data_set(tmp_path: Path):
    program = f"engine_settings.program={checkout(tmp_path, LAMBDA)}"
    other = f"engine_settings.program={checkout(tmp_path, DEEPSPEEDAI, 'other')}"

    def folder(*changes: str) -> str:
        words = arguments(spec_of("opt-350m-sft", program, *changes))
        return words[words.index("--data_output_path") + 1]

    assert re.fullmatch(r"\{tmp\}/deepspeed_chat-[0-9a-f]{8}/data_files", folder())
    assert folder("training.steps=7") == folder()
    assert folder("engine_settings.data=Dahoas/rm-static") != folder()
    link = tmp_path / "rm-static"
    link.symlink_to(tmp_path / "content")
    first = folder(f"engine_settings.data={link}")
    link.unlink()
    link.symlink_to(tmp_path / "other")
    assert folder(f"engine_settings.data={link}") != first  # another revision of the data
    assert folder(other) != folder()  # a pickle of one fork cannot be read by the other


def test_the_fork_of_deepspeedai_trains_epochs_finds_its_modules_and_needs_no_gpu(tmp_path: Path):
    main = checkout(tmp_path, DEEPSPEEDAI)
    program = (f"engine_settings.program={main}", "engine_settings.model=facebook/opt-350m")
    spec = spec_of("opt-350m-sft", *program, "training.dtype=bf16", device="cpu")
    assert ENGINE.unsupported(spec) == []
    words = " ".join(arguments(spec))
    assert "--dropout 0.0" in words and "--num_train_epochs 1 --dtype bf16" in words
    assert last_step(spec) is None
    modules = str(tmp_path / "content" / "applications" / "DeepSpeed-Chat")
    assert ENGINE.job(spec, "x").env["PYTHONPATH"] == modules
    others = spec_of("opt-350m-sft", *program, env={"PYTHONPATH": "/lib"})
    assert ENGINE.job(others, "x").env["PYTHONPATH"] == f"{modules}:/lib"


def test_a_program_in_a_container_is_lambdas_unless_the_fork_is_set():
    in_container = "engine_settings.program=/opt/chat/training/step1_supervised_finetuning/main.py"
    assert "--max_steps" in arguments(spec_of("opt-350m-sft", in_container))
    words = arguments(spec_of("opt-350m-sft", in_container, "engine_settings.fork=deepspeedai"))
    assert "--max_steps" not in words and "--dropout" in words
    (problem,) = ENGINE.unsupported(spec_of("opt-350m-sft", "engine_settings.fork=microsoft"))
    assert "engine_settings.fork microsoft must be one of lambda, deepspeedai" in problem


def test_staged_models_and_data_are_found_without_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PACELINE_STAGE", str(tmp_path / "stage"))
    spec = spec_of("opt-350m-sft", f"engine_settings.program={checkout(tmp_path, LAMBDA)}")
    assert "HF_HUB_OFFLINE" not in ENGINE.job(spec, "x").env
    for name in ("facebook/opt-350m", "Dahoas/full-hh-rlhf"):
        asset = tmp_path / "stage" / name.rpartition("/")[2]
        (asset / "content").mkdir(parents=True)
        about = {"name": asset.name, "kind": "hub-model", "source": name}
        manifest = {"asset": about, "revision": None, "bytes": 0, "sha256": "0" * 64, "files": []}
        manifest |= {"origin": "", "staged_at": "", "seconds": 0.0, "paceline_version": "1"}
        (asset / "manifest.json").write_text(json.dumps(manifest))
        link = tmp_path / "stage" / "repositories" / name
        link.parent.mkdir(parents=True)
        link.symlink_to(asset / "content")
    env = ENGINE.job(spec, "x").env
    assert env["HF_HUB_OFFLINE"] == "1"
    assert env["HF_HUB_CACHE"] == str(tmp_path / "stage" / "hub")
    words = arguments(spec)
    data = str(tmp_path / "stage" / "repositories" / "Dahoas" / "full-hh-rlhf")
    assert words[words.index("--data_path") + 1] == data
    assert words[words.index("--model_name_or_path") + 1] == "facebook/opt-350m"


def test_data_files_are_converted_on_the_node_for_the_fork_of_deepspeedai(tmp_path: Path):
    data, saved = tmp_path / "Dahoas" / "rm-static", tmp_path / "saved"
    for folder in (data, saved):
        folder.mkdir(parents=True)
    (saved / "dataset_dict.json").write_text("{}")
    program = f"engine_settings.program={checkout(tmp_path, DEEPSPEEDAI)}"
    job = ENGINE.job(
        spec_of("opt-350m-sft", program, f"engine_settings.data={data},{saved},other/name"), "x"
    )
    start = job.program.index("project_program.py")
    folder, conversion, end = job.program[start + 1 : start + 4]
    assert (conversion, end) == (f"{data}={folder}/Dahoas/rm-static", "--")
    places = job.program[job.program.index("--data_path") + 1 :]
    assert places[:3] == (f"{folder}/Dahoas/rm-static", str(saved), "other/name")


def test_data_is_converted_once(tmp_path: Path):
    source, target = tmp_path / "source", tmp_path / "node" / "Dahoas" / "rm-static"
    source.mkdir()
    for part in ("train", "test"):
        (source / f"{part}.jsonl").write_text('{"prompt": "a", "chosen": "b"}\n')
    datasets = pytest.importorskip("datasets")
    for _ in range(2):
        project_program.convert(str(source), target, tmp_path / "cache")
    assert datasets.load_from_disk(str(target))["train"][0]["chosen"] == "b"


def test_a_node_links_its_hub_cache_where_lambdas_program_looks(tmp_path: Path):
    folder, hub = tmp_path / "project", tmp_path / "hf" / "hub"
    hub.mkdir(parents=True)
    shows = "import os; print(os.environ['PROJECT_PATH'])"
    program = ["--", sys.executable, "-c", shows]
    command = [sys.executable, project_program.__file__, str(folder), *program]
    environment = {"HF_HOME": str(tmp_path / "hf")}
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == str(folder)
    assert (folder / ".cache" / "huggingface" / "transformers").readlink() == hub


def test_a_models_folder_without_the_name_of_its_tokenizer_is_refused_by_lambdas_fork(
    tmp_path: Path,
):
    model = tmp_path / "model"
    model.mkdir()
    for name, problems in ((LAMBDA, 1), (DEEPSPEEDAI, 0)):
        main = checkout(tmp_path, name, name)
        settings = (f"engine_settings.program={main}", f"engine_settings.model={model}")
        (model / "config.json").write_text("{}")
        found = ENGINE.unsupported(spec_of("opt-350m-sft", *settings))
        assert len(found) == problems and all("no _name_or_path" in each for each in found)
        (model / "config.json").write_text('{"_name_or_path": "facebook/opt-350m"}')
        assert ENGINE.unsupported(spec_of("opt-350m-sft", *settings)) == []


def test_a_models_folder_that_is_not_the_recipes_shape_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 768, "vocab_size": 50272}))
    spec = spec_of("opt-350m-sft", f"engine_settings.model={tmp_path}")
    assert ENGINE.unsupported(spec) == [
        f"engine_settings.model: {tmp_path} has hidden_size 768, the recipe 1024"
    ]
