"""Samples of fine-tuning: answers to prompts, and the records of the files that they come in.

`answers` makes of Dahoas/rm-static or Dahoas/full-hh-rlhf (parquet or jsonl) records as
DeepSpeed-Chat's first phase reads them; `data.split: [2, 4, 4]` cuts them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.core.errors import SystemFaultError, UserError
from paceline.staging.conversions.indexed import part_path
from paceline.staging.conversions.progress import Progress, unwatched

BATCH_ROWS = 512


def answers(sources: Sequence[Path], target: Path, progress: Progress = unwatched) -> int:
    """Write a jsonl of {"prompt", "chosen", "text"}, the text being both; the number of records.

    Raises UserError for a record that lacks one of them.
    """
    part = part_path(target)
    count = 0
    try:
        with part.open("w", encoding="utf-8") as file:
            for where, record in records(sources, ("prompt", "chosen"), progress):
                prompt, chosen = record.get("prompt"), record.get("chosen")
                if not isinstance(prompt, str) or not isinstance(chosen, str):
                    raise UserError(where, "the record has no prompt and chosen")
                both = {"prompt": prompt, "chosen": chosen, "text": prompt + chosen}
                file.write(json.dumps(both, ensure_ascii=False) + "\n")
                count += 1
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return count


def records(
    sources: Sequence[Path], columns: tuple[str, ...], progress: Progress
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, record) of parquet and jsonl files, one after the other."""
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
    """(share of the file behind it, record)."""
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
        raise UserError(str(path), f"is no parquet file: {error}") from error
    absent = set(columns) - set(file.schema_arrow.names)
    if absent:
        raise UserError(str(path), f"has no column {', '.join(sorted(absent))}")
    done = 0
    for batch in batches:
        for record in batch.to_pylist():
            done += 1
            yield done / file.metadata.num_rows, record


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
                raise UserError(str(path), f"no JSON before byte {done_bytes}: {error}") from None
            if not isinstance(record, dict):
                raise UserError(str(path), f"no record before byte {done_bytes}")
            yield done_bytes / size_bytes, record  # pyright: ignore[reportUnknownVariableType]
