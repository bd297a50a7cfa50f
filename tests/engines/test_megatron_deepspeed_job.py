"""Megatron-DeepSpeed's command line: that of BigScience's 1.3B training, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.core.run import RunSpec
from paceline.engines import engine
from paceline.machines.slurm.script import batch_script
from tests.engines.megatron_specs import same, settings, started, study

OF_THE_TRAINING = """
 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2
 --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 8192
 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 512
 --rampup-batch-size 32 32 2_000_000 --train-samples 161_132_812 --loss-scale 12 --clip-grad 1.0
 --checkpoint-activations --fp16 --embed-layernorm --seed 1234
 --optimizer adam --adam-beta1 0.9 --adam-beta2 0.999 --adam-eps 1e-8 --lr 2e-4 --min-lr 1e-5
 --lr-decay-style cosine --lr-decay-samples 73_242_187 --lr-warmup-samples 183_105
 --weight-decay 1e-1 --log-interval 1 --eval-interval 1000 --data-impl mmap
 --distributed-backend nccl --deepspeed --zero-stage 1 --deepspeed-activation-checkpointing
"""
"""train/tr3-1B3-baseline/tr3m-1B3-emb-norm-pile.slurm of bigscience-workshop/bigscience, without
its folders, its TensorBoard, its evaluation, and how long it goes on."""

DEFAULTS = """
 --hidden-dropout 0.1 --attention-dropout 0.1 --layernorm-epsilon 1e-5
 --make-vocab-size-divisible-by 128
"""
"""What pretrain_gpt.py takes where nothing is said, which is said."""

OF_A_MEASUREMENT = "--split 100,0,0 --eval-iters 0"
WHOLE_TRAINING = "steps=324633"
PATHS = {"--vocab-file", "--merge-file", "--data-path", "--deepspeed_config"}


def test_the_1b3_training_has_its_published_arguments(tmp_path: Path):
    told = started(study(tmp_path, "layout.pp=2", WHOLE_TRAINING, variant="ramp-up"))
    paths = {name: told.pop(name) for name in PATHS}
    published = settings(" ".join((OF_THE_TRAINING, DEFAULTS, OF_A_MEASUREMENT)).split())
    samples = (int(options.pop("--train-samples")[0]) for options in (told, published))
    assert abs(next(samples) - next(samples)) < 512
    assert same(told, published)
    assert paths == {
        "--vocab-file": ("/code/megatron/data/gpt2-vocab.json",),
        "--merge-file": ("/code/megatron/data/gpt2-merges.txt",),
        "--data-path": (str(tmp_path / "pile_text_document"),),
        "--deepspeed_config": ("{output}/ds_config.json",),
    }


def test_a_growing_batch_can_be_spelled_as_forks_of_2026_do(tmp_path: Path):
    new = started(
        study(tmp_path, "engine_settings.spelling=new", WHOLE_TRAINING, variant="ramp-up")
    )
    steps = new["--step-batch-size-schedule"][0].split()
    assert steps[0] == "0:32" and steps[-1] == f"{2_000_000 * 2048}:512" and len(steps) == 16
    assert not {"--rampup-batch-size", "--global-batch-size"} & set(new)
    odd = study(tmp_path, "engine_settings.spelling=newer", variant="ramp-up")
    problems = engine("megatron_deepspeed").unsupported(odd)
    assert problems == ["engine_settings.spelling newer must be old or new"]


def test_deepspeed_is_told_what_the_training_told_it(tmp_path: Path):
    job = engine("megatron_deepspeed").job(study(tmp_path, "layout.pp=2"), "x")
    assert json.loads(job.files["ds_config.json"]) == {
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": 512,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "fp16": {
            "enabled": True,
            "loss_scale": 0,
            "loss_scale_window": 500,
            "hysteresis": 2,
            "min_loss_scale": 1,
            "initial_scale_power": 12,
        },
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    }


def test_it_works_in_the_checkout_once_a_device(tmp_path: Path):
    job = engine("megatron_deepspeed").job(study(tmp_path), "x")
    assert job.env["PACELINE_WORKING_FOLDER"] == "/code/megatron"
    assert job.ranks_per_node == 4 and job.nodes == 2


def test_slurm_is_asked_for_what_the_study_asked_for(tmp_path: Path):
    text = batch_script(engine("megatron_deepspeed").job(study(tmp_path), "1b3"))
    for option in (
        "--nodes=2",
        "--ntasks-per-node=1",
        "--constraint=v100-32g",
        "--gres=gpu:4",
        "--cpus-per-task=40",
        "--hint=nomultithread",
    ):
        assert f"#SBATCH {option}\n" in text
    assert "--mem" not in text


def test_a_whole_batch_from_the_start_is_counted_in_samples_as_the_rate_is(tmp_path: Path):
    told = started(study(tmp_path))
    assert told["--train-samples"] == (str(20 * 512),)
    assert "--rampup-batch-size" not in told and "--exit-interval" not in told


def test_without_recomputation_nothing_is_checkpointed(tmp_path: Path):
    told = started(study(tmp_path, variant="no-recompute"))
    assert not {"--checkpoint-activations", "--deepspeed-activation-checkpointing"} & set(told)


def test_steps_count_where_the_rate_goes_by_steps(tmp_path: Path):
    schedule = "training.lr_schedule={kind: linear, warmup: 5}"
    told = started(study(tmp_path, schedule, "steps=50"))
    assert told["--train-iters"] == told["--lr-decay-iters"] == ("50",)
    assert told["--lr-warmup-iters"] == ("5",) and "--train-samples" not in told


def test_another_tokenizer_takes_the_place_of_gpt2s(tmp_path: Path):
    told = started(study(tmp_path, 'engine_settings.tokenizer="bigscience/tokenizer"'))
    assert told["--tokenizer-type"] == ("PretrainedFromHF",) and "--vocab-file" not in told
    assert told["--tokenizer-name-or-path"] == ("bigscience/tokenizer",)


def test_gates_and_rotary_positions_have_its_own_names(tmp_path: Path):
    gate = ("model.gated_ffn=true", "model.activation=silu", "model.positions=rope")
    told = started(study(tmp_path, *gate, "training.dtype=bf16"))
    assert told["--glu-activation"] == ("swiglu",) and "--no-bias-gelu-fusion" in told
    assert told["--position-embedding-type"] == ("rotary",) and "--bf16" in told
    assert "--max-position-embeddings" not in told and "--loss-scale" not in told


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (("model.activation=relu",), "model.activation relu is not supported without a gate"),
        (("training.loss_scale.initial=5000",), "must be a power of two"),
        (("data.path=tokens.u16",), "must be the .bin file of an indexed data set"),
        (("engine_settings.checkout=null",), "engine_settings.checkout is not set"),
        (("engine_settings.vocab_file=/v.json",), "belong together: set both, or neither"),
    ],
)
def test_what_contradicts_itself_is_refused(tmp_path: Path, changes: tuple[str, ...], says: str):
    assert any(says in problem for problem in refusals(study(tmp_path, *changes)))


def test_a_growing_batch_needs_a_rate_that_goes_by_samples(tmp_path: Path):
    schedule = "training.lr_schedule={kind: cosine, warmup: 5}"
    (problem,) = refusals(study(tmp_path, schedule, variant="ramp-up"))
    assert "training.lr_schedule.unit=samples" in problem


def refusals(spec: RunSpec) -> list[str]:
    return engine(spec.engine).unsupported(spec)
