"""Files of several assets in one folder, laid out as a program wants them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from paceline.core.assets import plain_path
from paceline.core.errors import UserError

WHERE = "made asset folder: settings"
COPY_BYTES = 1 << 24


def make_folder(
    folder: Path,
    inputs: Mapping[str, Path],
    layout: Mapping[str, object],
    check: Callable[[], None],
) -> None:
    """Make `folder` from hard links to the files of other assets.

    `layout` maps a place to `ASSET` or `ASSET/PATTERN`. A place that ends in `/` takes all matching
    files; any other place is one file, joined from all matches in order of their names. Parts of a
    joined file appear in no other place. Raises UserError for a pattern without a match.
    """
    matches_by_place = {place: _matches(inputs, str(source)) for place, source in layout.items()}
    part_files = {
        path
        for place, matches in matches_by_place.items()
        if not place.endswith("/") and len(matches) > 1
        for _, path in matches
    }
    for place, matches in matches_by_place.items():
        if not place.endswith("/"):
            _join([path for _, path in matches], folder / _inner(place), check)
            continue
        names = [name for name, path in matches if path not in part_files]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UserError(f"{WHERE} {place!r}", f"two files would have the name {twice}")
        base = folder if place == "./" else folder / _inner(place.rstrip("/"))
        for name, path in matches:
            check()
            if path not in part_files:
                _link(path, base / name)


def _inner(place: str) -> str:
    try:
        return plain_path(place)
    except ValueError as error:
        raise UserError(f"{WHERE} {place!r}", str(error)) from error


def _matches(inputs: Mapping[str, Path], source: str) -> list[tuple[str, Path]]:
    """Return the matching files with their names at the new place, sorted."""
    asset, _, pattern = source.partition("/")
    if asset not in inputs:
        raise UserError(
            f"{WHERE} {source!r}", f"{asset} is not in needs", allowed=", ".join(inputs)
        )
    root = inputs[asset]
    tops = sorted(root.glob(_inner(pattern))) if pattern else [root]
    files: list[tuple[str, Path]] = []
    for top in tops:
        if top.is_dir():
            files += [(file.relative_to(top).as_posix(), file) for file in _files(top)]
        else:
            files.append((top.name, top))
    if not files:
        raise UserError(f"{asset} in {root}", f"has no file {pattern or '*'}")
    return files


def _files(top: Path) -> Iterator[Path]:
    return (file for file in sorted(top.rglob("*")) if file.is_file() and ".git" not in file.parts)


def _link(path: Path, place: Path) -> None:
    """Make a hard link, which containers can read too, or a copy on a file system without them."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    try:
        os.link(path.resolve(), place)
    except OSError:
        shutil.copy2(path, place)


def _join(paths: list[Path], place: Path, check: Callable[[], None]) -> None:
    if len(paths) == 1:
        _link(paths[0], place)
        return
    size = sum(path.stat().st_size for path in paths)
    if place.is_file() and place.stat().st_size == size:
        return  # An interrupted call has finished this file.
    place.parent.mkdir(parents=True, exist_ok=True)
    part = place.with_name(f"{place.name}.part")
    with part.open("wb") as target:
        for path in paths:
            with path.open("rb") as source:
                while block := source.read(COPY_BYTES):
                    check()
                    target.write(block)
    part.replace(place)
