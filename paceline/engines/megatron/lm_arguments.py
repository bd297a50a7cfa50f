"""Arguments of Megatron-LM's pretrain_gpt.py (Megatron-Core 0.12 and later)."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.core.layout import Layout
from paceline.core.pipeline import layers_per_stage
from paceline.core.run import RunSpec
from paceline.core.shape import DecoderShape
from paceline.engines.megatron.arguments import (
    TRAINING_ONLY,
    Arguments,
    batch_arguments,
    data_prefixes,
    dropout_arguments,
    layout_arguments,
    length_arguments,
    optimizer_arguments,
    shape_arguments,
    without_unreached_batches,
)
from paceline.engines.megatron.support import spelling

EXCHANGES = {"all-gather": "allgather", "all-to-all": "a2a", "ring": "p2p"}
"""Megatron's name for each exchange of keys and values between context-parallel ranks."""
FSDP_STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}
"""Sharding strategy of Megatron-FSDP for ZeRO stages above the distributed optimizer's."""
LOW_PRECISION = {
    "fp8": {"fp8-format": ["hybrid"]},
    "mxfp8": {"fp8-format": ["e4m3"], "fp8-recipe": ["mxfp8"]},
}
"""Arguments for low-precision GEMMs by Transformer Engine, with weights in bf16."""


def arguments(spec: RunSpec) -> Arguments:
    """Return all arguments after `pretrain_gpt.py`."""
    spec = without_unreached_batches(spec)
    model = spec.model
    assert isinstance(model, DecoderShape)
    training, settings = spec.training, spec.engine_settings
    return {
        **layout_arguments(spec),
        **_layout(spec, model),
        "distributed-backend": ["gloo" if spec.cluster.device == "cpu" else "nccl"],
        "distributed-timeout-minutes": [max(1, round(spec.hang_limit_s / 60))],
        **_shape(model, training.seq_len),
        **_experts(spec, model),
        **dropout_arguments(model),
        **batch_arguments(training, stepwise=spelling(spec) == "new"),
        **length_arguments(training),
        **_precision(spec),
        **optimizer_arguments(training),
        **_recompute(spec),
        **_tokens(spec, model),
        **_transformer(settings, model),
        "log-interval": [1],
        "log-throughput": [],
        "eval-iters": [0],
        "eval-interval": [1000],
    }


def environment(spec: RunSpec) -> dict[str, str]:
    """Return the variable for one hardware queue: kernels start after overlapped transfers.

    Megatron-LM requires it with tensor or context parallelism, and forbids it with Megatron-FSDP.
    """
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if spec.layout.zero_stage < 2 else {}


def _layout(spec: RunSpec, model: DecoderShape) -> Arguments:
    layout, overlapped = spec.layout, bool(spec.engine_settings.get("overlap"))
    arguments: Arguments = {}
    if layout.pp > 1:
        arguments |= _stages(model, layout)
    if layout.cp > 1:
        arguments |= {
            "context-parallel-size": [layout.cp],
            "cp-comm-type": [EXCHANGES[layout.cp_exchange]],
        }
    if layout.ep > 1:
        arguments["expert-model-parallel-size"] = [layout.ep]
    if layout.sequence_parallel:
        arguments["sequence-parallel"] = []
    if layout.zero_stage:
        arguments["use-distributed-optimizer"] = []
    if layout.zero_stage in FSDP_STRATEGIES:
        arguments |= {
            "use-megatron-fsdp": [],
            "data-parallel-sharding-strategy": [FSDP_STRATEGIES[layout.zero_stage]],
            "no-gradient-accumulation-fusion": [],
            "ckpt-format": ["fsdp_dtensor"],
        }
    if overlapped:
        arguments["overlap-grad-reduce"] = []
        if layout.zero_stage:
            arguments["overlap-param-gather"] = []
    return arguments


