"""Recipes with assets, and staging them inside this process."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from paceline.core.assets import Asset
from paceline.files.recipe import Recipe, load_recipe
from paceline.files.staged import CONTENT_FOLDER, asset_folder
from paceline.staging.plan import staging_plan
from paceline.staging.stager import Stager

TINY = load_recipe("tiny-llama")


def recipe_of(*assets: dict[str, Any]) -> Recipe:
    """A recipe with these assets alone."""
    declared = tuple(Asset.model_validate(asset) for asset in assets)
    return TINY.model_copy(update={"assets": declared})


def stage_all(recipe: Recipe, root: Path, **how: Any) -> None:
    """Stage every asset of a recipe."""
    Stager(**how).stage(staging_plan(recipe, None, root))


def folder_of(recipe: Recipe, root: Path, name: str) -> Path:
    """The folder of an asset."""
    asset = next(asset for asset in recipe.assets if asset.name == name)
    return asset_folder(root, asset, recipe.assets)


def content_of(recipe: Recipe, root: Path, name: str) -> dict[str, bytes]:
    """The files of a staged asset."""
    folder = folder_of(recipe, root, name) / CONTENT_FOLDER
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".git" not in path.parts
    }


def noise(num_bytes: int, seed: int = 0) -> bytes:
    """Bytes that nothing compresses."""
    return random.Random(seed).randbytes(num_bytes)
