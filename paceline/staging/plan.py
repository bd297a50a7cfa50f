"""What a recipe needs, what of it is here and what is to come: nothing is asked or fetched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.core.assets import Asset, AssetState
from paceline.core.errors import UserError, did_you_mean
from paceline.files.recipe import Recipe
from paceline.files.staged import (
    CONTENT_FOLDER,
    PARTIAL_FOLDER,
    asset_folder,
    asset_state,
    content_sizes,
    read_manifest,
)
from paceline.staging.converters import is_resumed
from paceline.staging.transfer import TAG_ENDING

DONE_FOLDER, UNDERWAY_FOLDER = "done", "underway"
"""Inside the folder of what is not whole: whole files, and those of which more must come."""
OWN_FILES = 6
"""An asset's folder, the one of what is not whole, the two inside it, the lock and the manifest."""


@dataclass(frozen=True)
class PlannedAsset:
    """An asset, where it lies or will lie, and how much of it is to come."""

    asset: Asset
    folder: Path
    state: AssetState
    total_bytes: int | None
    """None is unknown."""
    here_bytes: int
    total_files: int | None = None
    """None is unknown."""
    here_files: int = 0

    @property
    def left_bytes(self) -> int | None:
        """Bytes that have to come; None is unknown."""
        if self.state == "staged":
            return 0
        return None if self.total_bytes is None else max(0, self.total_bytes - self.here_bytes)

    @property
    def left_files(self) -> int | None:
        """Files that have to come; None is unknown."""
        if self.state == "staged":
            return 0
        return None if self.total_files is None else max(0, self.total_files - self.here_files)


@dataclass(frozen=True)
class StagingPlan:
    """All assets that a recipe needs for an engine, each after those that it is made of."""

    recipe: Recipe
    engine: str | None
    root: Path
    assets: tuple[PlannedAsset, ...]

    @property
    def bytes_needed(self) -> int:
        """Bytes that have to come, of those assets whose size is known."""
        return sum(part.left_bytes or 0 for part in self.assets)

    @property
    def files_needed(self) -> int:
        """Files that have to come, where they are listed, and what every asset begins with."""
        begun = sum(OWN_FILES for part in self.assets if part.state == "missing")
        return begun + sum(part.left_files or 0 for part in self.assets)

    @property
    def bytes_fetched(self) -> int:
        """Those of them that come from elsewhere; what is made takes room alone."""
        return sum(part.left_bytes or 0 for part in self.assets if part.asset.kind != "made")

    @property
    def unknown(self) -> tuple[str, ...]:
        """Assets that have to come and whose size no source states."""
        return tuple(part.asset.name for part in self.assets if part.left_bytes is None)


def staging_plan(
    recipe: Recipe, engine: str | None, root: Path, names: Sequence[str] = ()
) -> StagingPlan:
    """What `recipe` needs for `engine` (None: for any), or those assets alone that are named.

    Raises UserError for a name that is none of the recipe's.
    """
    chosen = _chosen(recipe, engine, names)
    parts = [_planned(recipe, asset, root) for asset in _ordered(chosen)]
    return StagingPlan(recipe, engine, root, tuple(parts))


def _chosen(recipe: Recipe, engine: str | None, names: Sequence[str]) -> list[Asset]:
    by_name = {asset.name: asset for asset in recipe.assets}
    for name in names:
        if name not in by_name:
            raise UserError(
                f"{recipe.name}: asset {name!r}",
                "is not declared",
                allowed=", ".join(by_name) or "this recipe declares none",
                remedy=did_you_mean(name, by_name) or None,
            )
    asked = [
        asset
        for asset in recipe.assets
        if (asset.name in names if names else _is_for(asset, engine))
    ]
    needed: dict[str, Asset] = {}
    while asked:
        asset = asked.pop(0)
        if asset.name not in needed:
            needed[asset.name] = asset
            asked += [by_name[name] for name in asset.needs]
    return list(needed.values())


def _is_for(asset: Asset, engine: str | None) -> bool:
    return engine is None or not asset.engines or engine in asset.engines


def _ordered(assets: Sequence[Asset]) -> list[Asset]:
    """Each after those that it needs, else as declared."""
    ordered: list[Asset] = []
    left = list(assets)
    while left:
        done = {asset.name for asset in ordered}
        ready = next(asset for asset in left if done.issuperset(asset.needs))
        ordered.append(ready)
        left.remove(ready)
    return ordered


def _planned(recipe: Recipe, asset: Asset, root: Path) -> PlannedAsset:
    folder = asset_folder(root, asset, recipe.assets)
    state = asset_state(folder)
    manifest = read_manifest(folder) if state == "staged" else None
    if manifest:
        size, count = manifest.bytes, len(manifest.files)
        return PlannedAsset(asset, folder, state, size, size, count, count)
    # Of what is cloned or made almost nothing is used again.
    resumed = asset.kind not in ("git", "container", "made") or is_resumed(asset)
    sizes = _resumed_sizes(folder) if resumed else []
    return PlannedAsset(
        asset, folder, state, _stated_bytes(asset), sum(sizes), len(asset.files) or None, len(sizes)
    )


def _resumed_sizes(folder: Path) -> list[int]:
    """Of files from which a staging goes on: whole content is used before what else had come."""
    partial, content = folder / PARTIAL_FOLDER, folder / CONTENT_FOLDER
    whole = content if content.is_dir() else partial / DONE_FOLDER
    return [
        size
        for place in (whole, partial / UNDERWAY_FOLDER)
        for name, size in content_sizes(place).items()
        if place is whole or not name.endswith(TAG_ENDING)
    ]


def _stated_bytes(asset: Asset) -> int | None:
    sizes = [file.bytes for file in asset.files]
    if asset.bytes is None and sizes and None not in sizes:
        return sum(size or 0 for size in sizes)
    return asset.bytes
