"""What Megatron-LM, and our program on Megatron-Core, cannot be asked for, one sentence each."""

from __future__ import annotations

from pathlib import Path

from paceline.core.run import RunSpec
from paceline.core.shape import DecoderShape
from paceline.engines.launch.model_options import deepseek_problems
from paceline.engines.megatron.refusals import refused_data, refused_everywhere, refused_spelling
from paceline.engines.samples import BYTE_VOCAB
from paceline.files.documents import read_text

DTYPES = ("fp32", "fp16", "bf16")
OF_TRANSFORMER_ENGINE = ("fp8", "mxfp8")
OF_A_CHECKOUT = ("tokenizer", "vocab_file", "merge_file", "transformer_impl", "fusions")
PROGRAM_DATA = ("synthetic", "stdlib")
CALCULATOR, RAMP_UP = "megatron/core/num_microbatches_calculator.py", "RampupBatchsize"
"""Megatron-LM's file of batches, and how its calculator of the old spelling begins."""


def refused(spec: RunSpec) -> list[str]:
    """All that pretrain_gpt.py of the checkout has no arguments for, or the program without one."""
    problems = refused_everywhere(spec)
    if spec.model.kind != "decoder":
        return problems
    rules = (*_spelling_rules(spec), *_shape_rules(spec.model))
    problems += refused_spelling(spec) + [sentence for sentence, applies in rules if applies]
    if spec.engine_settings.get("checkout") is not None:
        return problems + _of_the_checkout(spec, spec.model)
    return problems + _of_the_program(spec, spec.model)


def _spelling_rules(spec: RunSpec) -> tuple[tuple[str, bool], ...]:
    own = spec.engine_settings
    return (
        (
            "engine_settings.spelling new is of a checkout of 2026: name engine_settings.checkout",
            own.get("spelling") == "new" and own.get("checkout") is None,
        ),
    )


def _shape_rules(shape: DecoderShape) -> tuple[tuple[str, bool], ...]:
    return (
        (
            f"model.activation {shape.activation} with gated_ffn {shape.gated_ffn} has no "
            "argument: use gelu, or silu with a gate",
            shape.activation != ("silu" if shape.gated_ffn else "gelu"),
        ),
        (
            f"model.rope_theta {shape.rope_theta:g} must be a whole number",
            not float(shape.rope_theta).is_integer(),
        ),
        (
            "model.latent_attention and mtp_layers need model.positions=rope in Megatron-LM",
            shape.positions != "rope" and bool(shape.latent_attention or shape.mtp_layers),
        ),
    )


def _of_the_checkout(spec: RunSpec, shape: DecoderShape) -> list[str]:
    dtype, fusions = spec.training.dtype, spec.engine_settings.get("fusions")
    rules = (
        (
            f"engine_settings.fusions {fusions} is neither true nor false",
            fusions not in (None, True, False),
        ),
        (
            "training.ramp_up: this checkout takes --rampup-batch-size and does nothing by it "
            "(Megatron-Core 0.19): use engine_settings.spelling=new",
            spec.training.ramp_up is not None and _heeds_no_ramp_up(spec),
        ),
        (
            "model.embedding_norm has no argument in Megatron-LM: use engine megatron_deepspeed",
            shape.embedding_norm,
        ),
        (
            f"dtype {dtype} has no argument: use {', '.join((*DTYPES, *OF_TRANSFORMER_ENGINE))}",
            dtype not in (*DTYPES, *OF_TRANSFORMER_ENGINE),
        ),
    )
    return [sentence for sentence, applies in rules if applies] + refused_data(spec)


def _heeds_no_ramp_up(spec: RunSpec) -> bool:
    """Whether the checkout, as far as it lies here, has the old spelling as an empty word alone."""
    own = spec.engine_settings
    try:
        text = read_text(Path(str(own["checkout"]), CALCULATOR))
    except (OSError, ValueError):
        return False
    return own.get("spelling") != "new" and RAMP_UP not in text


def _of_the_program(spec: RunSpec, shape: DecoderShape) -> list[str]:
    layout, data = spec.layout, spec.data
    axes = {"cp": layout.cp, "vp": layout.vp, "ep": layout.ep}
    only = "is not in our program on Megatron-Core: name a checkout of Megatron-LM"
    problems = [f"{axis} > 1 {only}" for axis, size in axes.items() if size > 1]
    problems += [
        f"engine_settings.{name} {only}"
        for name in OF_A_CHECKOUT
        if spec.engine_settings.get(name) is not None
    ]
    rules = (
        (f"sequence_parallel {only}", layout.sequence_parallel),
        (f"zero_stage {layout.zero_stage} {only}", layout.zero_stage > 1),
        (f"dtype {spec.training.dtype} {only}", spec.training.dtype not in DTYPES),
        (f"model.num_experts {only}", shape.num_experts > 1),
        (
            f"vocab_size {shape.vocab_size} has no room for text, which needs {BYTE_VOCAB}",
            data.source == "stdlib" and shape.vocab_size < BYTE_VOCAB,
        ),
    )
    problems += [sentence for sentence, applies in rules if applies]
    problems += deepseek_problems(shape)
    return problems if data.source in PROGRAM_DATA else problems + refused_data(spec)
