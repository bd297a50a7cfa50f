"""Builds Megatron-Core's model from Megatron-LM's arguments on a CPU; prints its parameters."""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import argparse
import ast
import re

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer import (
    MLATransformerConfig,
    TransformerConfig,
    attention,
    multi_latent_attention,
)

SIZES = {
    "num-layers": "num_layers",
    "hidden-size": "hidden_size",
    "num-attention-heads": "num_attention_heads",
    "ffn-hidden-size": "ffn_hidden_size",
    "q-lora-rank": "q_lora_rank",
    "kv-lora-rank": "kv_lora_rank",
    "qk-head-dim": "qk_head_dim",
    "qk-pos-emb-head-dim": "qk_pos_emb_head_dim",
    "v-head-dim": "v_head_dim",
    "num-experts": "num_moe_experts",
    "moe-router-topk": "moe_router_topk",
    "moe-ffn-hidden-size": "moe_ffn_hidden_size",
    "moe-shared-expert-intermediate-size": "moe_shared_expert_intermediate_size",
    "mtp-num-layers": "mtp_num_layers",
}
SWITCHES = ("multi-latent-attention", "qk-layernorm", "swiglu", "disable-bias-linear")
OTHERS = ("normalization", "rope-type", "moe-layer-freq")


def frequency(text: str) -> list[int]:
    """The layers with experts: `([0]*k+[1]*n)`."""
    parts = re.findall(r"(\[\d\])\*(\d+)", text)
    return [layer for kind, count in parts for layer in ast.literal_eval(kind) * int(count)]


class Attention(torch.nn.Module):
    """In place of attention's kernel, which has no weights: the local one takes no latent heads."""

    def __init__(self, **_: object) -> None:
        super().__init__()


def config(args: argparse.Namespace) -> TransformerConfig:
    """Megatron-Core's settings of the model."""
    own = {field: getattr(args, field) for field in SIZES.values()}
    latent = args.multi_latent_attention
    if not latent:
        own = {name: value for name, value in own.items() if value is not None}
    own |= {"rope_type": args.rope_type, "apply_rope_fusion": False} if latent else {}
    if args.moe_layer_freq:
        own["moe_layer_freq"] = frequency(args.moe_layer_freq)
    return (MLATransformerConfig if latent else TransformerConfig)(
        **own,
        qk_layernorm=args.qk_layernorm,
        normalization=args.normalization,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=not args.disable_bias_linear,
        moe_token_dispatcher_type="alltoall",
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )


def model(args: argparse.Namespace) -> GPTModel:
    """All of it, by the layers that need no Transformer Engine."""
    sizes = config(args)
    block = get_gpt_decoder_block_spec(
        sizes, use_transformer_engine=False, normalization=args.normalization
    )
    for layer in block.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = Attention
    further = get_gpt_mtp_block_spec(sizes, block, use_transformer_engine=False)
    return GPTModel(
        sizes,
        block,
        args.padded_vocab_size,
        args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        mtp_block_spec=further,
    )


def parsed() -> argparse.Namespace:
    """Megatron-LM's arguments, as far as they are of the model's size."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name, field in SIZES.items():
        parser.add_argument(f"--{name}", type=int, dest=field)
    for name in (*SWITCHES, "untie-embeddings-and-output-weights"):
        parser.add_argument(f"--{name}", action="store_true")
    for name in OTHERS:
        parser.add_argument(f"--{name}")
    parser.add_argument("--padded-vocab-size", type=int)
    parser.add_argument("--max-position-embeddings", type=int)
    return parser.parse_known_args()[0]


if __name__ == "__main__":
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.Stream = lambda: None
    # Its mocks of Transformer Engine are not classes, so layers cannot be compared with them.
    for module in (attention, multi_latent_attention):
        module.HAVE_TE = False
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    print("parameters", sum(weights.numel() for weights in model(parsed()).parameters()))
