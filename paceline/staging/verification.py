"""Verification of staged files: every byte is read again and compared with the manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.core.assets import LAYOUT, StagedFile
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
    """File that differs from the manifest."""

    asset: str
    path: str
    fault: Fault


def verify(folder: Path, name: str, jobs: int = 1) -> list[StageFault]:
    """Return the missing, extra, changed and unreadable files of a staged asset.

    All files are read, `jobs` at a time. A fault marks the asset as damaged: no run uses it, and
    staging repairs it. A folder that this user may not write to is not marked; then only the
    returned faults report it.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return [StageFault(name, MANIFEST_FILE, "missing")]
    content = folder / CONTENT_FOLDER
    present = content_sizes(content)
    with ThreadPoolExecutor(jobs, "verify") as pool:
        results: list[Fault | None] = list(
            pool.map(lambda file: _fault(content, file, present), manifest.files)
        )
    faults = [
        StageFault(name, file.path, fault)
        for file, fault in zip(manifest.files, results, strict=True)
        if fault
    ]
    expected = {file.path for file in manifest.files}
    # Programs write their results into a folder that is laid out for them.
    if (manifest.asset.kind, manifest.asset.source) != ("made", LAYOUT):
        extra = sorted(set(present) - expected)
        faults += [StageFault(name, path, "extra") for path in extra]
    # Another stager may have repaired it in the meantime; a read-only folder cannot be marked.
    if faults and read_manifest(folder) == manifest:
        with suppress(OSError):
            (folder / MANIFEST_FILE).replace(folder / DAMAGED_FILE)
    return faults


def _fault(content: Path, file: StagedFile, present: Mapping[str, int]) -> Fault | None:
    """Return the fault of one file; a file of another size is not read."""
    if file.path not in present:
        return "missing"
    try:
        same = present[file.path] == file.bytes and file.sha256 == file_digest(content / file.path)
    except OSError:
        return "unreadable"
    return None if same else "changed"


def file_digest(path: Path, check: Callable[[], None] = lambda: None) -> str:
    """Return the SHA-256 of a file's content, or of the target path of a symbolic link."""
    if path.is_symlink():
        return hashlib.sha256(str(path.readlink()).encode()).hexdigest()
    return digests_of(path, ["sha256"], check)["sha256"]


def digests_of(path: Path, names: Iterable[str], check: Callable[[], None]) -> dict[str, str]:
    """Return the requested digests of a file by name: sha256, md5, git_sha1 (of the git blob)."""
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
