"""Arguments that all descendants of Megatron-LM's pretrain_gpt.py share.

Names as in `megatron/arguments.py` of Megatron-DeepSpeed and `megatron/training/arguments.py` of
Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log2
from pathlib import Path

from paceline.core.run import RunSpec
from paceline.core.shape import DecoderShape
from paceline.core.training import Training

Arguments = dict[str, Sequence[object]]
"""Values by argument name without dashes; a switch has no values."""

REPLACEABLE = (
    *("split", "data-impl", "tokenizer-type", "tokenizer-model", "tokenizer-name-or-path"),
    *("vocab-file", "merge-file", "eval-iters", "eval-interval", "log-interval"),
    *("distributed-backend", "distributed-timeout-minutes", "transformer-impl"),
)
"""Arguments that an extra argument replaces, because no figure of a run depends on them."""
TRAINING_ONLY = "100,0,0"
"""Default split: nothing is evaluated, and Megatron-LM 0.20 never ends the search for the samples
of a part that is smaller than one sequence."""
DATA_SUFFIXES = (".bin", ".idx")


def words(arguments: Mapping[str, Sequence[object]]) -> list[str]:
    """Return the arguments as words of a command line."""
    return [word for name, values in arguments.items() for word in (f"--{name}", *map(str, values))]


def shape_arguments(shape: DecoderShape, seq_len: int) -> Arguments:
    """Return the arguments for a model's size, which are the same in every version."""
    sizes: Arguments = {
        "num-layers": [shape.num_layers],
        "hidden-size": [shape.hidden_size],
        "num-attention-heads": [shape.num_heads],
        "ffn-hidden-size": [shape.ffn_size],
        "seq-length": [seq_len],
        "max-position-embeddings": [shape.max_positions],
        "make-vocab-size-divisible-by": [shape.vocab_multiple],
    }
    if shape.head_size:
        sizes["kv-channels"] = [shape.head_size]
    return sizes


def dropout_arguments(shape: DecoderShape) -> Arguments:
    """Return both dropout arguments, which Megatron would set to 0.1 by default."""
    return {
        "hidden-dropout": [shape.dropout],
        "attention-dropout": [shape.dropped_probabilities],
    }


def layout_arguments(spec: RunSpec) -> Arguments:
    """Return the arguments of tensor and pipeline parallelism and micro-batch."""
    return {
        "tensor-model-parallel-size": [spec.layout.tp],
        "pipeline-model-parallel-size": [spec.layout.pp],
        "micro-batch-size": [spec.layout.micro_batch],
    }


def length_arguments(training: Training) -> Arguments:
    """Return iterations, or samples if the batch or learning rate schedule counts samples."""
    if by_samples(training):
        return {"train-samples": [samples_of(training)]}
    return {"train-iters": [training.steps]}


def without_unreached_batches(spec: RunSpec) -> RunSpec:
    """Return the run with the part of its ramp-up that its steps reach; the steps are the same.

    Megatron subtracts the samples of a whole ramp-up from those to train on before it divides by
    the batch, so it cannot end within a ramp-up but by `--exit-interval`. BigScience's fork then
    saves a checkpoint, with or without `--save`.
    """
    training = spec.training
    if training.ramp_up is None:
        return spec
    sizes = training.ramp_up.sizes(training.global_batch)
    before_last_step = samples_of(training.model_copy(update={"steps": training.steps - 1}))
    batches = [batch for until, batch in sizes if before_last_step < until]
    if not batches:
        return spec
    number = [batch for _, batch in sizes].index(batches[0])
    # The samples of `number` increments, rounded up as the batch size calculator does.
    samples = -(-training.ramp_up.samples * number // len(sizes))
    ramp_up = training.ramp_up.model_copy(update={"samples": samples}) if number else None
    unit = "samples" if by_samples(training) else "steps"
    changes = {
        "global_batch": batches[0],
        "ramp_up": ramp_up,
        "lr_schedule": training.lr_schedule.model_copy(update={"unit": unit}),
    }
    return spec.model_copy(update={"training": training.model_copy(update=changes)})


def by_samples(training: Training) -> bool:
    """Return whether the training counts samples, which Megatron does not mix with iterations."""
    return training.ramp_up is not None or training.lr_schedule.unit == "samples"


def samples_of(training: Training) -> int:
    """Return the samples of all steps, with the smaller batches of a ramp-up first."""
    num_samples, steps = 0, training.steps
    ramp_up = training.ramp_up
    for until, batch in ramp_up.sizes(training.global_batch) if ramp_up else []:
        count = min(steps, max(0, -(-(until - num_samples) // batch)))
        num_samples, steps = num_samples + count * batch, steps - count
    return num_samples + steps * training.global_batch


def batch_arguments(training: Training, *, stepwise: bool = False) -> Arguments:
    """Return the arguments of the batch and its ramp-up.

    `stepwise` selects the form of 2026: in tokens, with the full batch as part of the schedule.
    """
    ramp_up, batch = training.ramp_up, training.global_batch
    if ramp_up is None:
        return {"global-batch-size": [batch]}
    if not stepwise:
        ramp = [ramp_up.start, ramp_up.increment, ramp_up.samples]
        return {"global-batch-size": [batch], "rampup-batch-size": ramp}
    begins, steps = 0, list[str]()
    for until, smaller in ramp_up.sizes(batch):
        steps.append(f"{begins * training.seq_len}:{smaller}")
        begins = until
    return {
        "step-batch-size-schedule": [" ".join([*steps, f"{begins * training.seq_len}:{batch}"])]
    }


def optimizer_arguments(training: Training) -> Arguments:
    """Return the arguments of Adam, learning rate schedule, clipping and seed."""
    schedule = training.lr_schedule
    unit = "samples" if by_samples(training) else "iters"
    end = samples_of(training) if unit == "samples" else training.steps
    arguments: Arguments = {
        "optimizer": ["adam"],
        "adam-beta1": [training.betas[0]],
        "adam-beta2": [training.betas[1]],
        "adam-eps": [training.eps],
        "lr": [training.lr],
        "min-lr": [schedule.min_lr],
        "lr-decay-style": [schedule.kind],
    }
    # In a shortened training, the end may come before the end of warmup and thus of the decay.
    decay = max(schedule.decay or end, schedule.warmup + 1)
    if schedule.kind != "constant" or decay > end:
        arguments[f"lr-decay-{unit}"] = [decay]
    if schedule.warmup:
        arguments[f"lr-warmup-{unit}"] = [schedule.warmup]
    return {
        **arguments,
        "clip-grad": [training.grad_clip],
        "weight-decay": [training.weight_decay],
        "seed": [training.seed],
    }


def data_prefix(spec: RunSpec) -> str | None:
    """Return the prefix of an indexed data set, given directly or by its .bin file, or None."""
    path = spec.data.path
    if spec.data.source == "indexed":
        return path
    if spec.data.source != "tokens" or path is None or Path(path).suffix not in DATA_SUFFIXES:
        return None
    return str(Path(path).with_suffix(""))


def data_prefixes(spec: RunSpec) -> list[object]:
    """Return the values of `--data-path`: one prefix, or weight and prefix of each part."""
    if spec.data.blend:
        return [value for path, weight in spec.data.blend for value in (weight, path)]
    prefix = data_prefix(spec)
    return [] if prefix is None else [prefix]


def log2_of(number: float) -> int | None:
    """Return n if `number` is 2 to the power of n, else None."""
    power = log2(number)
    return int(power) if power.is_integer() else None
