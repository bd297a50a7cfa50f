"""Support of Megatron-LM's descendants and of Paceline's program on Megatron-Core."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from paceline.core.run import RunSpec
from paceline.engines.launch.programs import unknown_settings
from paceline.engines.megatron.arguments import by_samples, data_prefix
from paceline.engines.support import (
    DEEPSEEK,
    NO_CHECKPOINTS,
    SHAPE_OPTIONS,
    Support,
    no,
    only,
    refusals,
    small_vocabulary,
)
from paceline.files.documents import read_text

PATHS = ("checkout", "vocab_file", "merge_file")
SPELLINGS = ("old", "new")
CHECKOUT_SETTINGS = ("tokenizer", "vocab_file", "merge_file", "transformer_impl", "fusions")
SETTINGS = ("checkout", "spelling", "overlap", "split", *CHECKOUT_SETTINGS)
CALCULATOR, RAMP_UP = "megatron/core/num_microbatches_calculator.py", "RampupBatchsize"
"""File of Megatron-LM's batch calculator, and the prefix of the class for the old spelling."""

NO_ARGUMENT = no("pretrain_gpt.py has no argument for it")
_FORMAT = no("its format is the native trainer's", "leave it out, or use engine=native")
FAMILY: Support = {
    **NO_CHECKPOINTS,
    **SHAPE_OPTIONS,
    "model.kind": only("decoder", reason="pretrain_gpt.py trains decoders"),
    "model.norm_position": only("pre", reason="no argument keeps the meaning of another"),
    "model.final_norm": only(True, reason="pretrain_gpt.py always has it"),
    "model.position_offset": NO_ARGUMENT,
    "model.embedding_size": NO_ARGUMENT,
    "lora": no("pretrain_gpt.py trains all weights"),
    "training.compile": NO_ARGUMENT,
    "training.evaluation": no("no argument keeps its meaning"),
    "training.initial_weights": _FORMAT,
    "checkpoint.every": _FORMAT,
    "checkpoint.resume": _FORMAT,
    "layout.schedule": only("1f1b", "interleaved", reason="its pipelines run 1f1b"),
    "layout.dp_shard": no("states are sharded over all replicas"),
    "data.source": only("indexed", "tokens", "synthetic", reason="it reads indexed data sets"),
    "data.packing": only("packed", reason="its samples are packed"),
    "data.loss_mask": no("the loss is over all tokens"),
    "data.split": no(
        "an indexed data set is split by engine_settings.split", "use engine_settings.split"
    ),
}
"""Limits of every version of pretrain_gpt.py."""

_CHECKOUT = "set engine_settings.checkout to a checkout of Megatron-LM"
_CHECKOUT_ONLY = no("Paceline's program on Megatron-Core does not have it", _CHECKOUT)
_CHECKOUT_SHAPE = ("qkv_bias", "partial_rotary_factor", "sliding_window")
CHECKOUT: Support = {
    field: limit
    for field, limit in FAMILY.items()
    if field.removeprefix("model.") not in (*_CHECKOUT_SHAPE, "sliding_window_pattern", "qk_norm")
} | {
    "model.embedding_norm": no(
        "Megatron-LM has no argument for it", "use engine=megatron_deepspeed"
    ),
    "training.dtype": only("fp32", "fp16", "bf16", "fp8", "mxfp8"),
}
PROGRAM: Support = {
    **{field: limit for field, limit in FAMILY.items() if field != "model.qk_norm"},
    **DEEPSEEK,
    "training.dtype": only(
        "fp32", "fp16", "bf16", reason="our program has no Transformer Engine", remedy=_CHECKOUT
    ),
    "layout.cp": _CHECKOUT_ONLY,
    "layout.vp": _CHECKOUT_ONLY,
    "layout.sequence_parallel": _CHECKOUT_ONLY,
    "layout.zero_stage": only(0, 1, reason="our program has no Megatron-FSDP", remedy=_CHECKOUT),
    "data.source": only("indexed", "tokens", "synthetic", "stdlib"),
    "data.blend": _CHECKOUT_ONLY,
    **{f"model.{name}": _CHECKOUT_ONLY for name in (*_CHECKOUT_SHAPE, "sliding_window_pattern")},
}
SUPPORT = {"checkout": CHECKOUT, "without": PROGRAM}


