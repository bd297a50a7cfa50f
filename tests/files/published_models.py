"""Published models: the fields of their config.json that fix the shape, and their exact number of
parameters.

Counts are those of the published weights (`num_parameters` of the transformers class, or the sizes
of the safetensors files). DeepSeek-V3 is counted without its layer for the second token.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def _llama(
    layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int, **more: Any
) -> Config:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": 131072,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        **more,
    }


def _gpt2(layers: int, hidden: int, heads: int) -> Config:
    return {
        "model_type": "gpt2",
        "n_layer": layers,
        "n_embd": hidden,
        "n_head": heads,
        "n_positions": 1024,
        "n_ctx": 1024,
        "n_inner": None,
        "vocab_size": 50257,
        "activation_function": "gelu_new",
    }


def _neox(layers: int, hidden: int, heads: int, vocab: int) -> Config:
    return {
        "model_type": "gpt_neox",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
        "rotary_pct": 0.25,
        "rotary_emb_base": 10000,
        "hidden_act": "gelu",
        "tie_word_embeddings": False,
    }


def _opt(layers: int, hidden: int, heads: int, ffn: int, **more: Any) -> Config:
    return {
        "model_type": "opt",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "word_embed_proj_dim": hidden,
        "num_attention_heads": heads,
        "ffn_dim": ffn,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "activation_function": "relu",
        "do_layer_norm_before": True,
        **more,
    }


def _qwen3(layers: int, hidden: int, heads: int, kv: int, ffn: int, **more: Any) -> Config:
    qwen3 = {"model_type": "qwen3", "head_dim": 128, "use_sliding_window": False}
    return _llama(layers, hidden, heads, kv, ffn, 151936, **{**qwen3, **more})


def _qwen2(
    layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int, **more: Any
) -> Config:
    window = {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28}
    return _llama(layers, hidden, heads, kv, ffn, vocab, model_type="qwen2", **window, **more)


def _gemma(
    model_type: str, layers: int, hidden: int, heads: int, kv: int, ffn: int, **more: Any
) -> Config:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": ffn,
        "vocab_size": 256000,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        **more,
    }


def _gpt_oss(layers: int, experts: int) -> Config:
    return {
        "model_type": "gpt_oss",
        "num_hidden_layers": layers,
        "hidden_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "attention_bias": True,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "rope_theta": 150000,
        "rms_norm_eps": 1e-05,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
    }


def _deepseek(layers: int, hidden: int, heads: int, vocab: int, **more: Any) -> Config:
    return {
        "model_type": "deepseek_v3",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": vocab,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 163840,
        "moe_layer_freq": 1,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **more,
    }


def yarn(beta_fast: float, factor: float) -> Config:
    return {
        "beta_fast": beta_fast,
        "beta_slow": 1,
        "factor": factor,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    }


MODELS: dict[str, tuple[Config, int]] = {
    "meta-llama/Llama-2-7b": (_llama(32, 4096, 32, 32, 11008, 32000), 6_738_415_616),
    "meta-llama/Llama-3.1-8B": (
        _llama(32, 4096, 32, 8, 14336, 128256, rope_scaling={"rope_type": "llama3", "factor": 8.0}),
        8_030_261_248,
    ),
    "meta-llama/Llama-3.1-70B": (_llama(80, 8192, 64, 8, 28672, 128256), 70_553_706_496),
    "meta-llama/Llama-3.1-405B": (_llama(126, 16384, 128, 8, 53248, 128256), 405_853_388_800),
    "meta-llama/Llama-3.2-1B": (
        _llama(16, 2048, 32, 8, 8192, 128256, head_dim=64, tie_word_embeddings=True),
        1_235_814_400,
    ),
    "meta-llama/Llama-3.2-3B": (
        _llama(28, 3072, 24, 8, 8192, 128256, head_dim=128, tie_word_embeddings=True),
        3_212_749_824,
    ),
    "TinyLlama/TinyLlama-1.1B": (_llama(22, 2048, 32, 4, 5632, 32000), 1_100_048_384),
    "HuggingFaceTB/SmolLM2-135M": (
        _llama(30, 576, 9, 3, 1536, 49152, tie_word_embeddings=True),
        134_515_008,
    ),
    "mistralai/Mistral-7B-v0.1": (
        _llama(32, 4096, 32, 8, 14336, 32000, model_type="mistral", sliding_window=4096),
        7_241_732_096,
    ),
    "mistralai/Mixtral-8x7B-v0.1": (
        _llama(
            32,
            4096,
            32,
            8,
            14336,
            32000,
            model_type="mixtral",
            sliding_window=None,
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
        46_702_792_704,
    ),
    "Qwen/Qwen2.5-0.5B": (
        _qwen2(24, 896, 14, 2, 4864, 151936, tie_word_embeddings=True),
        494_032_768,
    ),
    "Qwen/Qwen2.5-7B": (_qwen2(28, 3584, 28, 4, 18944, 152064), 7_615_616_512),
    "Qwen/Qwen2.5-72B": (_qwen2(80, 8192, 64, 8, 29568, 152064), 72_706_203_648),
    "Qwen/Qwen1.5-MoE-A2.7B": (
        _llama(
            24,
            2048,
            16,
            16,
            5632,
            151936,
            model_type="qwen2_moe",
            num_experts=60,
            num_experts_per_tok=4,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            decoder_sparse_step=1,
        ),
        14_315_784_192,
    ),
    "Qwen/Qwen3-0.6B": (
        _qwen3(28, 1024, 16, 8, 3072, tie_word_embeddings=True),
        596_049_920,
    ),
    "Qwen/Qwen3-8B": (_qwen3(36, 4096, 32, 8, 12288), 8_190_735_360),
    "Qwen/Qwen3-32B": (_qwen3(64, 5120, 64, 8, 25600), 32_762_123_264),
    "Qwen/Qwen3-30B-A3B": (
        _qwen3(
            48,
            2048,
            32,
            4,
            6144,
            model_type="qwen3_moe",
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            mlp_only_layers=[],
            decoder_sparse_step=1,
        ),
        30_532_122_624,
    ),
    "google/gemma-2b": (
        _gemma("gemma", 18, 2048, 8, 1, 16384, hidden_act="gelu"),
        2_506_172_416,
    ),
    "google/gemma-2-2b": (
        _gemma(
            "gemma2",
            26,
            2304,
            8,
            4,
            9216,
            sliding_window=4096,
            attn_logit_softcapping=50.0,
            final_logit_softcapping=30.0,
            query_pre_attn_scalar=256,
        ),
        2_614_341_888,
    ),
    "google/gemma-2-9b": (
        _gemma("gemma2", 42, 3584, 16, 8, 14336, sliding_window=4096, query_pre_attn_scalar=256),
        9_241_705_984,
    ),
    "google/gemma-3-1b": (
        _gemma(
            "gemma3_text",
            26,
            1152,
            4,
            1,
            6912,
            vocab_size=262144,
            max_position_embeddings=32768,
            sliding_window=512,
            sliding_window_pattern=6,
            query_pre_attn_scalar=256,
            rope_theta=1_000_000,
            rope_local_base_freq=10_000,
        ),
        999_885_952,
    ),
    "microsoft/Phi-3-mini-4k": (
        _llama(32, 3072, 32, 32, 8192, 32064, model_type="phi3", sliding_window=2047),
        3_821_079_552,
    ),
    "microsoft/phi-4": (
        _llama(40, 5120, 40, 10, 17920, 100352, model_type="phi3", sliding_window=None),
        14_659_507_200,
    ),
    "microsoft/Phi-4-mini": (
        _llama(
            32,
            3072,
            24,
            8,
            8192,
            200064,
            model_type="phi3",
            sliding_window=262144,
            partial_rotary_factor=0.75,
            tie_word_embeddings=True,
        ),
        3_836_021_760,
    ),
    "microsoft/phi-2": (
        {
            "model_type": "phi",
            "num_hidden_layers": 32,
            "hidden_size": 2560,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "intermediate_size": 10240,
            "vocab_size": 51200,
            "hidden_act": "gelu_new",
            "partial_rotary_factor": 0.4,
            "max_position_embeddings": 2048,
        },
        2_779_683_840,
    ),
    "openai-community/gpt2": (_gpt2(12, 768, 12), 124_439_808),
    "openai-community/gpt2-medium": (_gpt2(24, 1024, 16), 354_823_168),
    "openai-community/gpt2-xl": (_gpt2(48, 1600, 25), 1_557_611_200),
    "EleutherAI/pythia-160m": (_neox(12, 768, 12, 50304), 162_322_944),
    "EleutherAI/pythia-1.4b": (_neox(24, 2048, 16, 50304), 1_414_647_808),
    "EleutherAI/gpt-neox-20b": (_neox(44, 6144, 64, 50432), 20_554_567_680),
    "EleutherAI/gpt-j-6b": (
        {
            "model_type": "gptj",
            "n_layer": 28,
            "n_embd": 4096,
            "n_head": 16,
            "n_positions": 2048,
            "n_inner": None,
            "rotary_dim": 64,
            "vocab_size": 50400,
            "activation_function": "gelu_new",
            "tie_word_embeddings": False,
        },
        6_050_882_784,
    ),
    "facebook/opt-125m": (_opt(12, 768, 12, 3072), 125_239_296),
    "facebook/opt-350m": (
        _opt(24, 1024, 16, 4096, word_embed_proj_dim=512, do_layer_norm_before=False),
        331_196_416,
    ),
    "facebook/opt-6.7b": (_opt(32, 4096, 32, 16384), 6_658_473_984),
    "tiiuae/falcon-7b": (
        {
            "model_type": "falcon",
            "num_hidden_layers": 32,
            "hidden_size": 4544,
            "num_attention_heads": 71,
            "multi_query": True,
            "new_decoder_architecture": False,
            "parallel_attn": True,
            "bias": False,
            "alibi": False,
            "vocab_size": 65024,
        },
        6_921_720_704,
    ),
    "tiiuae/falcon-40b": (
        {
            "model_type": "falcon",
            "num_hidden_layers": 60,
            "hidden_size": 8192,
            "num_attention_heads": 128,
            "num_kv_heads": 8,
            "multi_query": True,
            "new_decoder_architecture": True,
            "parallel_attn": True,
            "bias": False,
            "alibi": False,
            "vocab_size": 65024,
        },
        41_303_293_952,
    ),
    "bigscience/bloom-560m": (
        {
            "model_type": "bloom",
            "n_layer": 24,
            "hidden_size": 1024,
            "n_head": 16,
            "vocab_size": 250880,
            "seq_length": 2048,
            "layer_norm_epsilon": 1e-5,
        },
        559_214_592,
    ),
    "bigscience/bloom-7b1": (
        {
            "model_type": "bloom",
            "n_layer": 30,
            "n_embed": 4096,
            "num_attention_heads": 32,
            "vocab_size": 250880,
            "seq_length": 2048,
        },
        7_069_016_064,
    ),
    "deepseek-ai/DeepSeek-V2-Lite": (
        _deepseek(
            27,
            2048,
            16,
            102400,
            model_type="deepseek_v2",
            q_lora_rank=None,
            intermediate_size=10944,
            moe_intermediate_size=1408,
            n_routed_experts=64,
            n_shared_experts=2,
            num_experts_per_tok=6,
            first_k_dense_replace=1,
        ),
        15_706_484_224,
    ),
    "deepseek-ai/DeepSeek-V2": (
        _deepseek(
            60,
            5120,
            128,
            102400,
            model_type="deepseek_v2",
            q_lora_rank=1536,
            intermediate_size=12288,
            moe_intermediate_size=1536,
            n_routed_experts=160,
            n_shared_experts=2,
            num_experts_per_tok=6,
            first_k_dense_replace=1,
        ),
        235_741_434_880,
    ),
    "deepseek-ai/DeepSeek-V3": (
        _deepseek(
            61,
            7168,
            128,
            129280,
            q_lora_rank=1536,
            intermediate_size=18432,
            moe_intermediate_size=2048,
            n_routed_experts=256,
            n_shared_experts=1,
            num_experts_per_tok=8,
            n_group=8,
            topk_group=4,
            norm_topk_prob=True,
            scoring_func="sigmoid",
            topk_method="noaux_tc",
            routed_scaling_factor=2.5,
            first_k_dense_replace=3,
            rope_theta=10000,
            rope_scaling=yarn(32, 40),
        ),
        671_026_419_200,
    ),
    "openai/gpt-oss-20b": (_gpt_oss(24, 32), 20_914_757_184),
    "openai/gpt-oss-120b": (_gpt_oss(36, 128), 116_829_156_672),
    "bigcode/starcoder2-3b": (
        {
            "model_type": "starcoder2",
            "num_hidden_layers": 30,
            "hidden_size": 3072,
            "num_attention_heads": 24,
            "num_key_value_heads": 2,
            "intermediate_size": 12288,
            "vocab_size": 49152,
            "use_bias": True,
            "sliding_window": 4096,
            "max_position_embeddings": 16384,
            "hidden_act": "gelu_pytorch_tanh",
            "norm_epsilon": 1e-5,
        },
        3_030_371_328,
    ),
    "allenai/OLMo-2-1124-7B": (
        _llama(32, 4096, 32, 32, 11008, 100352, model_type="olmo2"),
        7_298_617_344,
    ),
    "stabilityai/stablelm-2-1_6b": (
        {
            "model_type": "stablelm",
            "num_hidden_layers": 24,
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "intermediate_size": 5632,
            "vocab_size": 100352,
            "use_qkv_bias": True,
            "partial_rotary_factor": 0.25,
            "max_position_embeddings": 4096,
        },
        1_644_515_328,
    ),
}
