"""Model, optimizer and schedule of Megatron-Core from Megatron-LM arguments."""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils

# Megatron-Core 0.16.1 reads this name even where importing it from Transformer Engine failed.
if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None


def transformer_config(args) -> TransformerConfig:
    """Return Megatron-Core's configuration of the model and its layout."""
    dtype = args.params_dtype
    full = args.recompute_granularity == "full"
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        ffn_hidden_size=args.ffn_hidden_size,
        kv_channels=args.kv_channels,
        hidden_dropout=args.hidden_dropout,
        attention_dropout=args.attention_dropout,
        layernorm_epsilon=args.norm_epsilon,
        normalization=args.normalization,
        add_bias_linear=not args.disable_bias_linear,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
        init_method_std=args.init_method_std,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        account_for_embedding_in_pipeline_split=args.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=args.account_for_loss_in_pipeline_split,
        context_parallel_size=args.context_parallel_size,
        sequence_parallel=args.sequence_parallel,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=args.bf16,
        fp16=args.fp16,
        recompute_granularity=args.recompute_granularity,
        recompute_method=args.recompute_method if full else None,
        recompute_num_layers=args.recompute_num_layers if full else None,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        qk_layernorm=args.qk_layernorm,
        **experts(args),
    )


def experts(args) -> dict:
    """Return the fields of the configuration for experts; every expert is a module of its own."""
    if args.num_experts is None:
        return {}
    return {
        "num_moe_experts": args.num_experts,
        "moe_ffn_hidden_size": args.moe_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": args.moe_shared_expert_intermediate_size,
        "moe_router_topk": args.moe_router_topk,
        "moe_router_num_groups": args.moe_router_num_groups,
        "moe_router_group_topk": args.moe_router_group_topk,
        "moe_router_dtype": args.moe_router_dtype,
        "moe_router_force_load_balancing": args.moe_router_force_load_balancing,
        "moe_token_dispatcher_type": args.moe_token_dispatcher_type,
        "expert_model_parallel_size": args.expert_model_parallel_size,
        "expert_tensor_parallel_size": args.tensor_model_parallel_size,
    }


def gpt(args, config: TransformerConfig) -> GPTModel:
    """Return this pipeline rank's part of the model (`--embed-layernorm` is BigScience's)."""
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(
            num_experts=args.num_experts,
            qk_layernorm=args.qk_layernorm,
            normalization=args.normalization,
        ),
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
    )
    if args.embed_layernorm and model.pre_process:
        words = model.embedding.word_embeddings
        words.norm = torch.nn.LayerNorm(args.hidden_size, args.norm_epsilon)
        words.register_forward_hook(lambda layer, _, output: layer.norm(output))
    return model


def build_training(args):
    """Return the data-parallel model, its optimizer and its schedule."""
    config = transformer_config(args)
    model = gpt(args, config).to(torch.cuda.current_device())
    print_size(model)
    if args.fp16 or args.bf16:
        model = Float16Module(config, model)
    sharing = DistributedDataParallelConfig(
        grad_reduce_in_fp32=args.bf16,
        use_distributed_optimizer=args.use_distributed_optimizer,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
    )
    model = DistributedDataParallel(config, sharing, model)
    model.broadcast_params()
    optimizer = get_megatron_optimizer(optimizer_config(args), [model])
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    return model, optimizer, schedule_of(args, optimizer)


def print_size(model) -> None:
    """Print this rank's number of parameters, once per replica."""
    number = sum(parameter.numel() for parameter in model.parameters())
    tp = parallel_state.get_tensor_model_parallel_rank()
    pp = parallel_state.get_pipeline_model_parallel_rank()
    if parallel_state.get_data_parallel_rank() == 0:
        where = f"(tensor, pipeline) model parallel rank ({tp}, {pp})"
        print(f" > number of parameters on {where}: {number}", flush=True)


def optimizer_config(args) -> OptimizerConfig:
    """Return the settings of Adam and of fp16 loss scaling."""
    return OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        min_lr=args.min_lr,
        weight_decay=args.weight_decay,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_eps=args.adam_eps,
        clip_grad=args.clip_grad,
        bf16=args.bf16,
        fp16=args.fp16,
        params_dtype=args.params_dtype,
        initial_loss_scale=args.initial_loss_scale,
        min_loss_scale=args.min_loss_scale,
        loss_scale_window=args.loss_scale_window,
        hysteresis=args.hysteresis,
        use_distributed_optimizer=args.use_distributed_optimizer,
        overlap_param_gather=args.overlap_param_gather,
    )


def schedule_of(args, optimizer) -> OptimizerParamScheduler:
    """Return the learning rate schedule, in iterations or samples."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_total,
        lr_decay_steps=args.lr_decay_total,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
    )
