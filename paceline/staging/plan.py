"""Assets that a recipe needs, and how much of each is present; no network access."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.core.assets import LAYOUT, Asset, AssetState
from paceline.core.errors import SystemFaultError, unknown_name
from paceline.core.units import pluralize, si, verb_form
from paceline.files.recipe import Recipe
from paceline.files.staged import (
    CONTENT_FOLDER,
    PARTIAL_FOLDER,
    asset_folder,
    asset_state,
    content_sizes,
    read_manifest,
)
from paceline.staging.converters import can_resume
from paceline.staging.transfer import TAG_SUFFIX

COMPLETE_FOLDER, UNDERWAY_FOLDER = "complete", "underway"
"""Folders of complete and of partial files, inside the folder of a partial asset."""
FILES_PER_ASSET = 6
"""Number of inodes that each asset needs in addition to its content.

They are the asset's folder, its partial folder with two folders inside, the lock and the manifest.
"""


@dataclass(frozen=True)
class PlannedAsset:
    """Asset with its folder and the amount that is missing."""

    asset: Asset
    folder: Path
    state: AssetState
    total_bytes: int | None
    """Size of the asset in bytes; None if it is unknown."""
    present_bytes: int
    total_files: int | None = None
    """Number of files of the asset; None if it is unknown."""
    present_files: int = 0

    @property
    def missing_bytes(self) -> int | None:
        """Bytes that are missing; None if the number is unknown."""
        if self.state == "staged":
            return 0
        if self.total_bytes is None:
            return 0 if self.asset.source == LAYOUT and self.asset.kind == "made" else None
        return max(0, self.total_bytes - self.present_bytes)

    @property
    def missing_files(self) -> int | None:
        """Number of missing files; None if it is unknown."""
        if self.state == "staged":
            return 0
        return None if self.total_files is None else max(0, self.total_files - self.present_files)


@dataclass(frozen=True)
class StagingPlan:
    """Assets that a recipe needs for an engine, each after the assets that it is made from."""

    recipe: Recipe
    engine: str | None
    root: Path
    assets: tuple[PlannedAsset, ...]

    @property
    def bytes_needed(self) -> int:
        """Missing bytes of the assets whose size is known."""
        return sum(part.missing_bytes or 0 for part in self.assets)

    @property
    def files_needed(self) -> int:
        """Number of missing listed files, plus the inodes of every asset that is not started."""
        overhead = sum(FILES_PER_ASSET for part in self.assets if part.state == "missing")
        return overhead + sum(part.missing_files or 0 for part in self.assets)

    @property
    def bytes_fetched(self) -> int:
        """Missing bytes that must be downloaded; made assets need only disk space."""
        return sum(part.missing_bytes or 0 for part in self.assets if part.asset.kind != "made")

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names of the missing assets of unknown size."""
        return tuple(part.asset.name for part in self.assets if part.missing_bytes is None)


def staging_plan(
    recipe: Recipe, engine: str | None, root: Path, names: Sequence[str] = ()
) -> StagingPlan:
    """Return the plan of all assets that `recipe` needs for `engine`, or of those in `names`.

    Assets that these are made from are included. With `engine` None the plan covers all engines.
    Raises UserError for a name that the recipe does not declare.
    """
    assets = _select_assets(recipe, engine, names)
    parts = [_plan_asset(recipe, asset, root) for asset in _in_dependency_order(assets)]
    return StagingPlan(recipe, engine, root, tuple(parts))


def _select_assets(recipe: Recipe, engine: str | None, names: Sequence[str]) -> list[Asset]:
    by_name = {asset.name: asset for asset in recipe.assets}
    for name in names:
        if name not in by_name:
            raise unknown_name(
                f"{recipe.name}: asset {name!r}", "is not declared", name, by_name, if_none="none"
            )
    queue = [
        asset
        for asset in recipe.assets
        if (asset.name in names if names else _is_for(asset, engine))
    ]
    selection: dict[str, Asset] = {}
    while queue:
        asset = queue.pop(0)
        if asset.name not in selection:
            selection[asset.name] = asset
            queue += [by_name[name] for name in asset.needs]
    return list(selection.values())


