"""Rows of packed documents, such as MLPerf's GovReport: to what the native trainer reads, or NeMo.

They come as parquet or jsonl (`input_ids` with `labels`) or as NeMo's .npy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.errors import UserError
from paceline.staging.conversions.indexed import IndexedWriter, part_path
from paceline.staging.conversions.packed_npy import MaskOf, PackedRow, read_packed, write_packed
from paceline.staging.conversions.progress import Progress, unwatched
from paceline.staging.conversions.samples import records

IGNORED = -100
"""The label of a token that is no target, in torch and in transformers."""


def packed_rows(
    sources: Sequence[Path],
    prefix: Path,
    progress: Progress = unwatched,
    mask_of: MaskOf = "tokens",
    across: bool = False,
) -> tuple[int, int]:
    """Write PREFIX.bin, PREFIX.idx and PREFIX.mask, a sequence a row; (rows, targets) of them.

    A token is a target where the row's label is not -100, or its mask is 1; the first one of a
    document never is. Train on it by `data.source: indexed`, `data.packing: padded` and
    `data.loss_mask`. The trainer's attention spans a row, so one of several documents is refused
    unless `across`. Raises UserError for a row that contradicts itself.
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
                        "goes across them",
                        remedy="say across: true to take it so",
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
    progress: Progress = unwatched,
    mask_of: MaskOf = "tokens",
) -> int:
    """Write a .npy as NeMo and MLPerf's reference read it; the number of rows.

    Raises UserError for a row that contradicts itself.
    """
    return write_packed(target, (row for _, row in _rows(sources, progress, mask_of)))


def _rows(
    sources: Sequence[Path], progress: Progress, mask_of: MaskOf
) -> Iterator[tuple[str, PackedRow]]:
    """(where, row) of all files, one after the other."""
    total_bytes, done_bytes = sum(path.stat().st_size for path in sources), 0
    for path in sources:
        if path.suffix == ".npy":
            yield from read_packed(path, mask_of)
        else:
            for where, record in records([path], ("input_ids", "labels"), unwatched):
                yield where, _labelled(where, record)
        done_bytes += path.stat().st_size
        progress(done_bytes, total_bytes)


def _labelled(where: str, record: dict[str, Any]) -> PackedRow:
    """A row of one document whose labels are its tokens or -100."""
    ids, labels = (np.asarray(record.get(name)) for name in ("input_ids", "labels"))
    mask = labels != IGNORED
    if ids.ndim != 1 or ids.shape != labels.shape or not len(ids) or (ids != labels)[mask].any():
        raise UserError(where, "the row's labels are not its input_ids or -100")
    return PackedRow(ids, mask, (0,))