def unsupported(spec: RunSpec) -> list[str]:
    """Return what Megatron-LM or Paceline's program cannot do of `spec`, one sentence each."""
    settings = spec.engine_settings
    checkout = settings.get("checkout") is not None
    support = SUPPORT["checkout" if checkout else "without"]
    problems = [*unknown_settings(spec, SETTINGS), *path_problems(spec), *refusals(spec, support)]
    if spec.model.kind != "decoder":
        return problems
    return [
        *problems,
        *setting_problems(spec),
        *_shape_problems(spec),
        *(_checkout_problems(spec) if checkout else _program_problems(spec)),
    ]


def path_problems(spec: RunSpec) -> Iterator[str]:
    """Yield problems of relative paths, which only one folder can read, and of tokenizers."""
    paths = {name: spec.engine_settings.get(name) for name in PATHS}
    for name, path in paths.items():
        if path is not None and not PurePosixPath(str(path)).is_absolute():
            yield (
                f"engine_settings.{name} {path} must be an absolute path, because each run has its "
                "own working folder"
            )
    if (paths["vocab_file"] is None) != (paths["merge_file"] is None):
        yield "engine_settings.vocab_file and merge_file belong together: set both, or neither"


def setting_problems(spec: RunSpec) -> Iterator[str]:
    """Yield contradictions in any version of pretrain_gpt.py: spelling, units, data file."""
    form = settings_spelling(spec) or SPELLINGS[0]
    if form not in SPELLINGS:
        yield f"engine_settings.spelling {form} must be old or new"
    schedule = spec.training.lr_schedule
    varies = schedule.kind != "constant" or schedule.warmup > 0
    if by_samples(spec.training) and schedule.unit == "steps" and varies:
        yield (
            "a batch size ramp-up counts samples, so the learning rate schedule must too: set "
            "training.lr_schedule.unit=samples"
        )
    if spec.data.source == "tokens" and data_prefix(spec) is None:
        yield (
            "data.path must be the .bin file of an indexed data set, with its .idx file in the "
            "same folder"
        )


def _shape_problems(spec: RunSpec) -> Iterator[str]:
    shape = spec.model
    assert shape.kind == "decoder"
    if shape.activation != ("silu" if shape.gated_ffn else "gelu"):
        yield (
            f"model.activation {shape.activation} is not supported with model.gated_ffn "
            f"{shape.gated_ffn}: use gelu, or silu with a gate"
        )
    if not float(shape.rope_theta).is_integer():
        yield f"model.rope_theta {shape.rope_theta:g} must be a whole number"
    if shape.router_score == "sigmoid" and not shape.router_normalize:
        yield "model.router_normalize false: Megatron-LM always normalizes sigmoid scores"
    if shape.router_choice_bias and shape.router_score != "sigmoid":
        yield "model.router_choice_bias needs model.router_score=sigmoid in Megatron-LM"
    if shape.positions != "rope" and (shape.latent_attention or shape.mtp_layers):
        yield "model.latent_attention and mtp_layers need model.positions=rope in Megatron-LM"


def _checkout_problems(spec: RunSpec) -> Iterator[str]:
    fusions = spec.engine_settings.get("fusions")
    if fusions not in (None, True, False):
        yield f"engine_settings.fusions {fusions} must be true or false"
    if spec.training.ramp_up and settings_spelling(spec) == "old" and not _reads_ramp_up(spec):
        yield (
            "training.ramp_up: this checkout ignores --rampup-batch-size (Megatron-Core 0.19): use "
            "engine_settings.spelling=new"
        )


def spelling(spec: RunSpec) -> str:
    """Return the form of the batch ramp-up: as set, else the one that the checkout reads."""
    return settings_spelling(spec) or ("old" if _reads_ramp_up(spec) else "new")


def settings_spelling(spec: RunSpec) -> str | None:
    """Return engine_settings.spelling, None if it is not set."""
    value = spec.engine_settings.get("spelling")
    return None if value is None else str(value)


def _reads_ramp_up(spec: RunSpec) -> bool:
    """Return whether the checkout reads `--rampup-batch-size`, also if it is not readable here."""
    try:
        text = read_text(Path(str(spec.engine_settings.get("checkout")), CALCULATOR))
    except (OSError, ValueError):
        return True
    return RAMP_UP in text


def _program_problems(spec: RunSpec) -> Iterator[str]:
    settings = spec.engine_settings
    for name in CHECKOUT_SETTINGS:
        if settings.get(name) is not None:
            yield f"engine_settings.{name} works with Megatron-LM only: {_CHECKOUT}"
    if settings.get("spelling") == "new":
        yield f"engine_settings.spelling new works with a checkout from 2026 only: {_CHECKOUT}"
    yield from small_vocabulary(spec)