def _is_for(asset: Asset, engine: str | None) -> bool:
    return engine is None or not asset.engines or engine in asset.engines


def _in_dependency_order(assets: Sequence[Asset]) -> list[Asset]:
    """Return the assets in declared order, with each after the assets that it needs."""
    result: list[Asset] = []
    remaining = list(assets)
    while remaining:
        names = {asset.name for asset in result}
        ready = next(asset for asset in remaining if names.issuperset(asset.needs))
        result.append(ready)
        remaining.remove(ready)
    return result


def _plan_asset(recipe: Recipe, asset: Asset, root: Path) -> PlannedAsset:
    folder = asset_folder(root, asset, recipe.assets)
    state = asset_state(folder)
    manifest = read_manifest(folder) if state == "staged" else None
    if manifest:
        size, count = manifest.bytes, len(manifest.files)
        return PlannedAsset(
            asset=asset,
            folder=folder,
            state=state,
            total_bytes=size,
            present_bytes=size,
            total_files=count,
            present_files=count,
        )
    # Cloned, pulled and made assets start again almost from nothing.
    keeps_partial = asset.kind not in ("git", "container", "made") or can_resume(asset)
    sizes = _resumed_sizes(folder) if keeps_partial else []
    return PlannedAsset(
        asset=asset,
        folder=folder,
        state=state,
        total_bytes=_stated_bytes(asset),
        present_bytes=sum(sizes),
        total_files=len(asset.files) or None,
        present_files=len(sizes),
    )


def _resumed_sizes(folder: Path) -> list[int]:
    """Return the sizes of the files that staging resumes from, in bytes.

    An existing content folder replaces the folder of complete files.
    """
    partial, content = folder / PARTIAL_FOLDER, folder / CONTENT_FOLDER
    complete = content if content.is_dir() else partial / COMPLETE_FOLDER
    return [
        size
        for place in (complete, partial / UNDERWAY_FOLDER)
        for name, size in content_sizes(place).items()
        if place is complete or not name.endswith(TAG_SUFFIX)
    ]


def _stated_bytes(asset: Asset) -> int | None:
    sizes = [file.bytes for file in asset.files]
    if asset.bytes is None and sizes and None not in sizes:
        return sum(size or 0 for size in sizes)
    return asset.bytes


REMEDY = "free some space, or choose another folder with --to"


@dataclass(frozen=True)
class DiskSpace:
    """Free space of a stage folder."""

    bytes_free: int
    """Bytes that this user may still write to the disk."""
    files_free: int | None
    """Free inodes; None if the file system has no limit."""


def disk_space(folder: Path) -> DiskSpace:
    """Return the free space of a folder, which does not need to exist yet."""
    disk = os.statvfs(next(path for path in (folder, *folder.parents) if path.exists()))
    return DiskSpace(disk.f_bavail * disk.f_frsize, disk.f_favail if disk.f_files else None)


def space_shortage(plan: StagingPlan, space: DiskSpace, largest_file: int = 0) -> str | None:
    """Return why the missing assets of known size do not fit on the disk; None if they do."""
    files, free = plan.files_needed, space.files_free
    if plan.bytes_needed > space.bytes_free:
        return f"needs {si(plan.bytes_needed, 'B')}, but only {si(space.bytes_free, 'B')} are free"
    if free is not None and files > free:
        free_inodes = f"{free:,} {verb_form(free, 'are')} free"
        return f"needs {pluralize(files, 'inode')}, but only {free_inodes}"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and largest_file > limit:
        allowed = f"`ulimit -f` allows only {si(limit, 'B')}"
        return f"needs a file of {si(largest_file, 'B')}, but {allowed}"
    return None


def require_space(plan: StagingPlan, space: DiskSpace, largest_file: int = 0) -> None:
    """Raise SystemFaultError if the missing assets do not fit on the disk."""
    if shortage := space_shortage(plan, space, largest_file):
        raise SystemFaultError(str(plan.root), shortage, remedy=REMEDY)
