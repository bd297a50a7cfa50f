"""Conversion of packed rows, such as MLPerf's GovReport, for the native trainer or NeMo.

Input formats are parquet and jsonl (`input_ids` with `labels`) and NeMo's .npy.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from paceline.core.errors import SystemFaultError, UserError
from paceline.files.documents import open_regular, parse_json
from paceline.staging.conversions import Progress, ignore_progress
from paceline.staging.conversions.indexed import IndexedWriter, part_path

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
                record = parse_json(line.decode(), nan=True)
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


MaskOf = Literal["tokens", "targets"]
"""Meaning of an entry of `loss_mask`: the token at its position, or the next token."""
LARGEST_ID = 2**31 - 1
MULTIARRAY = ("numpy.core.multiarray", "numpy._core.multiarray")
OLD_NAME, NEW_NAME = (f"c{module}\n_reconstruct\n".encode() for module in MULTIARRAY)
PROTOCOL = 3
"""Pickle protocol of NumPy 1, which cannot read newer ones; NumPy 2 reads both."""
HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


@dataclass(frozen=True)
class PackedRow:
    """Row of packed documents."""

    ids: NDArray[np.int64]
    mask: NDArray[np.bool_]
    """Target mask (tokens,) as the source states it."""
    starts: tuple[int, ...]
    """Start index of each document; the first is 0."""

    @property
    def targets(self) -> NDArray[np.bool_]:
        """Mask without the first token of each document, which has no preceding token."""
        targets = self.mask.copy()
        targets[[*self.starts]] = False
        return targets


def read_packed(path: Path, mask_of: MaskOf = "tokens") -> Iterator[tuple[str, PackedRow]]:
    """Yield (location, row) of a .npy file.

    Raises UserError for a file of another format, or one whose pickle names other functions.
    """
    for number, row in enumerate(_load_rows(path), start=1):
        where = f"{path}: record {number}"
        yield where, _row(where, row, mask_of)


def write_packed(path: Path, rows: Iterable[PackedRow]) -> int:
    """Write rows in the format of the reference's conversion; return their number.

    The mask is that of the tokens. All rows are held in main memory, as in the programs that read
    the file.
    """
    records = [
        {
            "input_ids": row.ids.astype(np.int32),
            "loss_mask": row.mask.astype(int).tolist(),
            "seq_start_id": [*row.starts],
        }
        for row in rows
    ]
    array = np.empty(len(records), object)
    array[:] = records
    # NumPy 1 does not have the module name that NumPy 2 writes.
    content = pickle.dumps(array, protocol=PROTOCOL).replace(NEW_NAME, OLD_NAME, 1)
    part = part_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with part.open("wb") as file:
            npy.write_array_header_1_0(file, npy.header_data_from_array_1_0(array))
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return len(records)


def _load_rows(path: Path) -> list[Any]:
    """Return the rows of the file, not yet validated."""
    with open_regular(path) as file:
        try:
            version = npy.read_magic(file)
            if version not in HEADERS:
                raise UserError(str(path), f"has unsupported .npy version {version}")
            shape, _, dtype = HEADERS[version](file)
            if not dtype.hasobject:
                raise UserError(str(path), f"holds {dtype}, not rows of dicts")
            content = _RowsUnpickler(path, file).load()
        except UserError:
            raise
        except Exception as error:  # a broken pickle may raise any exception
            raise UserError(str(path), f"is not a .npy file of rows: {error!r}"[:200]) from error
    rows = _sequence(content)
    if not isinstance(rows, list) or len(shape) != 1 or len(cast(list[Any], rows)) != shape[0]:
        raise UserError(str(path), "does not hold a list of rows")
    return cast(list[Any], rows)


class _RowsUnpickler(pickle.Unpickler):
    """Unpickler that resolves only the names that arrays need, to classes made for each file."""

    def __init__(self, path: Path, file: Any) -> None:
        super().__init__(file)
        self.path, self.names = path, _safe_classes()

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        try:
            return self.names[module_name, global_name]
        except KeyError:
            raise UserError(
                str(self.path),
                f"refers to {module_name}.{global_name}, which packed rows do not need; "
                "the file may be malicious",
            ) from None


def _safe_classes() -> dict[tuple[str, str], Callable[..., Any]]:
    class Dtype:
        """Replacement of numpy.dtype: a name and a byte order."""

        def __init__(self, name: str, *_: object) -> None:
            self.name, self.order = name, "|"

        def __setstate__(self, state: tuple[Any, ...]) -> None:
            self.order = state[1]

    class Array:
        """Replacement of numpy.ndarray."""

        def __init__(self, *_: object) -> None:
            self.value: Any = None

        def __setstate__(self, state: tuple[Any, ...]) -> None:
            *_, shape, dtype, _, content = state
            if len(shape) != 1:
                raise ValueError(f"an array of {len(shape)} dimensions")
            self.value = content if dtype.name[:1] == "O" else _numbers(dtype, content)

    def scalar(dtype: Any, content: bytes) -> int:
        return int(_numbers(dtype, content)[0])

    def encode(text: str, *_: object) -> bytes:
        return text.encode("latin1")

    names: dict[tuple[str, str], Callable[..., Any]] = {
        ("numpy", "ndarray"): Array,
        ("numpy", "dtype"): Dtype,
        ("_codecs", "encode"): encode,
    }
    for module in MULTIARRAY:
        names |= {(module, "_reconstruct"): Array, (module, "scalar"): scalar}
    return names


def _numbers(dtype: Any, content: bytes | str) -> NDArray[np.int64]:
    """Decode integers or booleans from bytes; raises ValueError for any other dtype."""
    raw = content.encode("latin1") if isinstance(content, str) else content
    kind = np.dtype(f"{'<' if dtype.order in '=|' else dtype.order}{dtype.name}")
    if kind.kind not in "iub":
        raise ValueError(f"an array of {dtype.name}")
    return np.frombuffer(raw, kind).astype(np.int64)


def _sequence(value: Any) -> Any:
    """Return the content of a replacement array, or the value itself."""
    return getattr(value, "value", value)


def _row(where: str, row: Any, mask_of: MaskOf) -> PackedRow:
    """Validate a row and return it; raises UserError."""
    if not isinstance(row, dict):
        raise UserError(where, "is not a dict")
    fields = cast(dict[Any, Any], row)
    names = ("input_ids", "loss_mask", "seq_start_id")
    ids, mask, starts = (_integers(where, name, fields.get(name)) for name in names)
    if not len(ids) or ids.min() < 0 or ids.max() > LARGEST_ID:
        raise UserError(where, "input_ids is empty or holds invalid token ids")
    if len(mask) != len(ids) or not np.isin(mask, (0, 1)).all():
        raise UserError(where, "loss_mask must be 0 or 1 for each of the input_ids")
    if not len(starts) or starts[0] or (np.diff(starts) <= 0).any() or starts[-1] >= len(ids):
        raise UserError(where, "seq_start_id must be 0 and ascending positions in the row")
    mask = mask.astype(np.bool_)
    # A mask of targets refers to the next token, so it is shifted right by one. The entry that
    # wraps around to index 0 has no effect, because the first token is never a target.
    return PackedRow(ids, np.roll(mask, mask_of == "targets"), tuple(starts.tolist()))


def _integers(where: str, name: str, value: Any) -> NDArray[np.int64]:
    numbers = _sequence(value)
    if isinstance(numbers, list | tuple):
        items = cast(list[Any], numbers)
        # Check the types first: NumPy would expand nested lists beyond the size of the file.
        plain = set(map(type, items)) <= {int, float, bool}
        numbers = np.array(items or np.zeros(0, np.int64)) if plain else None
    if isinstance(numbers, np.ndarray):
        array = cast(NDArray[Any], numbers)
        # A mask may be of floats.
        if array.dtype.kind in "iub" or np.isin(array, (0.0, 1.0)).all():
            return array.astype(np.int64)
    raise UserError(where, f"{name} is not a list of integers")