def _stages(model: DecoderShape, layout: Layout) -> Arguments:
    """Return the split of layers into pipeline stages: even, unless other parts count as layers."""
    first, *between, last = layers_per_stage(model, layout)
    if first != last:
        middle = f"({_layers(between[0])}|)*{len(between)}" if between else ""
        parts = f"E{_layers(first)}|{middle}{_layers(last)}{'m' * model.mtp_layers}L"
        return {"pipeline-model-parallel-layout": [parts]}
    arguments: Arguments = (
        {"num-layers-per-virtual-pipeline-stage": [first]} if layout.vp > 1 else {}
    )
    if model.num_layers % (layout.pp * layout.vp) == 0:
        return arguments
    if layout.vp > 1:
        arguments["num-layers-per-virtual-pipeline-stage"] = [first + 1]
    ends = ("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split")
    return {**arguments, **{name: [] for name in ends}}


def _layers(number: int) -> str:
    """Return `number` layers in Megatron's layout notation (`t` is one layer)."""
    return f"t*{number}" if number > 1 else "t" * number


def _shape(model: DecoderShape, seq_len: int) -> Arguments:
    shape = shape_arguments(model, seq_len)
    rope = model.positions == "rope"
    shape["position-embedding-type"] = ["rope" if rope else "learned_absolute"]
    if rope:
        shape["rotary-base"] = [int(model.rope_theta)]
        if model.partial_rotary_factor != 1:
            shape["rotary-percent"] = [model.partial_rotary_factor]
    if model.kv_heads != model.num_heads:
        shape |= {"group-query-attention": [], "num-query-groups": [model.kv_heads]}
    shape |= {
        "normalization": ["RMSNorm" if model.norm == "rmsnorm" else "LayerNorm"],
        "norm-epsilon": [model.norm_eps],
    }
    switches = {
        "swiglu": model.gated_ffn,
        "disable-bias-linear": not model.bias,
        "untie-embeddings-and-output-weights": not model.tied_embeddings,
        "embed-layernorm": model.embedding_norm,
        "qk-layernorm": model.qk_norm,
        "add-qkv-bias": model.qkv_bias,
    }
    shape |= {name: [] for name, is_on in switches.items() if is_on}
    return {**shape, **_window(model), **_latents(model), **_mtp(model)}


def _window(model: DecoderShape) -> Arguments:
    """Return the arguments of sliding windows, and of the layers with full attention."""
    if model.sliding_window is None:
        return {}
    # Megatron counts the tokens before and after, Paceline also the token itself.
    arguments: Arguments = {"window-size": [f"({model.sliding_window - 1},0)"]}
    if model.sliding_window_pattern:
        arguments["window-attn-skip-freq"] = [model.sliding_window_pattern]
    return arguments


def _experts(spec: RunSpec, model: DecoderShape) -> Arguments:
    """Return the arguments of experts, a shared expert, and dense layers before the others.

    The default dispatcher gathers all tokens on every rank. The other one needs CUDA streams.
    """
    if model.num_experts == 1:
        return {}
    on_gpu = spec.cluster.device != "cpu"
    arguments: Arguments = {
        "num-experts": [model.num_experts],
        "moe-router-topk": [model.experts_per_token],
        "moe-ffn-hidden-size": [model.ffn_size],
        "moe-router-dtype": ["fp32"],
        "moe-token-dispatcher-type": ["alltoall" if on_gpu else "allgather"],
    }
    if on_gpu and spec.engine_settings.get("checkout") is not None:
        arguments["moe-grouped-gemm"] = []
    if spec.training.routing == "forced":
        arguments["moe-router-force-load-balancing"] = []
    if model.router_score != "softmax":
        arguments["moe-router-score-function"] = [model.router_score]
    elif not model.router_normalize:
        arguments["moe-router-pre-softmax"] = []
    if model.router_scale != 1:
        arguments["moe-router-topk-scaling-factor"] = [model.router_scale]
    if model.router_choice_bias:
        arguments["moe-router-enable-expert-bias"] = []
    if model.expert_groups > 1:
        arguments["moe-router-num-groups"] = [model.expert_groups]
        arguments["moe-router-group-topk"] = [model.groups_per_token]
    if model.shared_ffn_size:
        arguments["moe-shared-expert-intermediate-size"] = [model.shared_ffn_size]
    if dense := model.first_dense_layers:
        arguments["moe-layer-freq"] = [f"([0]*{dense}+[1]*{model.num_layers - dense})"]
        arguments["ffn-hidden-size"] = [model.dense_ffn_size]
    return arguments


