"""Hydra overrides of NeMo 1's megatron_gpt_pretraining.py for a run.

Names: NVIDIA/NeMo, examples/nlp/language_modeling/conf/megatron_gpt_config.yaml; values of Llama
3.1: NVIDIA/NeMo-Framework-Launcher, conf/training/llama/llama3_1_70b.yaml. `++` sets a field that
the default configuration may not have.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.core.run import RunSpec
from paceline.core.shape import DecoderShape

NORMS = {"rmsnorm": "rmsnorm", "layernorm": "layernorm1p"}
ACTIVATIONS = {
    ("gelu", False): "gelu",
    ("silu", True): "fast-swiglu",
    ("gelu", True): "fast-geglu",
    ("relu", True): "fast-reglu",
}
"""NeMo's names by activation and gate, for those that Paceline and NeMo's GPT share."""
DATA_FOLDER = "llama3.1-dataset"
DATA = ("my-llama_00_text_document", "my-llama_01_text_document")
"""Data of the recipe's generate_dataset.sh in DATA_FOLDER of STAGE_PATH."""
TOKENIZER_MOUNT = "/tokenizer"
"""Folder of the tokenizer in the container."""
LOG_FOLDER = "exp_manager.explicit_log_dir=$RESULT_DIR/results"
INDEX_FOLDER = "model.data.index_mapping_dir=$INDEX_MAPPING_DIR"
WITH_VARIABLE = (LOG_FOLDER, INDEX_FOLDER)
"""Overrides in which launch.sh expands a variable; in any other, `$` is literal."""


def staged_data(spec: RunSpec) -> bool:
    """Return whether Paceline's launch.sh trains on STAGE_PATH's data set, not mock data."""
    return bool(spec.engine_settings.get("dataset"))


def launcher_overrides(spec: RunSpec) -> list[str]:
    """Return the overrides for NeMo's launcher, which calls the configuration `training`."""
    return [f"training.{text.lstrip('+')}" for text in parallel_overrides(spec)]


def overrides(spec: RunSpec, model: DecoderShape, profiled_ranks: str) -> list[str]:
    """Return all overrides that make the default configuration train `spec`."""
    return [
        *parallel_overrides(spec),
        *_trainer(spec),
        *_model(spec, model),
        *_optimizer(spec),
        *_fusions(spec, model),
        *_data(spec),
        *_profile(spec, profiled_ranks),
    ]


def parallel_overrides(spec: RunSpec) -> list[str]:
    """Return the overrides of layout and batch, which determine the published results."""
    layout = spec.layout
    return [
        f"model.tensor_model_parallel_size={layout.tp}",
        f"model.pipeline_model_parallel_size={layout.pp}",
        f"model.virtual_pipeline_model_parallel_size={layout.vp if layout.vp > 1 else 'null'}",
        f"++model.context_parallel_size={layout.cp}",
        f"model.micro_batch_size={layout.micro_batch}",
        f"model.global_batch_size={spec.training.global_batch}",
    ]


def _trainer(spec: RunSpec) -> list[str]:
    steps = spec.training.steps
    return [
        f"trainer.num_nodes={spec.cluster.nodes}",
        f"trainer.devices={spec.cluster.devices_per_node}",
        f"trainer.max_steps={steps}",
        f"trainer.val_check_interval={steps}",
        "trainer.limit_val_batches=1",
        "++trainer.num_sanity_val_steps=0",
        "trainer.log_every_n_steps=1",
        f"trainer.gradient_clip_val={spec.training.grad_clip:g}",
        "trainer.precision=bf16",
        LOG_FOLDER,
        "exp_manager.create_checkpoint_callback=false",
        "++exp_manager.log_step_timing=true",
        "++exp_manager.step_timing_kwargs.sync_cuda=true",
    ]


