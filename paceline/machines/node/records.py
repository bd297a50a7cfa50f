"""Run folders that nodes do not share: the archive that they get, and the records that they send.

A record is a line of a node's output:

    @file NODE PATH OFFSET DATA     zlib-compressed content, in base64; spaces in PATH are %20

A record may arrive more than once.
"""

from __future__ import annotations

import base64
import binascii
import errno
import io
import tarfile
import zlib
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from paceline.core.job import Job
from paceline.files.run_folder import LOGS_FOLDER, STEPS_FOLDER

MAX_RECORD_BYTES = 1 << 20
"""Maximum size in bytes of a record's content; a node sends up to 32 KiB."""
MAX_FILE_BYTES = 1 << 34
"""Maximum size in bytes of a file of a node."""
UNUSABLE_NAME = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG)
"""Errors of a path that no file of a node can have."""


def write_record(
    folder: Path, name: str, offset: str, data: str, reserved_names: Collection[str]
) -> None:
    """Write the content of a record into a run folder, which is an absolute path without links.

    A record that is cut off or invalid, or that names a protected file, is ignored.
    """
    path = PurePosixPath(name.replace("%20", " "))
    try:
        packed = base64.b64decode(data, validate=True)
        content = zlib.decompressobj().decompress(packed, MAX_RECORD_BYTES)
        position = int(offset)
    except (ValueError, binascii.Error, zlib.error):
        return
    is_inside = not path.is_absolute() and ".." not in path.parts and "\0" not in name
    if not is_inside or str(path) in reserved_names or not 0 <= position <= MAX_FILE_BYTES:
        return
    file = folder / path
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.parent.resolve().is_relative_to(folder) and not file.is_symlink():
            with file.open("r+b" if file.exists() else "wb") as target:
                target.seek(position)
                target.write(content)
    except OSError as error:
        if error.errno not in UNUSABLE_NAME:
            raise


def packed_run(job: Job, folder: Path, left_out: Collection[str]) -> bytes:
    """Return the files of a job and its run folder as run.tar.gz, with empty folders for logs."""
    archive = io.BytesIO()
    names = {*job.files, *(path.name for path in folder.iterdir() if path.is_file())}
    with tarfile.open(fileobj=archive, mode="w:gz") as files:
        for name in sorted(names - {*left_out}):
            files.add(folder / name, name)
        for empty in (LOGS_FOLDER, STEPS_FOLDER):
            about = tarfile.TarInfo(empty)
            about.type, about.mode = tarfile.DIRTYPE, 0o755
            files.addfile(about)
    return archive.getvalue()