def _latents(model: DecoderShape) -> Arguments:
    """Return the arguments of latent attention with normalized latents and the usual RoPE.

    Megatron's default for latent attention is YaRN, the only RoPE that it fuses.
    """
    latent = model.latent_attention
    if latent is None:
        return {}
    arguments: Arguments = {
        "multi-latent-attention": [],
        "kv-lora-rank": [latent.kv_lora_rank],
        "qk-head-dim": [latent.qk_nope_head_dim],
        "qk-pos-emb-head-dim": [latent.qk_rope_head_dim],
        "v-head-dim": [latent.v_head_dim],
        "qk-layernorm": [],
        "rope-type": ["rope"],
        "no-rope-fusion": [],
    }
    if latent.q_lora_rank is not None:
        arguments["q-lora-rank"] = [latent.q_lora_rank]
    return arguments


def _mtp(model: DecoderShape) -> Arguments:
    return {"mtp-num-layers": [model.mtp_layers]} if model.mtp_layers else {}


def _precision(spec: RunSpec) -> Arguments:
    dtype, scale = spec.training.dtype, spec.training.loss_scale
    if dtype == "fp16":
        return {
            "fp16": [],
            "initial-loss-scale": [scale.initial],
            "min-loss-scale": [1],
            "loss-scale-window": [scale.window],
            "hysteresis": [scale.hysteresis],
        }
    return {} if dtype == "fp32" else {"bf16": [], **LOW_PRECISION.get(dtype, {})}


def _recompute(spec: RunSpec) -> Arguments:
    if spec.layout.recompute == "none":
        return {}
    if spec.layout.recompute == "selective":
        return {"recompute-granularity": ["selective"]}
    return {
        "recompute-granularity": ["full"],
        "recompute-method": ["uniform"],
        "recompute-num-layers": [1],
    }


def _transformer(settings: Mapping[str, object], model: DecoderShape) -> Arguments:
    implementation = settings.get("transformer_impl")
    arguments: Arguments = {} if implementation is None else {"transformer-impl": [implementation]}
    if settings.get("fusions") is not False:
        return arguments
    rope: Arguments = {"no-rope-fusion": []} if model.positions == "rope" else {}
    switches = ("persist-layer-norm", "gradient-accumulation-fusion", "masked-softmax-fusion")
    return {**arguments, **rope, **{f"no-{name}": [] for name in switches}}


def _tokens(spec: RunSpec, model: DecoderShape) -> Arguments:
    """Return the arguments of tokenizer and data.

    The null tokenizer's end-of-document token is in addition to `--vocab-size` in Megatron-Core
    0.16, but part of it in 0.19. Padding yields the same vocabulary in both.
    """
    settings = spec.engine_settings
    if settings.get("tokenizer"):
        arguments: Arguments = {
            "tokenizer-type": ["HuggingFaceTokenizer"],
            "tokenizer-model": [settings["tokenizer"]],
        }
    elif settings.get("vocab_file"):
        arguments = {
            "tokenizer-type": ["GPT2BPETokenizer"],
            "vocab-file": [settings["vocab_file"]],
            "merge-file": [settings["merge_file"]],
        }
    else:
        arguments = {"tokenizer-type": ["NullTokenizer"], "vocab-size": [model.vocab_size - 1]}
        multiple = model.vocab_multiple * spec.layout.tp
        if model.vocab_size % multiple == 1 % multiple:
            padded = -(-model.vocab_size // multiple) * multiple
            arguments["make-vocab-size-divisible-by"] = [padded // spec.layout.tp]
    prefixes = data_prefixes(spec)
    if not prefixes:
        return {**arguments, "mock-data": []}
    return {**arguments, "data-path": prefixes, "split": [settings.get("split") or TRAINING_ONLY]}