def _model(spec: RunSpec, model: DecoderShape) -> list[str]:
    layout, fp8 = spec.layout, str(spec.training.dtype == "fp8").lower()
    activation = ACTIVATIONS.get((model.activation, model.gated_ffn), model.activation)
    return [
        "model.mcore_gpt=true",
        f"model.encoder_seq_length={spec.training.seq_len}",
        f"model.max_position_embeddings={max(model.max_positions, spec.training.seq_len)}",
        f"model.num_layers={model.num_layers}",
        f"model.hidden_size={model.hidden_size}",
        f"model.ffn_hidden_size={model.ffn_size}",
        f"model.num_attention_heads={model.num_heads}",
        f"++model.num_query_groups={model.kv_heads}",
        f"model.kv_channels={model.head_dim}",
        f"++model.override_vocab_size={model.padded_vocab(layout.tp)}",
        f"model.hidden_dropout={model.dropout:g}",
        f"model.attention_dropout={model.dropped_probabilities:g}",
        f"model.normalization={NORMS[model.norm]}",
        f"model.layernorm_epsilon={model.norm_eps:g}",
        f"model.bias={str(model.bias).lower()}",
        f"model.activation={activation}",
        "model.position_embedding_type="
        + ("rope" if model.positions == "rope" else "learned_absolute"),
        f"++model.rotary_base={model.rope_theta:g}",
        f"model.share_embeddings_and_output_weights={str(model.tied_embeddings).lower()}",
        f"model.sequence_parallel={str(layout.sequence_parallel).lower()}",
        *_recompute(spec),
        "model.transformer_engine=true",
        "model.megatron_amp_O2=true",
        f"model.fp8={fp8}",
        f"model.fp8_hybrid={fp8}",
        f"++model.fp8_params={fp8}",
        f"model.seed={spec.training.seed}",
    ]


def _recompute(spec: RunSpec) -> list[str]:
    kind = spec.layout.recompute
    if kind == "none":
        return ["model.activations_checkpoint_granularity=null"]
    method = ["model.activations_checkpoint_method=uniform",
              "model.activations_checkpoint_num_layers=1"]  # fmt: skip
    return [f"model.activations_checkpoint_granularity={kind}", *(method if kind == "full" else [])]


def _optimizer(spec: RunSpec) -> Iterator[str]:
    training, schedule = spec.training, spec.training.lr_schedule
    first, second = training.betas
    yield "model.optim.name=distributed_fused_adam"
    yield f"model.optim.lr={training.lr:g}"
    yield f"model.optim.weight_decay={training.weight_decay:g}"
    yield f"model.optim.betas=[{first:g},{second:g}]"
    yield f"++model.optim.eps={training.eps:g}"
    if schedule.kind == "cosine":
        yield "model.optim.sched.name=CosineAnnealing"
        yield f"model.optim.sched.warmup_steps={schedule.warmup}"
        yield "model.optim.sched.constant_steps=0"
        yield f"model.optim.sched.min_lr={schedule.min_lr:g}"
        if schedule.decay:
            yield f"++model.optim.sched.max_steps={schedule.decay}"
    else:
        yield "~model.optim.sched"


def _fusions(spec: RunSpec, model: DecoderShape) -> list[str]:
    """Return the recipe's fusions and overlaps, as far as they apply to any model.

    Its user-buffer overlap of tensor parallelism is left out: its settings differ by model.
    """
    settings = {
        "model.gradient_accumulation_fusion": model.tied_embeddings is False,
        "++model.cross_entropy_loss_fusion": True,
        "model.apply_rope_fusion": model.positions == "rope",
        "++model.optim.overlap_grad_sync": True,
        "++model.optim.overlap_param_sync": True,
        "++model.optim.contiguous_grad_buffer": True,
        "++model.optim.contiguous_param_buffer": True,
        "model.overlap_p2p_comm": spec.layout.vp > 1,
        "model.batch_p2p_comm": spec.layout.vp == 1,
    }
    return [
        *(f"{name}={str(value).lower()}" for name, value in settings.items()),
        "++model.optim.grad_sync_dtype=bf16",
        "model.gc_interval=25",
    ]


def _data(spec: RunSpec) -> list[str]:
    """Return the data and the tokenizer, which NeMo loads for mock data too."""
    settings = [
        f"model.data.seq_length={spec.training.seq_len}",
        "model.tokenizer.library=huggingface",
        f"model.tokenizer.type={TOKENIZER_MOUNT}",
        "++model.tokenizer.use_fast=true",
    ]
    if not staged_data(spec):
        return [*settings, "model.data.data_impl=mock", "model.data.data_prefix=[]"]
    prefix = ",".join(f".5,/dataset/{name}" for name in DATA)
    return [*settings, f"model.data.data_prefix=[{prefix}]", INDEX_FOLDER]


def _profile(spec: RunSpec, ranks: str) -> Iterator[str]:
    settings = spec.engine_settings
    if not settings.get("profile"):
        return
    values = {name: value for name, value in settings.items() if value is not None}
    yield "model.nsys_profile.enabled=true"
    yield f"model.nsys_profile.start_step={values.get('profile_start_step', 20)}"
    yield f"model.nsys_profile.end_step={values.get('profile_stop_step', 30)}"
    yield f"model.nsys_profile.ranks=[{ranks}]"
