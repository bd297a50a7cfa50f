"""Search for the checkpoint that a recipe starts from, and removal of incomplete ones."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from paceline.core.errors import UserError
from paceline.files.documents import read_text
from paceline.files.home import home_path
from paceline.files.recipe import Recipe
from paceline.files.run_folder import find_run

CHECKPOINTS_FOLDER, LATEST_CHECKPOINT, CHECKPOINT_STATE = "checkpoints", "latest", "state.json"
"""File and folder names of the native trainer."""
HUB_CONFIG = "config.json"
"""Configuration file in a model folder of the Hugging Face Hub."""


def with_checkpoint(recipe: Recipe, runs: Path) -> Recipe:
    """Return the recipe with absolute paths of the checkpoints that it starts from.

    The recipe may name a checkpoint, a folder of checkpoints (the latest one is taken), or a run:
    its path, its name, a prefix of it, or `last`. Raises UserError when there is none.
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
    """Return the latest checkpoint of a run or folder, or the checkpoint at a path.

    Raises UserError, which starts with `where`, when there is none.
    """
    path = home_path(where, name)
    origin = path if path.is_dir() else find_run(runs, name)
    for place in (origin, origin / CHECKPOINTS_FOLDER):
        latest = place / LATEST_CHECKPOINT
        folder = place / read_text(latest, 4096).strip() if latest.is_file() else place
        if (folder / CHECKPOINT_STATE).is_file():
            return folder.resolve()
    raise UserError(
        where,
        f"{origin} has no complete checkpoint",
        remedy="checkpoint.every=N saves one every N steps",
    )


def remove_incomplete_checkpoints(run: Path) -> None:
    """Remove the incomplete checkpoint of a run whose processes have ended.

    The native trainer writes a checkpoint to a folder whose name starts with a dot, its state last.
    """
    for part in (run / CHECKPOINTS_FOLDER).glob(".step-*"):
        if not (part / CHECKPOINT_STATE).exists():
            shutil.rmtree(part, ignore_errors=True)
