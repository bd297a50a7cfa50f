"""Import of a log of another program as a run, which all commands can read."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from paceline import __version__
from paceline.core.errors import SystemFaultError, UserError
from paceline.core.run_report import RunReport
from paceline.core.secrets import redact
from paceline.core.text import as_text
from paceline.files.documents import (
    GZIP_MAGIC,
    open_expanded,
    open_regular,
    read_json,
    text_blocks,
    write_value,
)
from paceline.files.locks import exclusive
from paceline.files.run_folder import (
    LOGS_FOLDER,
    RUN_FILE,
    RunRecord,
    imported_name,
    new_folder,
    run_folders,
)
from paceline.logs.facts import UserSettings
from paceline.logs.parsed_log import ParsedLog
from paceline.logs.parser import Parsing, parse_log
from paceline.runs.flow import finish
from paceline.runs.logged_run import RUN_STATUS

BLOCK_BYTES = 1 << 22
"""Block size in which a log is searched for secrets."""


def import_log(
    path: Path,
    user_settings: UserSettings,
    root: Path,
    command: list[str],
    *,
    tag: str | None = None,
    reimport: bool = False,
) -> RunReport:
    """Store the log at `path` as a run under `root` and return its report.

    The log is copied without its secrets. Raises UserError for a log without a run, and for one
    that was imported before unless `reimport` is set; SystemFaultError when it cannot be copied.
    """
    user_settings.check()
    if not path.is_file():
        raise UserError(str(path), "is not a file", remedy="give one log file, plain or .gz")
    document = parse_run(path, user_settings).document
    digest = file_digest(path)
    with exclusive(root, f"log {digest}", wait=True):
        return _store(path, document, digest, user_settings, root, command, tag, reimport)


def _store(
    path: Path,
    document: ParsedLog,
    digest: str,
    user_settings: UserSettings,
    root: Path,
    command: list[str],
    tag: str | None,
    reimport: bool,
) -> RunReport:
    earlier = None if reimport else _imported_before(root, digest)
    if earlier is not None:
        raise UserError(
            str(path),
            f"was imported as {earlier.name}",
            remedy="--reimport imports it again",
        )
    now = datetime.now(UTC)
    folder = new_folder(root, imported_name(document.settings, _stem(path), now, tag))
    log = f"{LOGS_FOLDER}/{redact(as_text(path.name), os.environ)}"
    _copy(path, folder / log)
    record = log_record(folder.name, document, log, digest, user_settings)
    identity = {
        "tag": tag,
        "created": now.isoformat(timespec="milliseconds"),
        "command": tuple(map(as_text, command)),
    }
    write_value(folder / RUN_FILE, record.model_copy(update=identity))
    return finish(folder, root)


def parse_run(
    path: Path, user_settings: UserSettings, *, display_path: Path | None = None
) -> Parsing:
    """Parse a log that must contain a run; raise UserError for any other file."""
    parsing = parse_log(path, user_settings, display_path=display_path)
    document = parsing.document
    if document.status not in RUN_STATUS:
        raise UserError(
            str(display_path or path),
            f"{document.status}: {document.reason}",
            remedy="`paceline parse` shows its content; set its log format with --engine",
        )
    return parsing


def log_record(
    name: str, document: ParsedLog, log: str, digest: str, user_settings: UserSettings
) -> RunRecord:
    """Return the record of the run that wrote a log, without a time and a tag."""
    return RunRecord(
        name=name,
        created="",
        command=(),
        spec=None,
        log_settings=document.settings,
        log=log,
        log_sha256=digest,
        window=user_settings.window,
        status=RUN_STATUS[document.status],
        reason=document.reason,
        paceline_version=__version__,
    )


def _copy(path: Path, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if all(redact(block, os.environ) == block for block in _blocks(path)):
            shutil.copyfile(path, target)
            return
        with gzip.open(target, "wb") if _is_packed(path) else target.open("wb") as copy:
            for block in _blocks(path):
                copy.write(redact(block, os.environ).encode("utf-8", "surrogateescape"))
    except OSError as error:
        shutil.rmtree(target.parents[1], ignore_errors=True)
        raise SystemFaultError(str(target), f"cannot be written: {error.strerror}") from error


def _blocks(path: Path) -> Iterator[str]:
    """Yield the uncompressed log in blocks of whole lines, up to the end of a truncated file.

    A line longer than a block is split, so that it does not fill the memory.
    """
    with open_expanded(path) as log:
        try:
            for block in text_blocks(log, BLOCK_BYTES):
                yield block.decode("utf-8", "surrogateescape")
        except (EOFError, zlib.error, gzip.BadGzipFile):
            return


def _is_packed(path: Path) -> bool:
    with open_regular(path) as log:
        return log.read(2) == GZIP_MAGIC


def file_digest(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _imported_before(root: Path, digest: str) -> Path | None:
    folders = run_folders(root)
    return next((f for f in folders if read_json(f / RUN_FILE).get("log_sha256") == digest), None)


def _stem(path: Path) -> str:
    name = redact(as_text(path.name.removesuffix(".gz")), os.environ)
    return name.rpartition(".")[0] or name
