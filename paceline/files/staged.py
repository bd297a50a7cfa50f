"""The folders of staged assets and their state; `paceline.staging` fills them.

A stage folder contains one folder per asset, `NAME-KEY`, which recipes may share:

manifest.json  size and SHA-256 of every file, written last; damaged.json if a file is wrong
content/       the files
partial/       incomplete files
lock           the process that is staging the asset

`hub` and `repositories` link to them by hub id (`paceline.staging.hub_cache`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from paceline.core.assets import (
    HUB_KINDS,
    UNSTAGED_FOLDERS,
    Asset,
    AssetState,
    Manifest,
    asset_key,
)
from paceline.core.errors import SystemFaultError, UserError, unknown_name
from paceline.files.documents import read_value
from paceline.files.home import home_path
from paceline.files.recipe import Recipe
from paceline.files.yaml_file import validate

STAGE_VARIABLE = "PACELINE_STAGE"
MANIFEST_FILE = "manifest.json"
DAMAGED_FILE = "damaged.json"
"""Name of an asset's manifest after a file did not match it."""
CONTENT_FOLDER = "content"
PARTIAL_FOLDER = "partial"
PREFIX = "staged:"
"""Prefix of a field's value that refers to a staged file: `staged:ASSET/PATH`."""
GIT_FOLDER = ".git"
HUB_FOLDER, REPOSITORIES_FOLDER = "hub", "repositories"
"""Hub cache of a stage folder, and its links ORGANIZATION/NAME to the content of assets."""


def stage_root(option: Path | None = None) -> Path:
    """Return the folder of all staged assets: the option, else $PACELINE_STAGE, else in the home
    folder."""
    place = option or os.environ.get(STAGE_VARIABLE) or "~/.local/share/paceline/stage"
    return home_path("", str(place)).absolute()


def asset_folder(root: Path, asset: Asset, assets: Iterable[Asset]) -> Path:
    """Return the folder of an asset of a recipe."""
    by_name = {other.name: other for other in assets}
    return root / f"{asset.name}-{asset_key(asset, by_name)}"


def hub_id(asset: Asset) -> str | None:
    """Return the id under which programs find an asset in the hub cache; None without one."""
    return asset.source if asset.kind in HUB_KINDS else asset.hub_id


def hub_environment(root: Path | None = None) -> dict[str, str]:
    """Return the variables with which programs load staged models by their hub ids, offline."""
    return {"HF_HUB_CACHE": str(stage_root(root) / HUB_FOLDER), "HF_HUB_OFFLINE": "1"}


def staged_repository(name: str, root: Path | None = None) -> Path | None:
    """Return the path with the files of a staged model or data set that ends in its hub id.

    None if it is not staged.
    """
    path = stage_root(root) / REPOSITORIES_FOLDER / name
    return path if path.is_dir() and asset_state(path.resolve().parent) == "staged" else None


def asset_state(folder: Path) -> AssetState:
    """Return the state of an asset from its manifest and file sizes, without hashing."""
    if not (folder / MANIFEST_FILE).is_file():
        if (folder / DAMAGED_FILE).is_file():
            return "damaged"
        has_files = any((folder / name).exists() for name in (PARTIAL_FOLDER, CONTENT_FOLDER))
        return "partial" if has_files else "missing"
    manifest = read_manifest(folder)
    if manifest is None:
        return "damaged"
    sizes = content_sizes(folder / CONTENT_FOLDER)
    # Additional files, such as caches of programs, are harmless.
    whole = all(sizes.get(file.path) == file.bytes for file in manifest.files)
    return "staged" if whole else "damaged"


