"""DeepSpeed-Chat's command line: the published runs' own, and what has no place in it."""

from __future__ import annotations

import ast
import base64
import json
import re
from pathlib import Path

import pytest

from paceline.core.hardware import Cluster
from paceline.core.run import RunSpec
from paceline.engines import engine
from paceline.engines.deepspeed_chat.launch import (
    arguments,
    command,
    launcher_files,
    world_info,
)
from paceline.files.recipe import load_recipe, resolve

ENGINE = engine("deepspeed_chat")
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
    assert files[".deepspeed_env"] == "NCCL_IB_HCA==mlx5_1\n"


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
    main.write_text(main.read_text().replace("max_steps", "steps").replace("--seed", "--seeds"))
    (problem,) = engine("deepspeed_chat").unsupported(spec)
    assert "main.py does not accept --seed, --max_steps: use the program of LambdaLabsML" in problem


def test_a_models_folder_that_is_not_the_recipes_shape_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 768, "vocab_size": 50272}))
    spec = spec_of("opt-350m-sft", f"engine_settings.model={tmp_path}")
    assert ENGINE.unsupported(spec) == [
        f"engine_settings.model: {tmp_path} has hidden_size 768, the recipe 1024"
    ]
