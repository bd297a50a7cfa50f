"""A program of the user's own as a plan: with a recipe that says what it trains, or bare."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from paceline.core.errors import UserError
from paceline.core.run import NOTHING_STATED, RunSpec
from paceline.files.recipe import LONGEST_NAME, Recipe, load_recipe, parse_override
from paceline.files.yaml_file import validate
from paceline.machines.placement import Request, device_kind

ENGINE = "command"
LAUNCHERS = frozenset(
    {"torchrun", "accelerate", "deepspeed", "python", "python3", "{python}", "bash", "sh"}
)
"""Programs after which a run is not called, because what they start says more."""
SETTABLE = ("time_limit_s", "hang_limit_s", "engine_settings")
"""What can be set of a command without a recipe."""


def requested_recipe(request: Request) -> Recipe:
    """The recipe of a request; of a bare command one that states nothing but how it is watched.

    Raises UserError for a field that only a recipe has.
    """
    if request.recipe or not request.command:
        recipe = load_recipe(request.recipe, request.variant, request.overrides)
        return recipe.model_copy(update={"engine": ENGINE}) if request.command else recipe
    return _bare_recipe(request)


def on_one_device(request: Request, recipe: Recipe, machine: dict[str, Any]) -> Request:
    """A command that is started once a node takes one process of a CPU, if nobody says more."""
    stated = request.devices or request.cluster or any(h.slots for h in request.where.hosts)
    if not request.command or request.per == "device" or stated:
        return request
    kind, _ = device_kind(request.device, machine)
    return replace(request, devices=recipe.layout.smallest_world) if kind == "cpu" else request


def with_command(spec: RunSpec, request: Request) -> RunSpec:
    """The run of the request's command, if it has one."""
    if not request.command:
        return spec
    settings = {**spec.engine_settings, "per": request.per or "node"}
    if request.devices:
        settings["devices"] = request.devices
    return spec.model_copy(
        update={
            "command": request.command,
            "engine_settings": settings,
            "bare": not request.recipe,
        }
    )


def command_name(command: tuple[str, ...]) -> str:
    """What a bare run is called: the first script in its command, else its program."""
    program = PurePath(command[0]).name
    if program in LAUNCHERS:
        scripts = (word for word in command[1:] if re.search(r"\w\.(py|sh)$", word))
        program = next((PurePath(word).name for word in scripts), program)
    name = "".join(letter for letter in program if letter.isprintable())
    return name[:LONGEST_NAME] or "command"


def _bare_recipe(request: Request) -> Recipe:
    if request.variant is not None:
        raise UserError("--variant", "is of a recipe, and there is none", remedy="leave it out")
    fields: dict[str, Any] = {}
    for text in request.overrides:
        key, value = parse_override(text)
        name, _, rest = key.partition(".")
        if name not in SETTABLE:
            raise UserError(
                f"--set {text}",
                "is of a recipe, and there is none",
                allowed=", ".join(SETTABLE),
                remedy="give the RECIPE that says what the command trains",
            )
        if rest and not isinstance(fields.get(name, {}), dict):
            raise UserError(f"--set {text}", f"{name} was given as a whole before")
        fields[name] = {**fields.get(name, {}), rest: value} if rest else value
    training = {**NOTHING_STATED["training"], "batch_per_device": 1}
    name = command_name(request.command)
    content = {**NOTHING_STATED, "training": training, "time_limit_s": None, **fields}
    where = " ".join(f"--set {text}" for text in request.overrides) or "command"
    return validate(Recipe, {**content, "name": name, "title": name, "engine": ENGINE}, where)
