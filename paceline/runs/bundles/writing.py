"""Writing of a run folder as one archive, reproducible byte for byte and without secrets."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from paceline.core.assets import StagedFile, content_digest, plain_path
from paceline.core.bundle import Bundle, LeftOut
from paceline.core.errors import SystemFaultError, UserError
from paceline.core.result import FINAL
from paceline.core.secrets import is_number, redact
from paceline.files.archive import ArchivedFile, write_archive
from paceline.files.documents import LARGEST_BYTES, open_regular, parse_json, text_blocks
from paceline.files.run_folder import RunRecord, current_status, read_record
from paceline.runs.bundles.signature import sign, signature_file
from paceline.runs.checkpoints import CHECKPOINTS_FOLDER

BUNDLE_FILE = "bundle.json"
BUNDLE_SUFFIX = ".bundle.tar.gz"
_BLOCK_BYTES = 1 << 22
_STATES = ("*.pt", "*.distcp", "*.safetensors")
"""File patterns of model states, which are large and not needed for any figure."""


@dataclass(frozen=True)
class _Part:
    """File of the run folder as written to the bundle."""

    file: StagedFile
    redacted: bool


def write_bundle(
    folder: Path, target: Path | None = None, key: Path | None = None
) -> tuple[Path, Bundle]:
    """Write a run's folder as one archive.

    Without a `target` it is `RUN.bundle.tar.gz` in the current folder. Checkpoints, links and
    hidden files are left out; the bundle lists the first two. Secrets are detected by their form
    and from this environment, and are replaced. An SSH `key` signs the bundle in a file next to it.
    Raises UserError if the run has not ended, a target exists or the key cannot sign, and
    SystemFaultError if a file cannot be read or written.
    """
    record = _finished(folder)
    target = target or Path(f"{folder.name}{BUNDLE_SUFFIX}")
    parts: list[_Part] = []
    left_out: list[LeftOut] = []
    for path in _paths(folder):
        name = path.relative_to(folder).as_posix()
        if why := _exclusion_reason(path, name):
            left_out.append(LeftOut(path=_printable(name), why=why))
        elif name != BUNDLE_FILE:
            part = _read_part(path, name)
            if part.redacted and _is_broken(path):
                left_out.append(LeftOut(path=name, why="not valid JSON after redaction"))
            else:
                parts.append(part)
    files = tuple(part.file for part in parts)
    bundle = Bundle(
        run=folder.name,
        created=record.created,
        status=current_status(record),
        paceline_version=record.paceline_version,
        sha256=content_digest(files),
        files=files,
        redacted=tuple(part.file.path for part in parts if part.redacted),
        left_out=tuple(left_out),
    )
    text = bundle.model_dump_json(indent=2) + "\n"
    signature = sign(text, key) if key else None
    if signature and signature_file(target).exists():
        raise UserError(str(signature_file(target)), "exists", remedy="remove it")
    write_archive(target, _members(folder, bundle, text.encode()))
    if signature:
        try:
            with signature_file(target).open("x") as file:
                file.write(signature)
        except OSError as error:
            where = str(signature_file(target))
            raise SystemFaultError(where, f"cannot be written: {error.strerror}") from error
    return target, bundle


def _finished(folder: Path) -> RunRecord:
    record = read_record(folder)
    status = current_status(record)
    if status not in FINAL and status != "incomplete":
        raise UserError(str(folder), f"the run is {status}", remedy="wait until it has ended")
    return record


def _paths(folder: Path) -> Iterator[Path]:
    """Yield files and links in order of their paths, without hidden ones, which stay private."""
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not hidden and (path.is_symlink() or not path.is_dir()):
            yield path


def _exclusion_reason(path: Path, name: str) -> str | None:
    """Return why a file is left out; None if it is included."""
    if path.is_symlink():
        return "a link"
    if not path.is_file():
        return "not a regular file"
    if name.partition("/")[0] == CHECKPOINTS_FOLDER or any(map(path.match, _STATES)):
        return "a checkpoint"
    try:
        plain_path(name)
    except ValueError as error:
        return f"its path {error}"
    return None


def _read_part(path: Path, name: str) -> _Part:
    clean_digest, raw_digest, size = hashlib.sha256(), hashlib.sha256(), 0
    for raw, clean in _blocks(path):
        raw_digest.update(raw)
        clean_digest.update(clean)
        size += len(clean)
    file = StagedFile(path=name, bytes=size, sha256=clean_digest.hexdigest())
    return _Part(file, clean_digest.digest() != raw_digest.digest())


def _is_broken(path: Path) -> bool:
    """Return whether the removal of secrets makes a JSON document or a JSON line invalid."""
    if path.suffix == ".jsonl":
        return any(
            sum(map(_is_json, clean.splitlines())) < sum(map(_is_json, raw.splitlines()))
            for raw, clean in _blocks(path)
            if raw != clean
        )
    if path.suffix != ".json" or path.stat().st_size > LARGEST_BYTES:
        return False
    raw, clean = (b"".join(blocks) for blocks in zip(*_blocks(path), strict=True))
    return _is_json(raw) and not _is_json(clean)


def _is_json(content: bytes) -> bool:
    try:
        parse_json(content.decode())
    except ValueError:
        return False
    return True


def _blocks(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Yield blocks of complete lines of a file, unchanged and without secrets; numbers stay."""
    environment = {name: value for name, value in os.environ.items() if not is_number(value)}
    try:
        with open_regular(path) as file:
            for block in text_blocks(file, _BLOCK_BYTES):
                text = block.decode("utf-8", "surrogateescape")
                yield block, redact(text, environment).encode("utf-8", "surrogateescape")
    except OSError as error:
        raise SystemFaultError(str(path), f"cannot be read: {error.strerror}") from error


def _members(folder: Path, bundle: Bundle, text: bytes) -> Iterator[ArchivedFile]:
    yield ArchivedFile(f"{bundle.run}/{BUNDLE_FILE}", len(text), lambda: BytesIO(text))
    for file in bundle.files:
        path, clean = folder / file.path, file.path in bundle.redacted
        content = partial(_without_secrets if clean else open_regular, path)
        yield ArchivedFile(f"{bundle.run}/{file.path}", file.bytes, content)


def _without_secrets(path: Path) -> IO[bytes]:
    copy = TemporaryFile()  # noqa: SIM115 (the writer of the archive closes it)
    copy.writelines(clean for _, clean in _blocks(path))
    copy.seek(0)
    return copy


def _printable(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode()
