"""The batch of each point of a scaling series: it grows in weak scaling, stays in strong."""

from __future__ import annotations

from fractions import Fraction

from paceline.core.errors import UserError
from paceline.core.node_groups import ScalingKind
from paceline.core.units import counted
from paceline.files.recipe import Recipe


def scaling_kind(recipe: Recipe, option: ScalingKind | None) -> ScalingKind:
    """As asked for, else as the recipe says, else strong where its batch is a number."""
    default = "strong" if isinstance(recipe.training.global_batch, int) else "weak"
    return option or recipe.scaling or default


def batch_on(
    recipe: Recipe, kind: ScalingKind, num_nodes: int, devices: int, whole_node: int
) -> int:
    """Sequences a step on `num_nodes` nodes of which `devices` of `whole_node` devices are used.

    Raises UserError where the recipe does not say enough for this kind of scaling.
    """
    training = recipe.training
    if kind == "strong" and isinstance(training.global_batch, int):
        return training.global_batch
    if kind == "strong" and recipe.devices is None:
        raise UserError(
            f"strong scaling of {recipe.name}",
            "needs one batch for all sizes",
            remedy="--set global_batch=N",
        )
    if training.batch_per_device is not None:
        share = Fraction(training.batch_per_device)
    elif training.batch_per_node is not None:
        share = Fraction(training.batch_per_node, whole_node)
    elif recipe.devices is not None:
        share = Fraction(training.batch(recipe.devices), recipe.devices)
    else:
        raise UserError(
            f"weak scaling of {recipe.name}",
            "its batch does not grow with the devices",
            remedy='--set batch_per_device=N or --set "global_batch=N per node"; '
            "or --scaling strong",
        )
    world = num_nodes * devices if kind == "weak" else recipe.devices or 1
    batch = share * world
    if batch.denominator != 1:
        raise UserError(
            f"{kind} scaling of {recipe.name} on {counted(world, 'device')}",
            f"{float(batch):g} sequences are no batch",
            remedy="--set batch_per_device=N",
        )
    return int(batch)
