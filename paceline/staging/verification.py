"""Staged files held against their manifest: every byte is read again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.core.assets import StagedFile
from paceline.files.staged import (
    CONTENT_FOLDER,
    DAMAGED_FILE,
    MANIFEST_FILE,
    content_sizes,
    read_manifest,
)

BLOCK_BYTES = 1 << 20

Fault = Literal["missing", "extra", "changed", "unreadable"]


@dataclass(frozen=True)
class StageFault:
    """One file that is not as it was staged."""

    asset: str
    path: str
    fault: Fault


def verify(folder: Path, name: str, jobs: int = 1) -> list[StageFault]:
    """Every file of a staged asset that is missing, extra or changed; all are read, `jobs` at once.

    What is not as it was staged makes the asset damaged: no run takes it, and staging mends it. In
    a folder that this user may not write it stays as it is, and the faults alone tell.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return [StageFault(name, MANIFEST_FILE, "missing")]
    content = folder / CONTENT_FOLDER
    present = content_sizes(content)
    with ThreadPoolExecutor(jobs, "verify") as pool:
        seen: list[Fault | None] = list(
            pool.map(lambda file: _fault(content, file, present), manifest.files)
        )
    faults = [
        StageFault(name, file.path, fault)
        for file, fault in zip(manifest.files, seen, strict=True)
        if fault
    ]
    stated = {file.path for file in manifest.files}
    faults += [StageFault(name, path, "extra") for path in sorted(present) if path not in stated]
    # Another stager may have mended it meanwhile; a folder that is only read cannot be marked.
    if faults and read_manifest(folder) == manifest:
        with suppress(OSError):
            (folder / MANIFEST_FILE).replace(folder / DAMAGED_FILE)
    return faults


def _fault(content: Path, file: StagedFile, present: Mapping[str, int]) -> Fault | None:
    """What is wrong with one file; one of another size is not read."""
    if file.path not in present:
        return "missing"
    try:
        same = present[file.path] == file.bytes and file.sha256 == file_digest(content / file.path)
    except OSError:
        return "unreadable"
    return None if same else "changed"


def file_digest(path: Path, check: Callable[[], None] = lambda: None) -> str:
    """Return the SHA-256 of a file's content, of a link's target as it is written."""
    if path.is_symlink():
        return hashlib.sha256(str(path.readlink()).encode()).hexdigest()
    return digests_of(path, ["sha256"], check)["sha256"]


def digests_of(path: Path, names: Iterable[str], check: Callable[[], None]) -> dict[str, str]:
    """Return digests of a file by name: sha256, md5, git_sha1 (as git stores it, size first)."""
    digests: dict[str, Any] = {
        name: hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
        if name == "git_sha1"
        else hashlib.new(name, usedforsecurity=False)
        for name in names
    }
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            for digest in digests.values():
                digest.update(block)
            check()
    return {name: digest.hexdigest() for name, digest in digests.items()}
