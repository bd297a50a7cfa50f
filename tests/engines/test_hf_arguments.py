"""What transformers' Trainer is given for a run, and what it is not asked for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.core.hardware import Cluster
from paceline.core.layout import Layout
from paceline.core.run import RunSpec
from paceline.core.shape import LoraSpec
from paceline.core.training import Training
from paceline.engines.hf_trainer import job, settings, unsupported
from tests.example import SHAPE, make_spec

GPU = Cluster(name="node", device="H100-SXM", nodes=2, devices_per_node=8)
TRAINING = Training.model_validate(
    {
        "seq_len": 32,
        "global_batch": 128,
        "steps": 50,
        "dtype": "bf16",
        "lr": 1e-3,
        "lr_schedule": {"kind": "cosine", "warmup": 640, "min_lr": 1e-4, "unit": "samples"},
    }
)


def spec_of(**fields: Any) -> RunSpec:
    return make_spec(engine="hf_trainer", **fields)


def test_the_arguments_on_gpus():
    layout = Layout(micro_batch=4, zero_stage=3, recompute="full")
    spec = spec_of(cluster=GPU, training=TRAINING, layout=layout)
    assert unsupported(spec) == []
    resolved = settings(spec)
    assert resolved["arguments"] == {
        "output_dir": "output",
        "max_steps": 50,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "dataloader_num_workers": 0,
        "bf16": True,
        "fp16": False,
        "seed": 1234,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": False,
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "reshard_after_forward": True,
            "activation_checkpointing": True,
        },
        "ddp_backend": "nccl",
        "ddp_timeout": 300,
        "ddp_find_unused_parameters": False,
    }
    assert resolved["learning_rate"] == {
        "kind": "cosine",
        "warmup": 5.0,
        "decay": 50,
        "lowest": pytest.approx(0.1),
    }


def test_copies_recompute_by_the_trainer_itself():
    layout = Layout(micro_batch=4, recompute="full")
    arguments = settings(spec_of(layout=layout))["arguments"]
    assert arguments["activation_checkpointing"] and arguments["ddp_backend"] == "gloo"
    assert "fsdp" not in arguments
    alone = settings(spec_of(ranks=1))["arguments"]
    assert "ddp_backend" not in alone and alone["use_cpu"]


def test_the_program_is_started_once_a_device():
    made = job(spec_of(), "x")
    assert made.program[-3:] == ("{python}", "trainer_program.py", "hf_trainer.json")
    assert made.ranks_per_node == made.devices_per_node == 2
    assert json.loads(made.files["hf_trainer.json"]) == settings(spec_of())
    assert {"trainer_program.py", "token_windows_program.py"} < set(made.files)


def test_adapters_go_to_the_layers_of_the_family():
    lora = LoraSpec(rank=4, alpha=8, targets=("q", "down"))
    assert settings(spec_of(lora=lora))["lora"] == {
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "target_modules": ["q_proj", "down_proj"],
    }


def changed(**fields: Any) -> RunSpec:
    return spec_of(model=SHAPE.model_copy(update=fields))


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (
            spec_of(layout=Layout(micro_batch=4, zero_stage=3)),
            "on CPUs, accelerate silently trains full replicas",
        ),
        (changed(embedding_norm=True), "model.embedding_norm true is not supported"),
        (
            changed(norm="layernorm", kv_heads=2),
            "model.positions rope is not supported: fixed in transformers' GPT-2",
        ),
        (spec_of(engine_settings={"attention": "flash"}), "flash must be one of sdpa, eager"),
        (
            changed(norm="layernorm", positions="learned", position_offset=2, final_norm=False),
            "model.final_norm False: OPT has it only with model.norm_position=pre",
        ),
    ],
)
def test_what_the_trainer_cannot_do_is_said(spec: RunSpec, sentence: str):
    assert any(sentence in problem for problem in unsupported(spec)), unsupported(spec)
