"""Where staged assets lie, and whether they are whole; staging itself is another room's matter.

A stage folder holds one folder for each asset, `NAME-KEY`, whichever recipes share it:

manifest.json  every file with its size and SHA-256, written last; damaged.json once one is wrong
content/       the files
partial/       what is not whole yet
lock           who is staging it
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from paceline.core.assets import UNSTAGED_FOLDERS, Asset, AssetState, Manifest, asset_key
from paceline.core.errors import SystemFaultError, UserError, did_you_mean
from paceline.files.documents import read_value
from paceline.files.home import home_path
from paceline.files.recipe import Recipe
from paceline.files.yaml_file import validate

STAGE_VARIABLE = "PACELINE_STAGE"
MANIFEST_FILE = "manifest.json"
DAMAGED_FILE = "damaged.json"
"""What the manifest of an asset is called once a file of it was seen to be another."""
CONTENT_FOLDER = "content"
PARTIAL_FOLDER = "partial"
PREFIX = "staged:"
"""Begins a field's value that names a staged file: `staged:ASSET/PATH`."""
GIT_FOLDER = ".git"


def stage_root(option: Path | None = None) -> Path:
    """The folder of all staged assets: the option, else $PACELINE_STAGE, else the user's own."""
    place = option or os.environ.get(STAGE_VARIABLE) or "~/.local/share/paceline/stage"
    return home_path("", str(place)).absolute()


def asset_folder(root: Path, asset: Asset, assets: Iterable[Asset]) -> Path:
    """The folder of an asset among those of its recipe."""
    by_name = {other.name: other for other in assets}
    return root / f"{asset.name}-{asset_key(asset, by_name)}"


def asset_state(folder: Path) -> AssetState:
    """Whether an asset is there, by its manifest and the sizes of its files; nothing is hashed."""
    if not (folder / MANIFEST_FILE).is_file():
        if (folder / DAMAGED_FILE).is_file():
            return "damaged"
        begun = any((folder / name).exists() for name in (PARTIAL_FOLDER, CONTENT_FOLDER))
        return "partial" if begun else "missing"
    manifest = read_manifest(folder)
    if manifest is None:
        return "damaged"
    sizes = content_sizes(folder / CONTENT_FOLDER)
    # What programs leave beside the files, such as caches, harms nobody.
    whole = all(sizes.get(file.path) == file.bytes for file in manifest.files)
    return "staged" if whole else "damaged"


def content_sizes(content: Path) -> dict[str, int]:
    """Bytes of every file by its path inside `content`, what git and Python keep there left out."""
    sizes: dict[str, int] = {}
    for folder, names, files in os.walk(content):
        names[:] = [name for name in names if name not in UNSTAGED_FOLDERS]
        for name in files:
            path = Path(folder) / name
            # A submodule's .git is a file that names a folder of this machine.
            if name != GIT_FOLDER:
                # A stager may move the folder meanwhile.
                with suppress(FileNotFoundError):
                    sizes[path.relative_to(content).as_posix()] = path.lstat().st_size
    return sizes


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of an asset's folder; None where there is none that can be read."""
    try:
        return read_value(folder / MANIFEST_FILE, Manifest)
    except (UserError, SystemFaultError):
        return None


def staged_path(recipe: Recipe, name: str, root: Path | None = None) -> Path:
    """The folder with the files of the recipe's asset `name`.

    Raises UserError when the recipe has no such asset, or when it is not staged: with the command
    that does it.
    """
    root = stage_root(root)
    names = [asset.name for asset in recipe.assets]
    if name not in names:
        raise UserError(
            f"{recipe.name}: asset {name!r}",
            "is not declared",
            allowed=", ".join(names) or "this recipe declares none",
            remedy=did_you_mean(name, names) or None,
        )
    if problem := unstaged(recipe, [name], root):
        raise problem
    asset = recipe.assets[names.index(name)]
    return asset_folder(root, asset, recipe.assets) / CONTENT_FOLDER


def unstaged(recipe: Recipe, names: Iterable[str], root: Path | None = None) -> UserError | None:
    """What to tell where some of the recipe's assets are not staged; None when all are."""
    root = stage_root(root)
    states = {
        asset.name: asset_state(asset_folder(root, asset, recipe.assets))
        for asset in recipe.assets
        if asset.name in set(names)
    }
    lacking = [f"{name} is {state}" for name, state in states.items() if state != "staged"]
    if not lacking:
        return None
    return UserError(
        f"{recipe.name}: staged in {root}",
        ", ".join(lacking),
        remedy=f"`paceline stage {recipe.name}` fetches what is missing"
        f" (${STAGE_VARIABLE} says where it lies)",
    )


def with_staged_files(recipe: Recipe, root: Path | None = None) -> Recipe:
    """The recipe with the absolute path of every file that a field names as `staged:ASSET/PATH`.

    Raises UserError when one is not staged.
    """
    content = recipe.model_dump(mode="json", exclude={"assets", "variants"})
    names = sorted(set(_named(content)))
    if not names:
        return recipe
    for name in names:
        staged_path(recipe, name, root)
    located = cast(dict[str, Any], _located(content, recipe, root))
    changed = {name: value for name, value in located.items() if value != content[name]}
    whole = {**recipe.model_dump(mode="json", exclude_unset=True), **changed}
    return validate(Recipe, whole, recipe.name)


def _named(value: object) -> Iterable[str]:
    if isinstance(value, str) and value.startswith(PREFIX):
        yield value.removeprefix(PREFIX).partition("/")[0]
    elif isinstance(value, dict | list):
        inner = cast(Iterable[object], value.values() if isinstance(value, dict) else value)
        for part in inner:
            yield from _named(part)


def _located(value: object, recipe: Recipe, root: Path | None) -> object:
    if isinstance(value, dict):
        items = cast(dict[str, object], value).items()
        return {name: _located(part, recipe, root) for name, part in items}
    if isinstance(value, list):
        return [_located(part, recipe, root) for part in cast(list[object], value)]
    if not isinstance(value, str) or not value.startswith(PREFIX):
        return value
    name, _, path = value.removeprefix(PREFIX).partition("/")
    return str(staged_path(recipe, name, root) / path)
