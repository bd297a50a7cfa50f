"""Conversion of packed rows, such as MLPerf's GovReport, for the native trainer or NeMo.

Input formats are parquet and jsonl (`input_ids` with `labels`) and NeMo's .npy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.errors import SystemFaultError, UserError
from paceline.staging.conversions import Progress, ignore_progress
from paceline.staging.conversions.indexed import IndexedWriter, part_path
from paceline.staging.conversions.packed_npy import MaskOf, PackedRow, read_packed, write_packed

BATCH_ROWS = 512


def records(
    sources: Sequence[Path], columns: tuple[str, ...], progress: Progress
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location, record) of parquet and jsonl files in order."""
    total_bytes, done_bytes = sum(path.stat().st_size for path in sources), 0
    for path in sources:
        reading = _parquet(path, columns) if path.suffix == ".parquet" else _jsonl(path)
        for number, (share, record) in enumerate(reading, start=1):
            yield f"{path}: record {number}", record
            if number % BATCH_ROWS == 0:
                progress(done_bytes + int(share * path.stat().st_size), total_bytes)
        done_bytes += path.stat().st_size
        progress(done_bytes, total_bytes)


def _parquet(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield (fraction of the file read, record)."""
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise SystemFaultError(
            "pyarrow", "is not installed", remedy="pip install 'paceline[stage]'"
        ) from error
    try:
        file: Any = parquet.ParquetFile(path)
        batches = file.iter_batches(BATCH_ROWS, columns=[*columns])
    except ArrowInvalid as error:
        raise UserError(str(path), f"is not a parquet file: {error}") from error
    absent = set(columns) - set(file.schema_arrow.names)
    if absent:
        raise UserError(str(path), f"has no column {', '.join(sorted(absent))}")
    num_read = 0
    for batch in batches:
        for record in batch.to_pylist():
            num_read += 1
            yield num_read / file.metadata.num_rows, record


def _jsonl(path: Path) -> Iterator[tuple[float, dict[str, Any]]]:
    size_bytes, done_bytes = path.stat().st_size, 0
    with path.open("rb") as file:
        for line in file:
            done_bytes += len(line)
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise UserError(
                    str(path), f"invalid JSON before byte {done_bytes}: {error}"
                ) from None
            if not isinstance(record, dict):
                raise UserError(str(path), f"not a JSON object before byte {done_bytes}")
            yield done_bytes / size_bytes, record  # pyright: ignore[reportUnknownVariableType]


IGNORED = -100
"""Label of a token that is not a target, as in torch and transformers."""


def packed_rows(
    sources: Sequence[Path],
    prefix: Path,
    progress: Progress = ignore_progress,
    mask_of: MaskOf = "tokens",
    across: bool = False,
) -> tuple[int, int]:
    """Write PREFIX.bin, PREFIX.idx and PREFIX.mask; return the numbers of rows and targets.

    Each row is one sequence. A token is a target if its label is not -100 or its mask is 1. The
    first token of a document is never a target. To train on the result, set
    `data.source: indexed`, `data.packing: padded` and `data.loss_mask`. The trainer's attention
    spans a row, so a row of several documents is refused unless `across` is set. Raises UserError
    for an inconsistent row.
    """
    mask = prefix.with_name(f"{prefix.name}.mask")
    part = part_path(mask)
    rows = targets = 0
    prefix.parent.mkdir(parents=True, exist_ok=True)
    try:
        with IndexedWriter(prefix, np.dtype("int32")) as writer, part.open("wb") as file:
            for where, row in _rows(sources, progress, mask_of):
                if len(row.starts) > 1 and not across:
                    raise UserError(
                        where,
                        f"holds {len(row.starts)} documents, and the native trainer's attention "
                        "would span them",
                        remedy="set across: true to accept this",
                    )
                writer.add_documents([row.ids])
                file.write(row.targets.astype(np.uint8).tobytes())
                rows, targets = rows + 1, targets + int(row.targets.sum())
            file.flush()
            os.fsync(file.fileno())
        part.replace(mask)
    finally:
        part.unlink(missing_ok=True)
    return rows, targets


def packed_npy(
    sources: Sequence[Path],
    target: Path,
    progress: Progress = ignore_progress,
    mask_of: MaskOf = "tokens",
) -> int:
    """Write a .npy that NeMo and MLPerf's reference read; return the number of rows.

    Raises UserError for an inconsistent row.
    """
    return write_packed(target, (row for _, row in _rows(sources, progress, mask_of)))


def _rows(
    sources: Sequence[Path], progress: Progress, mask_of: MaskOf
) -> Iterator[tuple[str, PackedRow]]:
    """Yield (location, row) of all files in order."""
    total_bytes, done_bytes = sum(path.stat().st_size for path in sources), 0
    for path in sources:
        if path.suffix == ".npy":
            yield from read_packed(path, mask_of)
        else:
            for where, record in records([path], ("input_ids", "labels"), ignore_progress):
                yield where, _row_of_labels(where, record)
        done_bytes += path.stat().st_size
        progress(done_bytes, total_bytes)


def _row_of_labels(where: str, record: dict[str, Any]) -> PackedRow:
    """Return a row of one document, whose labels must be its tokens or -100."""
    ids, labels = (np.asarray(record.get(name)) for name in ("input_ids", "labels"))
    mask = labels != IGNORED
    if ids.ndim != 1 or ids.shape != labels.shape or not len(ids) or (ids != labels)[mask].any():
        raise UserError(where, "each label must equal its input_id or be -100")
    return PackedRow(ids, mask, (0,))
