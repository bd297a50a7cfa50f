"""What BigScience's Megatron-DeepSpeed cannot be asked for, one sentence each."""

from __future__ import annotations

from paceline.core.run import RunSpec
from paceline.core.shape import DecoderShape
from paceline.engines.launch.model_options import deepseek_problems
from paceline.engines.megatron.arguments import log2_of
from paceline.engines.megatron.refusals import refused_data, refused_everywhere, refused_spelling


def refused(spec: RunSpec) -> list[str]:
    """All that its pretrain_gpt.py has no arguments for."""
    problems = refused_everywhere(spec)
    if spec.model.kind != "decoder":
        return problems
    rules = (*_layout_rules(spec), *_dtype_rules(spec), *_shape_rules(spec.model))
    problems += refused_spelling(spec) + [sentence for sentence, applies in rules if applies]
    if spec.data.source == "synthetic":
        problems.append(
            "data.source synthetic has no argument: name the prefix of an indexed data set, "
            "data.source=indexed and data.path=PREFIX"
        )
    return problems + deepseek_problems(spec.model) + refused_data(spec)


def _layout_rules(spec: RunSpec) -> tuple[tuple[str, bool], ...]:
    layout = spec.layout
    return (
        ("cp > 1 has no argument in Megatron-DeepSpeed", layout.cp > 1),
        ("vp > 1 is not in DeepSpeed's pipelines", layout.vp > 1),
        ("ep > 1 has no argument in Megatron-DeepSpeed", layout.ep > 1),
        ("sequence_parallel has no argument in Megatron-DeepSpeed", layout.sequence_parallel),
        (
            "recompute selective has no argument in Megatron-DeepSpeed: use full or none",
            layout.recompute == "selective",
        ),
        (
            f"zero_stage {layout.zero_stage} is not for DeepSpeed's pipeline modules, which its "
            "pretrain_gpt.py always makes: use 0 or 1",
            layout.zero_stage > 1,
        ),
    )


def _dtype_rules(spec: RunSpec) -> tuple[tuple[str, bool], ...]:
    dtype, scale = spec.training.dtype, spec.training.loss_scale.initial
    return (
        (
            f"dtype {dtype} has no argument: use fp32, fp16 or bf16",
            dtype not in ("fp32", "fp16", "bf16"),
        ),
        (
            f"training.loss_scale.initial {scale:g} must be a power of two for DeepSpeed",
            dtype == "fp16" and log2_of(scale) is None,
        ),
    )


def _shape_rules(shape: DecoderShape) -> tuple[tuple[str, bool], ...]:
    return (
        (
            "model.num_kv_heads has no argument: its heads are not grouped",
            shape.kv_heads != shape.num_heads,
        ),
        ("model.norm rmsnorm has no argument: it has layernorm", shape.norm != "layernorm"),
        ("model.bias false has no argument: its linear layers have biases", not shape.bias),
        (
            "model.tied_embeddings false has no argument: its embeddings are tied",
            not shape.tied_embeddings,
        ),
        ("model.num_experts has no argument", shape.num_experts > 1),
        (
            f"model.activation {shape.activation} has no argument without a gate: use gelu",
            not shape.gated_ffn and shape.activation != "gelu",
        ),
        (
            f"model.rope_theta {shape.rope_theta:g} has no argument: it is 10000",
            shape.positions == "rope" and shape.rope_theta != 10_000.0,
        ),
    )
