"""A plain training loop over transformers' LlamaForCausalLM: a peer of the native trainer."""

from __future__ import annotations

from typing import Any

from _plain_loop import main
from transformers import LlamaConfig, LlamaForCausalLM


def build(model: dict[str, Any]) -> LlamaForCausalLM:
    """The same shape as the native model."""
    config = LlamaConfig(
        vocab_size=model["padded_vocab"],
        hidden_size=model["hidden_size"],
        intermediate_size=model["ffn_size"],
        num_hidden_layers=model["num_layers"],
        num_attention_heads=model["num_heads"],
        num_key_value_heads=model["num_kv_heads"] or model["num_heads"],
        max_position_embeddings=model["max_positions"],
        tie_word_embeddings=model["tied_embeddings"],
        use_cache=False,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


if __name__ == "__main__":
    main(build, lambda model, ids: model(input_ids=ids, labels=ids).loss)
