"""Build the part of the model that a rank holds, parallelized by the layout."""

from __future__ import annotations

import torch

from paceline.trainer.config import NARROW, ConfigError, TrainerConfig
from paceline.trainer.measure.clock import StepClock
from paceline.trainer.model.decoder import Decoder, LayerSetting, ModelPart
from paceline.trainer.model.experts import RoutingSetting, StackedExperts
from paceline.trainer.model.flux import MMDiT
from paceline.trainer.model.layers import Linear
from paceline.trainer.model.low_precision import (
    ROWS_BY_RECIPE,
    low_precision_gemm,
    low_precision_grouped_gemm,
)
from paceline.trainer.model.network import (
    Network,
    count_parameters,
    derive_seed,
    freeze,
    init_weights,
)
from paceline.trainer.model_config import FluxConfig, Model, ModelConfig
from paceline.trainer.parallel.mesh import Mesh, World
from paceline.trainer.parallel.stages import local_stages, stage_layers
from paceline.trainer.parallel.tensor import TensorParallel, shard_parameters
from paceline.trainer.replica.replica import (
    ComputeCopies,
    DdpReplica,
    PipelineReplica,
    Replica,
    ShardedReplica,
    compile_blocks,
    shard,
)

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
    **dict.fromkeys(NARROW, torch.bfloat16),
}
"""Compute dtype between GEMMs, by training.dtype."""
MIN_INPUTS_PER_OUTPUT = 4
"""Ratio of inputs to outputs from which on a layer does not profit from low precision."""
COMPUTE_COPY_DEVICES = ("cuda",)
"""Devices on which a single replica stores copies of its weights in the compute dtype."""


def make_replica(config: TrainerConfig, world: World, mesh: Mesh, steps: StepClock) -> Replica:
    """Build this rank's replica with its initial weights.

    The model is first built on the meta device, so that a wrong parameter count is found before
    memory is allocated. This also seeds the generators of dropout: tensor ranks share a seed.
    """
    layout, setting, states = config.layout, layer_setting(config, mesh), mesh.device_mesh
    part = mesh.data.index * mesh.pp.size + mesh.pp.index
    torch.manual_seed(derive_seed(config.training.seed, part))
    with torch.device("meta"):
        whole = make_network(config.model, setting)
        parts = [make_network(config.model, setting, part) for part in local_parts(config, mesh)]
    freeze(whole)
    check_parameters(whole, config)
    shapes = {name: parameter.shape for name, parameter in whole.named_parameters()}
    sharded = mesh.data.size > 1 and layout.zero_stage >= 2
    if config.training.compile == "blocks":
        compile_blocks(parts)
    for part in parts:
        if setting.dtype == torch.float64:
            part.double()
        freeze(part)
        if recipe := config.training.low_precision_recipe:
            use_low_precision(part, world.device.type, recipe)
        shard_parameters(part, mesh.tp, states["tp"] if sharded and states else None, mesh.ep)
        if sharded:
            shard(part, mesh, reshard=layout.zero_stage == 3)
        part.to_empty(device=world.device)
        init_weights(part, shapes, config.training.seed, mesh)
    if mesh.pp.size > 1:
        # torch.distributed.pipelining takes a second to import.
        from paceline.trainer.replica.pipeline import PipelineRunner

        runner = PipelineRunner(parts, mesh.pp, config, world.device)
        return PipelineReplica(parts, mesh, runner, sharded)
    if sharded:
        return ShardedReplica(
            parts,
            mesh,
            keep_gathered=layout.zero_stage == 2,
            sync_once=layout.gradient_sync == "last",
        )
    if mesh.data.size > 1:
        return DdpReplica(parts, mesh, world, steps)
    replica = Replica(parts, mesh)
    if world.device.type in COMPUTE_COPY_DEVICES:
        replica.copies = ComputeCopies(parts)
    return replica


def use_low_precision(model: Network, device_type: str, recipe: str) -> None:
    """Set the low-precision GEMM of the blocks' linear layers and experts.

    Head, adapters and routers are unchanged. On a GPU, layers with few outputs, such as the keys of
    grouped heads, are unchanged as well: casting their input takes longer than the GEMM saves.
    Raise as `low_precision_gemm`.
    """
    gemm = low_precision_gemm(device_type, recipe)
    for module in (module for block in model.all_blocks() for module in block.modules()):
        if isinstance(module, StackedExperts):
            module.low_precision = low_precision_grouped_gemm(device_type, recipe)
            module.group_rows = ROWS_BY_RECIPE[recipe]
        if isinstance(module, Linear):
            narrow = module.out_features * MIN_INPUTS_PER_OUTPUT <= module.in_features
            module.low_precision = None if narrow and device_type == "cuda" else gemm


def make_network(model: Model, setting: LayerSetting, part: ModelPart | None = None) -> Network:
    """Return the configured kind of model, or a pipeline stage of it."""
    if isinstance(model, FluxConfig):
        return MMDiT(model, setting)
    return Decoder(model, setting, part)


def check_parameters(whole: Network, config: TrainerConfig) -> None:
    """Raise ConfigError when the model does not have the expected number of parameters."""
    trainable = sum(p.numel() for p in whole.parameters() if p.requires_grad)
    counts = {"parameters": count_parameters(whole), "trainable": trainable}
    for name, count in counts.items():
        expected = getattr(config, f"expected_{name}")
        if count != expected:
            raise ConfigError(
                f"expected_{name} {expected:,}: the model has {count:,} {name}; correct its sizes"
            )


def layer_setting(config: TrainerConfig, mesh: Mesh) -> LayerSetting:
    """Return the settings of this rank's layers."""
    layout, training = config.layout, config.training
    has_bias_steps = training.routing == "learned"
    return LayerSetting(
        seq_len=config.training.seq_len,
        dtype=DTYPES[config.training.dtype],
        recompute=layout.recompute,
        levels=config.recompute_levels if layout.recompute == "budget" else (),
        tp=TensorParallel(mesh.tp, layout.sequence_parallel),
        cp=mesh.cp,
        ep=mesh.ep,
        cp_exchange=layout.cp_exchange,
        lora=config.lora,
        mtp_loss_weight=training.mtp_loss_weight,
        routing=RoutingSetting(
            forced=config.training.routing == "forced",
            weights=tuple(config.training.routing_weights),
            rank=mesh.data.index,
            aux_loss=config.training.router_aux_loss,
            z_loss=config.training.router_z_loss,
            bias_update_rate=training.router_bias_update_rate if has_bias_steps else 0.0,
        ),
    )


def local_parts(config: TrainerConfig, mesh: Mesh) -> list[ModelPart]:
    """Return the pipeline stages of this rank."""
    if mesh.pp.size == 1:
        return [ModelPart(range(config.model.num_layers))]
    pp, vp = mesh.pp, config.layout.vp
    further = config.model.mtp_layers if isinstance(config.model, ModelConfig) else 0
    layers = stage_layers(config.model.num_layers, pp.size, vp, further)
    last = pp.size * vp - 1
    return [
        ModelPart(layers[stage], first=stage == 0, last=stage == last)
        for stage in local_stages(pp.index, pp.size, vp)
    ]
