"""What torchtitan is given for a run, and what it is not asked for."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest

from paceline.core.hardware import Cluster
from paceline.core.layout import Layout
from paceline.core.run import RunSpec
from paceline.core.training import Training
from paceline.engines.torchtitan import LOG_FORMAT, job, settings, unsupported
from paceline.files.recipe import load_recipe
from tests.engines.promises import check_read
from tests.engines.test_torchtitan import line
from tests.example import SHAPE, make_spec

GPU = Cluster(name="node", device="H100-SXM", nodes=2, devices_per_node=8)
TOML = """\
[job]
dump_folder = "output"
description = "example"

[metrics]
log_freq = 1
disable_color_printing = true

[model]
name = "llama3"
flavor = "example"

[optimizer]
name = "AdamW"
lr = 0.0003
beta1 = 0.9
beta2 = 0.95
eps = 1e-08
weight_decay = 0.1
implementation = "fused"

[lr_scheduler]
warmup_steps = 10
total_steps = 100
decay_type = "cosine"
min_lr_factor = 0.0

[training]
local_batch_size = 2
global_batch_size = 32
seq_len = 8192
max_norm = inf
steps = 50
dtype = "float32"
mixed_precision_param = "bfloat16"
mixed_precision_reduce = "float32"

[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 2
fsdp_reshard_after_forward = "default"
tensor_parallel_degree = 2
pipeline_parallel_degree = 1
context_parallel_degree = 2
context_parallel_rotate_method = "alltoall"

[checkpoint]
enable = false

[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"

[compile]
enable = true
components = ["model", "loss"]

[comm]
init_timeout_seconds = 300
train_timeout_seconds = 300

[experimental]
custom_import = "shape_program"

[debug]
seed = 1234
"""


def spec_of(**fields: Any) -> RunSpec:
    return make_spec(engine="torchtitan", **fields)


def training(**fields: Any) -> Training:
    given = {"seq_len": 32, "global_batch": 32, "steps": 50, "dtype": "bf16", **fields}
    return Training.model_validate(given)


def test_the_configuration_on_gpus():
    spec = spec_of(
        cluster=GPU,
        training=training(
            seq_len=8192,
            grad_clip=0,
            compile="blocks",
            lr_schedule={"kind": "cosine", "warmup": 10, "decay": 100},
        ),
        layout=Layout(
            tp=2,
            cp=2,
            cp_exchange="all-to-all",
            sequence_parallel=True,
            zero_stage=3,
            dp_shard=4,
            recompute="selective",
            micro_batch=2,
        ),
        engine_settings={"compile_loss": True},
    )
    assert unsupported(spec) == []
    made = job(spec, "x")
    assert made.files["torchtitan.toml"] == TOML
    tail = ("{python}", "-m", "torchtitan.train", "--job.config_file", "torchtitan.toml")
    assert made.program[-5:] == tail
    assert made.env["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "cpu_program.py" not in made.files


def test_a_pipeline_takes_its_micro_batches_as_one_batch():
    layout = Layout(pp=2, vp=2, micro_batch=2)
    shape = SHAPE.model_copy(update={"num_layers": 8})
    spec = spec_of(model=shape, layout=layout, training=training(global_batch=8, dtype="fp32"))
    assert unsupported(spec) == []
    config = tomllib.loads(job(spec, "x").files["torchtitan.toml"])
    assert config["training"]["local_batch_size"] == 8
    parallelism = config["parallelism"]
    assert parallelism["pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert parallelism["pipeline_parallel_microbatch_size"] == 2
    assert parallelism["pipeline_parallel_layers_per_stage"] == 2


def test_a_model_with_experts_is_torchtitans_qwen3():
    experts = {"num_experts": 8, "experts_per_token": 2, "shared_ffn_size": 2 * SHAPE.ffn_size}
    shape = SHAPE.model_copy(update=experts)
    forced = training(routing="forced")
    spec = spec_of(model=shape, cluster=GPU, layout=Layout(ep=2, zero_stage=3), training=forced)
    assert unsupported(spec) == []
    config = tomllib.loads(job(spec, "x").files["torchtitan.toml"])
    assert config["model"]["name"] == "qwen3" and config["debug"]["moe_force_load_balance"]
    assert config["parallelism"]["expert_parallel_degree"] == 2
    of_experts = settings(spec)["shape"]["experts"]
    assert (of_experts["top_k"], of_experts["num_shared_experts"]) == (2, 2)
    assert of_experts["use_grouped_mm"]
    on_cpu = spec_of(model=shape, layout=Layout(pp=2, ep=2))
    problems = " ".join(unsupported(on_cpu))
    assert "layout.ep > 1: torchtitan sorts" in problems and "no pipeline stages" in problems
    odd = shape.model_copy(update={"shared_ffn_size": SHAPE.ffn_size + 1})
    assert any("model.shared_ffn_size" in p for p in unsupported(spec_of(model=odd)))


def test_on_a_cpu_its_program_goes_before():
    made = job(spec_of(), "x")
    assert made.program[-4:-2] == ("{python}", "cpu_program.py")
    config = tomllib.loads(made.files["torchtitan.toml"])
    assert config["parallelism"]["data_parallel_replicate_degree"] == 2
    assert config["lr_scheduler"] == {"warmup_steps": 0, "total_steps": 20, "decay_ratio": 0.0}
    assert json.loads(made.files["shape.json"]) == settings(spec_of())["shape"]


@pytest.mark.parametrize("name", ["llama31-8b", "llama31-70b", "llama31-405b", "tiny-llama"])
def test_the_width_of_the_mlp_is_the_recipes(name: str):
    """As torchtitan makes it of its arguments (FeedForward in models/llama3/model/model.py)."""
    model = load_recipe(name).model
    given = settings(spec_of(model=model))["shape"]["model_args"]
    width = int(given["ffn_dim_multiplier"] * int(2 * 4 * given["dim"] / 3))
    multiple = given["multiple_of"]
    assert 0 < width <= multiple and multiple == model.ffn_size  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (spec_of(layout=Layout(tp=2)), "tensor parallelism includes sequence parallelism"),
        (spec_of(ranks=4, layout=Layout(pp=2)), "torchtitan's DDP does not support other axes"),
        (spec_of(layout=Layout(cp=2)), "torch has no context parallelism on a CPU"),
        (
            spec_of(layout=Layout(pp=2), training=training(global_batch=4)),
            "torchtitan's mixed precision needs FSDP",
        ),
        (
            spec_of(training=training(lr_schedule={"kind": "linear", "decay": 20})),
            "does not stay at its minimum",
        ),
        (
            spec_of(training=training(lr_schedule={"warmup": 33, "unit": "samples"})),
            "must be multiples of the global batch 32",
        ),
    ],
)
def test_what_torchtitan_cannot_do_is_said(spec: RunSpec, sentence: str):
    assert any(sentence in problem for problem in unsupported(spec)), unsupported(spec)


def test_a_stage_that_sees_no_loss_and_a_device_that_counts_no_memory_say_nothing():
    text = "".join(map(line, (1, 2))).replace("loss: ", "loss: -1.00000 was ")
    text = text.replace("60.00GiB(75.00%)", "0.00GiB(0.00%)")
    steps = check_read(LOG_FORMAT, text.encode()).steps()
    assert len(steps) == 2 and steps.known("tokens_per_s_per_device")
    assert not steps.known("loss") and not steps.known("reserved_bytes")