def content_sizes(content: Path) -> dict[str, int]:
    """Return the bytes of every file by its path inside `content`, except caches of git and
    Python."""
    sizes: dict[str, int] = {}
    for folder, names, files in os.walk(content):
        names[:] = [name for name in names if name not in UNSTAGED_FOLDERS]
        for name in files:
            path = Path(folder) / name
            # A submodule's .git is a file with the path of a folder on this machine.
            if name != GIT_FOLDER:
                # Another process may move the folder meanwhile.
                with suppress(FileNotFoundError):
                    sizes[path.relative_to(content).as_posix()] = path.lstat().st_size
    return sizes


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of an asset's folder, None if there is no readable one."""
    try:
        return read_value(folder / MANIFEST_FILE, Manifest)
    except (UserError, SystemFaultError):
        return None


def staged_path(recipe: Recipe, name: str, root: Path | None = None) -> Path:
    """Return the folder with the files of the recipe's asset `name`.

    Raises UserError if the recipe has no such asset, or if it is not staged.
    """
    root = stage_root(root)
    names = [asset.name for asset in recipe.assets]
    if name not in names:
        raise unknown_name(
            f"{recipe.name}: asset {name!r}",
            "is not declared",
            name,
            names,
            if_none="this recipe declares none",
        )
    if problem := staging_error(recipe, [name], root):
        raise problem
    asset = recipe.assets[names.index(name)]
    return asset_folder(root, asset, recipe.assets) / CONTENT_FOLDER


def staging_error(
    recipe: Recipe, names: Iterable[str], root: Path | None = None
) -> UserError | None:
    """Return the error about assets of the recipe that are not staged, None if all are."""
    root = stage_root(root)
    states = {
        asset.name: asset_state(asset_folder(root, asset, recipe.assets))
        for asset in recipe.assets
        if asset.name in set(names)
    }
    not_staged = [f"{name} is {state}" for name, state in states.items() if state != "staged"]
    if not not_staged:
        return None
    missing = [name for name, state in states.items() if state != "staged"]
    everything = len(missing) == len(recipe.assets)
    only = "" if everything else "".join(f" --asset {name}" for name in missing)
    return UserError(
        f"{recipe.name}: staged in {root}",
        ", ".join(not_staged),
        remedy=f"`paceline recipes stage {recipe.name}{only}` fetches missing files"
        f" (${STAGE_VARIABLE} sets the folder)",
    )


def with_staged_files(recipe: Recipe, root: Path | None = None) -> Recipe:
    """Return the recipe with every `staged:ASSET/PATH` replaced by its absolute path.

    Raises UserError if an asset is not staged.
    """
    content = _content(recipe)
    names = staged_names(recipe)
    if not names:
        return recipe
    if problem := staging_error(recipe, names, root):
        raise problem  # with all of them, not only the first
    with_paths = cast(dict[str, Any], _with_paths(content, recipe, root))
    updates = {name: value for name, value in with_paths.items() if value != content[name]}
    whole = {**recipe.model_dump(mode="json", exclude_unset=True), **updates}
    return validate(Recipe, whole, recipe.name)


def staged_names(recipe: Recipe) -> list[str]:
    """Return the names of the assets that fields of the recipe refer to by `staged:`."""
    return sorted(set(_staged_names(_content(recipe))))


def _content(recipe: Recipe) -> dict[str, Any]:
    return recipe.model_dump(mode="json", exclude={"assets", "variants"})


def _staged_names(value: object) -> Iterable[str]:
    if isinstance(value, str) and value.startswith(PREFIX):
        yield value.removeprefix(PREFIX).partition("/")[0]
    elif isinstance(value, dict | list):
        inner = cast(Iterable[object], value.values() if isinstance(value, dict) else value)
        for part in inner:
            yield from _staged_names(part)


def _with_paths(value: object, recipe: Recipe, root: Path | None) -> object:
    if isinstance(value, dict):
        items = cast(dict[str, object], value).items()
        return {name: _with_paths(part, recipe, root) for name, part in items}
    if isinstance(value, list):
        return [_with_paths(part, recipe, root) for part in cast(list[object], value)]
    if not isinstance(value, str) or not value.startswith(PREFIX):
        return value
    name, _, path = value.removeprefix(PREFIX).partition("/")
    return str(staged_path(recipe, name, root) / path)
