"""Staged files held against their manifest: every byte is read again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.core.assets import Manifest
from paceline.files.staged import (
    CONTENT_FOLDER,
    DAMAGED_FILE,
    MANIFEST_FILE,
    content_sizes,
    read_manifest,
)
from paceline.staging.transfer import hashed

Fault = Literal["missing", "extra", "changed", "unreadable"]


@dataclass(frozen=True)
class StageFault:
    """One file that is not as it was staged."""

    asset: str
    path: str
    fault: Fault


def verify(folder: Path, name: str, check: Callable[[], None] = lambda: None) -> list[StageFault]:
    """Every file of a staged asset that is missing, extra or changed; all are read.

    A changed one makes the asset damaged, so that no run takes it and staging mends it.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return [StageFault(name, MANIFEST_FILE, "missing")]
    faults = [
        StageFault(name, path, fault) for path, fault in _faults(folder, manifest, check).items()
    ]
    if faults:
        (folder / MANIFEST_FILE).replace(folder / DAMAGED_FILE)
    return faults


def _faults(folder: Path, manifest: Manifest, check: Callable[[], None]) -> dict[str, Fault]:
    content = folder / CONTENT_FOLDER
    sizes = content_sizes(content)
    faults: dict[str, Fault] = {}
    for file in manifest.files:
        if file.path not in sizes:
            faults[file.path] = "missing"
            continue
        try:
            same = sizes[file.path] == file.bytes and file.sha256 == file_digest(
                content / file.path, check
            )
        except OSError:
            faults[file.path] = "unreadable"
            continue
        if not same:
            faults[file.path] = "changed"
    stated = {file.path for file in manifest.files}
    return {**faults, **{path: "extra" for path in sorted(sizes) if path not in stated}}


def file_digest(path: Path, check: Callable[[], None] = lambda: None) -> str:
    """SHA-256 of a file's content, of a link's target as it is written."""
    if path.is_symlink():
        return hashlib.sha256(str(path.readlink()).encode()).hexdigest()
    return hashed(path, check)
