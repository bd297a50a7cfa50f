"""Arguments that all descendants of Megatron-LM's pretrain_gpt.py spell in the same way.

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
"""By their names without the dashes; a switch has no values."""

PREFIX_OF = (".bin", ".idx")


def words(arguments: Mapping[str, Sequence[object]]) -> list[str]:
    """The arguments as they stand on a command line."""
    return [word for name, values in arguments.items() for word in (f"--{name}", *map(str, values))]


def shape_arguments(shape: DecoderShape, seq_len: int) -> Arguments:
    """What every version says of a model's size."""
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
    """Both are 0.1 where nothing is said, so they are always said."""
    return {
        "hidden-dropout": [shape.dropout],
        "attention-dropout": [shape.dropped_probabilities],
    }


def layout_arguments(spec: RunSpec) -> Arguments:
    """Tensor and pipeline parallelism, micro-batch."""
    return {
        "tensor-model-parallel-size": [spec.layout.tp],
        "pipeline-model-parallel-size": [spec.layout.pp],
        "micro-batch-size": [spec.layout.micro_batch],
    }


def length_arguments(training: Training) -> Arguments:
    """Iterations, or samples where the batch or the rate goes by them.

    Megatron takes the samples of a whole ramp-up off those to train on before it divides by the
    batch: a training that ends within the ramp-up has to name more, and where it exits.
    """
    if not by_samples(training):
        return {"train-iters": [training.steps]}
    samples, ramp_up = samples_of(training), training.ramp_up
    if ramp_up is None or samples > ramp_up.samples + training.global_batch:
        return {"train-samples": [samples]}
    whole = int((training.total_tokens or 0) // training.seq_len)
    beyond = ramp_up.samples + 2 * training.global_batch
    return {"train-samples": [max(whole, beyond)], "exit-interval": [training.steps]}


def by_samples(training: Training) -> bool:
    """Whether the training is counted in samples, which Megatron does not mix with iterations."""
    return training.ramp_up is not None or training.lr_schedule.unit == "samples"


def samples_of(training: Training) -> int:
    """Samples of all steps, the smaller batches of a ramp-up first."""
    consumed, steps = 0, training.steps
    ramp_up = training.ramp_up
    for until, batch in ramp_up.sizes(training.global_batch) if ramp_up else []:
        count = min(steps, max(0, -(-(until - consumed) // batch)))
        consumed, steps = consumed + count * batch, steps - count
    return consumed + steps * training.global_batch


def batch_arguments(training: Training, *, stepwise: bool = False) -> Arguments:
    """The batch and how it grows.

    `stepwise` is the spelling of 2026, in tokens, which names the whole batch within the schedule.
    """
    ramp_up, batch = training.ramp_up, training.global_batch
    if ramp_up is None:
        return {"global-batch-size": [batch]}
    if not stepwise:
        grown = [ramp_up.start, ramp_up.increment, ramp_up.samples]
        return {"global-batch-size": [batch], "rampup-batch-size": grown}
    begins, steps = 0, list[str]()
    for until, smaller in ramp_up.sizes(batch):
        steps.append(f"{begins * training.seq_len}:{smaller}")
        begins = until
    return {
        "step-batch-size-schedule": [" ".join([*steps, f"{begins * training.seq_len}:{batch}"])]
    }


def optimizer_arguments(training: Training) -> Arguments:
    """Adam, its rate over time, clipping, the seed."""
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
    # It ends where a warm-up is not over before the decay is, as in a training cut short.
    decayed = max(schedule.decay or end, schedule.warmup + 1)
    if schedule.kind != "constant" or decayed > end:
        arguments[f"lr-decay-{unit}"] = [decayed]
    if schedule.warmup:
        arguments[f"lr-warmup-{unit}"] = [schedule.warmup]
    return {
        **arguments,
        "clip-grad": [training.grad_clip],
        "weight-decay": [training.weight_decay],
        "seed": [training.seed],
    }


def data_prefix(spec: RunSpec) -> str | None:
    """The prefix of an indexed data set, by itself or of its .bin file; None without one."""
    path = spec.data.path
    if spec.data.source == "indexed":
        return path
    if spec.data.source != "tokens" or path is None or Path(path).suffix not in PREFIX_OF:
        return None
    return str(Path(path).with_suffix(""))


def log2_of(number: float) -> int | None:
    """n where `number` is 2 to the power of n, else None."""
    power = log2(number)
    return int(power) if power.is_integer() else None
