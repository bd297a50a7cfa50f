"""Tar shards of samples with the metadata of megatron-energon, as `energon prepare` writes them.

PART/shard_000000.tar: files KEY.NAME, grouped by sample; keys are unique in a data set.
PART/shard_000000.tar.idx: byte offsets of each sample and of the end (u64, little-endian).
PART/index.txt: the names of its shards, one per line, as in MLPerf's conversion of Flux.1.
.nv-meta/dataset.yaml: samples are read unchanged, and the training program's cooker decodes them.
.nv-meta/split.yaml, .info.json, .info.yaml: shards of each part, number of samples of each shard.
.nv-meta/index.sqlite, index.uuid: the offset of every sample and of each of its files.
Source of the format: megatron-energon 7.4.1, flavors/webdataset; before version 7 only .info.yaml
is read.
"""

from __future__ import annotations

import io
import json
import os
import re
import sqlite3
import struct
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

from paceline.core.errors import UserError
from paceline.staging.conversions.indexed import part_path

META_FOLDER = ".nv-meta"
BLOCK_BYTES = 512
ENERGON_VERSION = "7.4.1"
"""Version of megatron-energon whose metadata format is written."""
DATASET_YAML = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
FILE_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)")
"""Pattern of KEY.NAME; the key ends at the first dot after the last slash."""
TABLES = """
CREATE TABLE samples (
    tar_file_id INTEGER NOT NULL, sample_key TEXT NOT NULL UNIQUE, sample_index INTEGER NOT NULL,
    byte_offset INTEGER, byte_size INTEGER);
CREATE TABLE sample_parts (
    tar_file_id INTEGER, sample_index INTEGER, part_name TEXT,
    content_byte_offset INTEGER, content_byte_size INTEGER);
"""
INDEXES = """
CREATE INDEX idx_samples_by_tar_and_idx ON samples(tar_file_id, sample_index);
CREATE INDEX idx_sample_parts_seq
    ON sample_parts(tar_file_id, sample_index, content_byte_offset);
CREATE INDEX idx_sample_parts_full ON sample_parts(
    tar_file_id, sample_index, part_name, content_byte_offset, content_byte_size);
"""


@dataclass(frozen=True, slots=True)
class ShardFile:
    """File of a sample, with the offset and size of its content in the shard, in bytes."""

    name: str
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class ShardSample:
    """Sample at bytes `start` to `end` of a shard, with the tar headers of its files."""

    key: str
    start: int
    end: int
    files: tuple[ShardFile, ...]


def shard_name(number: int) -> str:
    """Return the file name of a shard, numbered from 0."""
    return f"shard_{number:06d}.tar"


def write_shard(path: Path, samples: Iterable[tuple[str, Mapping[str, bytes]]]) -> None:
    """Write samples (key, contents by name) as a tar file, which is renamed when complete."""
    part = part_path(path)
    try:
        with part.open("wb") as file:
            with tarfile.open(fileobj=file, mode="w") as tar:
                for key, contents in samples:
                    for name, content in contents.items():
                        member = tarfile.TarInfo(f"{key}.{name}")
                        member.size = len(content)
                        tar.addfile(member, io.BytesIO(content))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def shard_samples(path: Path) -> Iterator[ShardSample]:
    """Yield the samples of a shard in order; only the tar headers are read.

    Raises UserError for a file that is not a complete tar of such samples.
    """
    key, start, end, files = "", 0, 0, list[ShardFile]()
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                match = FILE_NAME.fullmatch(member.name)
                if not member.isfile() or match is None:
                    raise UserError(str(path), f"{member.name} is not a file named KEY.NAME")
                if match[1] != key and files:
                    yield ShardSample(key, start, end, tuple(files))
                    start, files = end, []
                key = match[1]
                files.append(ShardFile(match[2], member.offset_data, member.size))
                end = member.offset_data + -(-member.size // BLOCK_BYTES) * BLOCK_BYTES
    except tarfile.TarError as error:
        raise UserError(str(path), f"is not a complete tar file: {error}") from error
    if not files:
        raise UserError(str(path), "has no samples")
    if path.stat().st_size < end:
        raise UserError(str(path), "is truncated")
    yield ShardSample(key, start, end, tuple(files))


def index_shard(path: Path) -> list[ShardSample]:
    """Write the `.tar.idx` of a shard and return its samples; raises as `shard_samples` does."""
    samples = [*shard_samples(path)]
    places = [*(sample.start for sample in samples), samples[-1].end]
    _replace(path.with_name(f"{path.name}.idx"), struct.pack(f"<{len(places)}Q", *places))
    return samples


def write_metadata(folder: Path, shards: Iterable[tuple[str, Sequence[ShardSample]]]) -> None:
    """Write `.nv-meta` and the index.txt of every part.

    `shards` yields (path in `folder`, samples) of each shard; the folder of a shard is its part.
    Shards are read one at a time, because millions of samples may not fit in memory. Raises
    UserError for a duplicate key.
    """
    meta = folder / META_FOLDER
    meta.mkdir(exist_ok=True)
    parts: dict[str, list[str]] = {}
    counts: dict[str, int] = {}
    ends: list[int] = []
    with _database(meta / "index.sqlite") as database:
        for number, (path, samples) in enumerate(shards):
            try:
                _insert(database, number, samples)
            except sqlite3.IntegrityError:
                raise UserError(str(folder / path), "repeats the key of a sample") from None
            parts.setdefault(path.rpartition("/")[0], []).append(path)
            counts[path] = len(samples)
            ends.append(samples[-1].end)
    for part, paths in parts.items():
        lines = "".join(f"{Path(path).name}\n" for path in paths)
        _replace(folder / part / "index.txt", lines.encode())
    split_lines = "".join(
        f"  {json.dumps(part)}:\n" + "".join(f"  - {json.dumps(path)}\n" for path in paths)
        for part, paths in parts.items()
    )
    info = {"energon_version": ENERGON_VERSION, "shard_counts": counts}
    text = json.dumps(info, indent=2) + "\n"
    identity = uuid5(NAMESPACE_URL, json.dumps([counts, ends]))
    _replace(meta / "index.uuid", str(identity).encode())
    _replace(meta / "dataset.yaml", DATASET_YAML.encode())
    _replace(meta / "split.yaml", f"split_parts:\n{split_lines}exclude: []\n".encode())
    # JSON is also valid YAML. These files mark a data set as prepared, so they are written last.
    _replace(meta / ".info.yaml", text.encode())
    _replace(meta / ".info.json", text.encode())


@contextmanager
def _database(path: Path) -> Iterator[sqlite3.Connection]:
    """Yield a database with empty tables; at the end, add the indexes and rename the file."""
    part = part_path(path)
    try:
        with closing(sqlite3.connect(part)) as database:
            database.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;" + TABLES)
            yield database
            database.executescript(INDEXES)
            database.commit()
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _insert(database: sqlite3.Connection, number: int, samples: Sequence[ShardSample]) -> None:
    database.executemany(
        "INSERT INTO samples VALUES (?, ?, ?, ?, ?)",
        (
            (number, sample.key, at, sample.start, sample.end - sample.start)
            for at, sample in enumerate(samples)
        ),
    )
    database.executemany(
        "INSERT INTO sample_parts VALUES (?, ?, ?, ?, ?)",
        (
            (number, at, file.name, file.start, file.size)
            for at, sample in enumerate(samples)
            for file in sample.files
        ),
    )


def _replace(path: Path, content: bytes) -> None:
    part = part_path(path)
    part.write_bytes(content)
    part.replace(path)
