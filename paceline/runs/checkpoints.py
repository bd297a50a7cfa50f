"""The checkpoints of a run: which one a recipe begins with, and what a run must not leave."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from paceline.core.errors import UserError
from paceline.files.home import home_path
from paceline.files.recipe import Recipe
from paceline.files.run_folder import find_run

CHECKPOINTS_FOLDER, LATEST_CHECKPOINT, CHECKPOINT_STATE = "checkpoints", "latest", "state.json"
"""Names that the native trainer gives."""
HUB_CONFIG = "config.json"
"""In a model's folder of the hub, beside its safetensors."""


def with_checkpoint(recipe: Recipe, runs: Path) -> Recipe:
    """The recipe with the absolute folders of the very checkpoints that it begins with.

    The recipe may name a checkpoint, a folder of them (its latest at this moment), or a run, by
    path or as everywhere (`last`, a prefix). Raises UserError when there is none.
    """
    update: dict[str, Any] = {}
    if recipe.checkpoint.resume is not None:
        folder = _checkpoint(recipe, "checkpoint.resume", recipe.checkpoint.resume, runs)
        update["checkpoint"] = recipe.checkpoint.model_copy(update={"resume": folder})
    if recipe.training.initial_weights is not None:
        field = "training.initial_weights"
        folder = _checkpoint(recipe, field, recipe.training.initial_weights, runs)
        update["training"] = recipe.training.model_copy(update={"initial_weights": folder})
    return recipe.model_copy(update=update) if update else recipe


def _checkpoint(recipe: Recipe, field: str, name: str, runs: Path) -> str:
    where = f"{recipe.name}: {field}"
    if field == "training.initial_weights":
        path = home_path(where, name)
        if (path / HUB_CONFIG).is_file() and not (path / CHECKPOINT_STATE).is_file():
            return str(path.resolve())
    return str(find_checkpoint(where, name, runs))


def find_checkpoint(where: str, name: str, runs: Path) -> Path:
    """The checkpoint that a path, a run or a folder of checkpoints means: the latest one.

    Raises UserError, which begins with `where`, when there is none.
    """
    path = home_path(where, name)
    origin = path if path.is_dir() else find_run(runs, name)
    for place in (origin, origin / CHECKPOINTS_FOLDER):
        latest = place / LATEST_CHECKPOINT
        folder = place / latest.read_text().strip() if latest.is_file() else place
        if (folder / CHECKPOINT_STATE).is_file():
            return folder.resolve()
    raise UserError(
        where,
        f"{origin} holds no whole checkpoint",
        remedy="checkpoint.every=N saves one every N steps",
    )


def remove_torn_checkpoints(run: Path) -> None:
    """Remove what a run whose processes have ended was still writing, at most one folder.

    The native trainer writes a checkpoint under a name that begins with a dot, its state last.
    """
    for part in (run / CHECKPOINTS_FOLDER).glob(".step-*"):
        if not (part / CHECKPOINT_STATE).exists():
            shutil.rmtree(part, ignore_errors=True)
