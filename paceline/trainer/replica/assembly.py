"""From the resolved settings to the model that a rank holds, spread as the layout says."""

from __future__ import annotations

import torch

from paceline.trainer.config import NARROW, ConfigError, TrainerConfig
from paceline.trainer.measure.clock import StepClock
from paceline.trainer.model.decoder import Decoder, LayerSetting, ModelPart
from paceline.trainer.model.flux import MMDiT
from paceline.trainer.model.layers import Linear
from paceline.trainer.model.low_precision import low_precision_gemm
from paceline.trainer.model.network import (
    Network,
    count_parameters,
    derive_seed,
    freeze,
    init_weights,
)
from paceline.trainer.model_config import FluxConfig, Model
from paceline.trainer.parallel.mesh import Mesh, World
from paceline.trainer.parallel.stages import stage_layers, stages_of
from paceline.trainer.parallel.tensor import TensorParallel, shard_parameters
from paceline.trainer.replica.compute_copies import ComputeCopies
from paceline.trainer.replica.replica import (
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
"""What is computed in between matrix products."""
FEW_OUTPUTS = 4
"""A layer has few outputs when it has so many times more inputs."""
COPIED_ON = ("cuda",)
"""Devices on which a replica alone keeps copies of its weights to compute with."""


def make_replica(config: TrainerConfig, world: World, mesh: Mesh, steps: StepClock) -> Replica:
    """The model with its initial weights, spread over the world as the layout says.

    It is made without memory first: a wrong parameter count is found before anything is allocated.
    From here on, what a rank drops at random follows from the run's seed: tensor ranks drop alike.
    """
    layout, setting, states = config.layout, setting_of(config, mesh), mesh.device_mesh
    place = mesh.data.index * mesh.pp.size + mesh.pp.index
    torch.manual_seed(derive_seed(config.training.seed, place))
    with torch.device("meta"):
        whole = make_network(config.model, setting)
        parts = [make_network(config.model, setting, part) for part in parts_of(config, mesh)]
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
        shard_parameters(part, mesh.tp, states["tp"] if sharded and states else None)
        if sharded:
            shard(part, mesh, reshard=layout.zero_stage == 3)
        part.to_empty(device=world.device)
        init_weights(part, shapes, config.training.seed, mesh)
    if mesh.pp.size > 1:
        # Its package takes a second to import, which only pipelines should pay.
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
    if world.device.type in COPIED_ON:
        replica.copies = ComputeCopies(parts)
    return replica


def use_low_precision(model: Network, device_type: str, recipe: str) -> None:
    """Set the low-precision GEMM of the blocks' linear layers; head and adapters are unchanged.

    On a GPU, layers with few outputs, such as the keys of grouped heads, are unchanged as well:
    casting their input takes longer than the GEMM saves. Raise as `low_precision_gemm`.
    """
    gemm = low_precision_gemm(device_type, recipe)
    for module in model.blocks.modules():
        if isinstance(module, Linear):
            narrow = module.out_features * FEW_OUTPUTS <= module.in_features
            module.low_precision = None if narrow and device_type == "cuda" else gemm


def make_network(model: Model, setting: LayerSetting, part: ModelPart | None = None) -> Network:
    """The kind of model that the settings name, or a pipeline stage of it."""
    if isinstance(model, FluxConfig):
        return MMDiT(model, setting)
    return Decoder(model, setting, part)


def check_parameters(whole: Network, config: TrainerConfig) -> None:
    """Raise ConfigError when the model is not of the size that it should have."""
    trainable = sum(p.numel() for p in whole.parameters() if p.requires_grad)
    counts = {"parameters": count_parameters(whole), "trainable": trainable}
    for name, count in counts.items():
        expected = getattr(config, f"expected_{name}")
        if count != expected:
            raise ConfigError(f"expected_{name} {expected:,}: the model has {count:,} {name}")


def setting_of(config: TrainerConfig, mesh: Mesh) -> LayerSetting:
    """How this rank's decoder computes."""
    layout = config.layout
    return LayerSetting(
        seq_len=config.training.seq_len,
        dtype=DTYPES[config.training.dtype],
        recompute=layout.recompute,
        levels=config.recompute_levels if layout.recompute == "budget" else (),
        tp=TensorParallel(mesh.tp, layout.sequence_parallel),
        cp=mesh.cp,
        cp_exchange=layout.cp_exchange,
        lora=config.lora,
    )


def parts_of(config: TrainerConfig, mesh: Mesh) -> list[ModelPart]:
    """The pipeline stages that this rank holds."""
    if mesh.pp.size == 1:
        return [ModelPart(range(config.model.num_layers))]
    pp, vp = mesh.pp, config.layout.vp
    layers = stage_layers(config.model.num_layers, pp.size, vp)
    last = pp.size * vp - 1
    return [
        ModelPart(layers[stage], first=stage == 0, last=stage == last)
        for stage in stages_of(pp.index, pp.size, vp)
    ]
