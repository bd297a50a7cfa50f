"""Inputs of a run, recorded in its folder before it starts."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from paceline.core.assets import Manifest, RunInput, RunInputs, StagedFile, content_digest
from paceline.core.run import RunSpec
from paceline.files.documents import open_regular
from paceline.files.staged import CONTENT_FOLDER, content_sizes, read_manifest

INPUTS_FILE = "inputs.json"
"""File of a run folder that lists the run's inputs, if it has any."""
DIGEST_LIMIT_BYTES = 1 << 26
"""Maximum size of an input without a manifest that is hashed; larger ones are compared by size."""
_OF_FILES = ("data", "training", "checkpoint", "engine_settings")
"""Parts of a run's settings that contain paths."""
INDEXED = (".bin", ".idx")
"""Suffixes of the files of an indexed data set, which is given by their common prefix."""


def find_run_inputs(spec: RunSpec, texts: Mapping[str, Path]) -> RunInputs | None:
    """Return the files that a run's settings and `texts` (by field) refer to on this machine.

    None if there are none. Staged assets are described by their manifests and not read again.
    """
    content = {} if spec.bare else spec.model_dump(mode="json", include=set(_OF_FILES))
    paths = [*_paths(content, ""), *((name, str(path)) for name, path in texts.items())]
    manifests: dict[str, Manifest] = {}
    inputs: list[RunInput] = []
    for field, path in dict.fromkeys(paths):
        if files := _files(Path(path)):
            inputs.append(_input(field, Path(path), files, manifests))
    return RunInputs(inputs=tuple(inputs), manifests=tuple(manifests.values())) if inputs else None


def find_input(field: str, path: Path) -> RunInput | None:
    """Return the input at a path as `find_run_inputs` would, None if there is none."""
    files = _files(path)
    return _input(field, path, files, {}) if files else None


def _paths(value: object, field: str) -> Iterator[tuple[str, str]]:
    """Yield (field, path) for each absolute path in the settings."""
    if isinstance(value, Mapping):
        for name, part in cast(Mapping[str, Any], value).items():
            yield from _paths(part, f"{field}.{name}" if field else name)
    elif isinstance(value, list):
        for at, part in enumerate(cast(Sequence[Any], value)):
            yield from _paths(part, f"{field}.{at}")
    elif isinstance(value, str) and os.path.isabs(value):  # noqa: PTH117
        yield field, value


def _files(path: Path) -> dict[Path, int]:
    """Return the files that a path refers to, with their sizes in bytes."""
    if path.is_dir():
        return {path / name: size for name, size in sorted(content_sizes(path).items())}
    several = [path.with_name(path.name + suffix) for suffix in INDEXED]
    files = [path] if path.is_file() else [file for file in several if file.is_file()]
    return {file: file.stat().st_size for file in files}


def _input(
    field: str, path: Path, files: Mapping[Path, int], manifests: dict[str, Manifest]
) -> RunInput:
    total = sum(files.values())
    content = next((p for p in (path, *path.parents) if p.name == CONTENT_FOLDER), None)
    manifest = read_manifest(content.parent) if content else None
    if content is None or manifest is None:
        digest = _digest(path, files) if total <= DIGEST_LIMIT_BYTES else None
        return RunInput(field=field, path=str(path), files=len(files), bytes=total, sha256=digest)
    manifests[manifest.sha256] = manifest
    by_path = {file.path: file for file in manifest.files}
    staged_files = {file: by_path.get(file.relative_to(content).as_posix()) for file in files}
    digests = {
        file: staged_file.sha256
        for file, staged_file in staged_files.items()
        if staged_file is not None
    }
    return RunInput(
        field=field,
        path=str(path),
        asset=manifest.asset.name,
        inside=path.relative_to(content).as_posix().removeprefix("."),
        revision=manifest.revision,
        files=len(files),
        bytes=sum(
            staged_file.bytes if staged_file else files[file]
            for file, staged_file in staged_files.items()
        ),
        sha256=_combined_digest(path, digests) if len(digests) == len(files) else None,
    )


def _digest(path: Path, files: Iterable[Path]) -> str | None:
    """Return the SHA-256 of the files at `path`, None if one cannot be read."""
    digests: dict[Path, str] = {}
    for file in files:
        try:
            with open_regular(file) as content:
                digests[file] = hashlib.file_digest(content, "sha256").hexdigest()
        except OSError:
            return None
    return _combined_digest(path, digests)


def _combined_digest(path: Path, digests: Mapping[Path, str]) -> str:
    """Combine the files' digests and relative names into one digest, independent of the
    location."""
    if len(digests) == 1:
        return next(iter(digests.values()))
    folder = path if path.is_dir() else path.parent
    return content_digest(
        StagedFile.model_construct(path=file.relative_to(folder).as_posix(), bytes=0, sha256=sha256)
        for file, sha256 in digests.items()
    )
