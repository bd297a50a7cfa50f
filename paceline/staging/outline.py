"""What a recipe needs, what of it is here and what is to come: nothing is asked or fetched."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.core.assets import Asset, AssetState
from paceline.core.errors import SystemFaultError, UserError, did_you_mean
from paceline.core.units import si
from paceline.files.recipe import Recipe
from paceline.files.staged import (
    CONTENT_FOLDER,
    PARTIAL_FOLDER,
    asset_folder,
    asset_state,
    content_sizes,
    read_manifest,
)
from paceline.staging.makers import is_resumed

DONE_FOLDER, UNDERWAY_FOLDER = "done", "underway"
"""Inside the folder of what is not whole: whole files, and those of which more must come."""


@dataclass(frozen=True)
class OutlinedAsset:
    """An asset, where it lies or will lie, and how much of it is to come."""

    asset: Asset
    folder: Path
    state: AssetState
    total_bytes: int | None
    """None is unknown."""
    here_bytes: int

    @property
    def left_bytes(self) -> int | None:
        """Bytes that have to come; None is unknown."""
        if self.state == "staged":
            return 0
        return None if self.total_bytes is None else max(0, self.total_bytes - self.here_bytes)


@dataclass(frozen=True)
class StageOutline:
    """All assets that a recipe needs for an engine, each after those that it is made of."""

    recipe: Recipe
    engine: str | None
    root: Path
    assets: tuple[OutlinedAsset, ...]

    @property
    def bytes_needed(self) -> int:
        """Bytes that have to come, of those assets whose size is known."""
        return sum(part.left_bytes or 0 for part in self.assets)

    @property
    def bytes_fetched(self) -> int:
        """Those of them that come from elsewhere; what is made takes room alone."""
        return sum(part.left_bytes or 0 for part in self.assets if part.asset.kind != "made")

    @property
    def unknown(self) -> tuple[str, ...]:
        """Assets that have to come and whose size no source states."""
        return tuple(part.asset.name for part in self.assets if part.left_bytes is None)

    @property
    def bytes_free(self) -> int:
        """Bytes that this user may still write where it is staged."""
        return free_bytes(self.root)


def make_outline(
    recipe: Recipe, engine: str | None, root: Path, names: Sequence[str] = ()
) -> StageOutline:
    """What `recipe` needs for `engine` (None: for any), or those assets alone that are named.

    Raises UserError for a name that is none of the recipe's.
    """
    chosen = _chosen(recipe, engine, names)
    parts = [_outlined(recipe, asset, root) for asset in _ordered(chosen)]
    return StageOutline(recipe, engine, root, tuple(parts))


def refuse_without_room(outline: StageOutline, largest_file: int | None = None) -> None:
    """Raise SystemFaultError where the disk or a limit has no room for what is to come."""
    need, free = outline.bytes_needed, outline.bytes_free
    if need > free:
        raise SystemFaultError(
            str(outline.root),
            f"{si(need, 'B')} are to come and {si(free, 'B')} are free",
            remedy="make room, or give another place with --to",
        )
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if largest_file and limit != resource.RLIM_INFINITY and largest_file > limit:
        raise SystemFaultError(
            str(outline.root),
            f"a file of {si(largest_file, 'B')} is to come, none may exceed {si(limit, 'B')}",
            remedy="see `ulimit -f`",
        )


def free_bytes(folder: Path) -> int:
    """Bytes that this user may write into a folder, which need not exist yet."""
    place = next(path for path in (folder, *folder.parents) if path.exists())
    status = os.statvfs(place)
    return status.f_bavail * status.f_frsize


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


def _outlined(recipe: Recipe, asset: Asset, root: Path) -> OutlinedAsset:
    folder = asset_folder(root, asset, recipe.assets)
    state = asset_state(folder)
    manifest = read_manifest(folder) if state == "staged" else None
    if manifest:
        return OutlinedAsset(asset, folder, state, manifest.bytes, manifest.bytes)
    # Of what is cloned or made almost nothing is used again.
    resumed = asset.kind not in ("git", "container", "made") or is_resumed(asset)
    return OutlinedAsset(
        asset, folder, state, _stated_bytes(asset), _resumed_bytes(folder) if resumed else 0
    )


def _resumed_bytes(folder: Path) -> int:
    """Bytes from which a staging goes on: whole content is used before what else had come."""
    partial, content = folder / PARTIAL_FOLDER, folder / CONTENT_FOLDER
    whole = content if content.is_dir() else partial / DONE_FOLDER
    return _size(whole) + _size(partial / UNDERWAY_FOLDER)


def _stated_bytes(asset: Asset) -> int | None:
    sizes = [file.bytes for file in asset.files]
    if asset.bytes is None and sizes and None not in sizes:
        return sum(size or 0 for size in sizes)
    return asset.bytes


def _size(folder: Path) -> int:
    return sum(content_sizes(folder).values())
