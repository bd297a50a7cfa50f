"""Which of a recipe's trial variants runs in a place: the plain one, else the first that can."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.core.errors import UserError
from paceline.files.recipe import full_key, load_recipe
from paceline.machines.placement import Request
from paceline.mlperf.rules import TRIAL_VARIANT
from paceline.runs.plan import Plan, make_plan

SETTLES = ("layout.", "training.global_batch", "devices")
"""Overrides with which users settle the layout themselves: no other one is looked for."""


@dataclass(frozen=True)
class TrialVariant:
    """The variant that trials run, its plan, and why it is not the plain one."""

    name: str
    plan: Plan
    notice: str | None = None


def trial_variant(request: Request) -> TrialVariant:
    """`mlperf-trial` of the request's recipe, else the first `mlperf-trial-*` that can run there.

    Raises UserError of the plain variant where none can, with what was tried.
    """
    try:
        plan = make_plan(replace(request, variant=TRIAL_VARIANT))
        return TrialVariant(TRIAL_VARIANT, plan)
    except UserError as refusal:
        keys = [full_key(text.partition("=")[0]) for text in request.overrides]
        if any(key.startswith(SETTLES) for key in keys):
            raise
        return _other(request, refusal)


def _other(request: Request, refusal: UserError) -> TrialVariant:
    names = load_recipe(request.recipe).variants
    refused: dict[str, UserError] = {}
    for name in (name for name in names if name.startswith(f"{TRIAL_VARIANT}-")):
        try:
            plan = make_plan(replace(request, variant=name))
        except UserError as error:
            refused[name] = error
            continue
        sizes, batch = plan.spec.layout.label(plan.spec.world_size), plan.spec.training.global_batch
        notice = (
            f"variant {name} is taken ({sizes}, {batch:,} samples a step), because "
            f"{TRIAL_VARIANT} cannot run there: {refusal.what}"
        )
        return TrialVariant(name, plan, notice)
    if all(str(other) == str(refusal) for other in refused.values()):
        raise refusal
    tried = ", ".join(f"{name}{_why(other, refusal)}" for name, other in refused.items())
    raise UserError(
        refusal.where,
        refusal.what,
        allowed=refusal.allowed,
        remedy="; ".join(filter(None, (f"nor can {tried}", refusal.remedy))),
    ) from refusal


def _why(other: UserError, plain: UserError) -> str:
    """What another variant is refused for, in brackets; nothing where that is said already."""
    return "" if other.what == plain.what else f" ({other.what})"
