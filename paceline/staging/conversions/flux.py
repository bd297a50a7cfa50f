"""Conversion of Flux.1 encodings from MLCommons' format to shards that MLPerf trainings read.

Input: a folder saved by Hugging Face datasets (state.json, data-*.arrow) with one row per sample.
Its columns `t5_encodings`, `clip_encodings`, `mean` and `logvar` hold .npy files of bf16 stored as
uint16. A held-out row also has `timestep` (0-7), the time of its evaluation in eighths.
Output: the same bytes as KEY.t5.bytes, KEY.clip.bytes, KEY.mean.bytes and KEY.logvar.bytes after
KEY.json, with 10,000 samples per shard, in train/ and val/.
Source of the format: mlcommons/training_results_v5.1, NVIDIA/benchmarks/flux1, to_webdataset.py.
Only the keys (PART-00000000) differ: energon 7.4 rejects a key of val that is also in train.
"""

from __future__ import annotations

import io
import json
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import SystemFaultError, UserError
from paceline.core.value import PositiveInt, Value
from paceline.files.documents import parse_json, read_text
from paceline.staging.conversions import Progress, ignore_progress
from paceline.staging.conversions.random_data import Encoder, bfloat16_bits, pictures
from paceline.staging.conversions.webdataset import (
    ShardSample,
    index_shard,
    shard_name,
    write_metadata,
    write_shard,
)

CONTENTS = {
    "t5_encodings": "t5.bytes",
    "clip_encodings": "clip.bytes",
    "mean": "mean.bytes",
    "logvar": "logvar.bytes",
}
"""Name of each column's file in a shard."""
EMPTY_FILES = ("t5_empty.npy", "clip_empty.npy")
EMPTY_FOLDER = "empty_encodings"
POLL_S = 1.0
MIN_BYTES_FOR_WORKERS = 1 << 28


class FluxShardSources(Value):
    """Locations of the encodings, each `ASSET` or `ASSET/FOLDER`, and the size of the shards."""

    train: str
    val: str
    empty: str
    samples_per_shard: PositiveInt = 10_000


@dataclass(frozen=True)
class ShardTask:
    """Rows of one shard."""

    source: Path
    target: Path
    part: str
    rows: range


def make_flux_shards(
    folder: Path,
    sources: FluxShardSources,
    inputs: Mapping[str, Path],
    progress: Progress = ignore_progress,
    workers: int = 1,
) -> None:
    """Write train/, val/, empty_encodings/ and energon's metadata to `folder`.

    Complete shards are kept. `progress` is called every second, and may raise to stop the work.
    Raises UserError for an input of another format.
    """
    for partial_file in folder.rglob("*.part"):
        partial_file.unlink()  # left by a killed call
    empty = folder / EMPTY_FOLDER
    empty.mkdir(exist_ok=True)
    for name in EMPTY_FILES:
        shutil.copyfile(_only(name, sources.empty, inputs), empty / name)
    tasks: list[ShardTask] = []
    total_bytes = 0
    for part, place in (("train", sources.train), ("val", sources.val)):
        source = _only("state.json", place, inputs).parent
        (folder / part).mkdir(exist_ok=True)
        tasks += _tasks(source, folder / part, part, sources.samples_per_shard)
        total_bytes += sum(path.stat().st_size for path in _arrow_files(source))

    def report_progress() -> None:
        progress(min(total_bytes, _written_bytes(folder)), total_bytes)

    workers = workers if total_bytes >= MIN_BYTES_FOR_WORKERS else 1
    write_metadata(folder, _write_shards(tasks, workers, report_progress))


def encoding_rows(source: Path, rows: range) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number, row) of a saved data set; raises UserError if a column is missing."""
    first = 0
    for path in _arrow_files(source):
        for batch in _batches(path):
            if absent := set(CONTENTS) - set(batch.schema.names):
                raise UserError(str(path), f"has no column {', '.join(sorted(absent))}")
            last = first + batch.num_rows
            for number in range(max(first, rows.start), min(last, rows.stop)):
                row = {
                    name: batch.column(name)[number - first].as_py() for name in batch.schema.names
                }
                yield number, row
            if last >= rows.stop:
                return
            first = last


def convert(task: ShardTask) -> list[ShardSample]:
    """Write a shard if it does not exist, and its index; return its samples."""
    if not task.target.is_file():
        write_shard(task.target, _samples(task))
    return index_shard(task.target)


def _samples(task: ShardTask) -> Iterator[tuple[str, dict[str, bytes]]]:
    for number, row in encoding_rows(task.source, task.rows):
        about = {"key": str(row.get("__key__", number))}
        if row.get("timestep") is not None:
            about["timestep"] = row["timestep"]
        contents = {"json": json.dumps(about).encode()}
        for column, name in CONTENTS.items():
            if not isinstance(row[column], bytes):
                raise UserError(
                    f"{task.source}: row {number}",
                    f"{column} does not hold the bytes of a .npy file",
                )
            contents[name] = row[column]
        yield f"{task.part}-{number:08d}", contents


def _tasks(source: Path, target: Path, part: str, size: int) -> list[ShardTask]:
    count = sum(batch.num_rows for path in _arrow_files(source) for batch in _batches(path))
    if not count:
        raise UserError(str(source), "has no samples")
    return [
        ShardTask(
            source, target / shard_name(at), part, range(at * size, min(count, (at + 1) * size))
        )
        for at in range(-(-count // size))
    ]


def _write_shards(
    tasks: Sequence[ShardTask], workers: int, report_progress: Callable[[], None]
) -> Iterator[tuple[str, list[ShardSample]]]:
    """Yield (path, samples) of each shard, written by `workers` processes."""
    pool: Executor = (
        ThreadPoolExecutor(1)
        if workers == 1
        # A fork of a process with threads may hang, so workers are spawned.
        else ProcessPoolExecutor(min(workers, len(tasks)), get_context("spawn"))
    )
    try:
        waiting = deque((task, pool.submit(convert, task)) for task in tasks)
        while waiting:
            task, future = waiting.popleft()
            while not future.done():
                report_progress()
                wait([future], POLL_S)
            yield f"{task.part}/{task.target.name}", future.result()
        report_progress()
    except BrokenProcessPool as error:
        raise SystemFaultError(
            "writing shards", "a worker was killed", remedy="it may have run out of memory"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _written_bytes(folder: Path) -> int:
    """Return the bytes of all shards so far, including partial ones."""
    total = 0
    for path in folder.glob("*/shard_*.tar*"):
        with suppress(FileNotFoundError):  # the partial file was just renamed
            total += path.stat().st_size
    return total


def _only(name: str, place: str, inputs: Mapping[str, Path]) -> Path:
    """Return the only file called `name` in ASSET or ASSET/FOLDER; raises UserError otherwise."""
    asset, _, inside = place.partition("/")
    if asset not in inputs:
        raise UserError(
            f"made asset flux-shards: {asset}",
            "is not among its needs",
            allowed=", ".join(inputs) or "none",
        )
    paths = sorted((inputs[asset] / inside).rglob(name))
    if len(paths) != 1:
        raise UserError(
            f"made asset flux-shards: {place}", f"has {len(paths)} files named {name}, not 1"
        )
    return paths[0]


def _arrow_files(source: Path) -> list[Path]:
    """Return the Arrow files of a saved data set in order."""
    state = source / "state.json"
    try:
        files = parse_json(read_text(state))["_data_files"]
        paths = [source / file["filename"] for file in files]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(str(state), f"does not list the files of a data set: {error!r}") from error
    if absent := [path.name for path in paths if path.parent != source or not path.is_file()]:
        raise UserError(str(state), f"lists {absent[0]}, which is not in the same folder")
    return paths


def _batches(path: Path) -> Iterator[Any]:
    """Yield the record batches of an Arrow stream, which is mapped into memory."""
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as reader:
            yield from reader
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UserError(str(path), f"is not a complete Arrow stream: {error}") from error


COLUMNS = {"t5_encodings": "text", "clip_encodings": "pooled", "mean": "mean", "logvar": "logvar"}
"""Name of each column's tensor in a sample of `Encoder`."""
TIMES = 8
BATCH_ROWS = 64


class SyntheticEncodingSizes(Value):
    """Number of random images and sizes of their encodings."""

    samples: PositiveInt
    held_out: PositiveInt
    latent_channels: PositiveInt = 16
    latent_size: PositiveInt
    text_len: PositiveInt
    text_width: PositiveInt
    pooled_width: PositiveInt


def make_synthetic_encodings(
    folder: Path, sizes: SyntheticEncodingSizes, check: Callable[[], None]
) -> None:
    """Draw and encode train/ and val/, which share no image; an empty text is zeros."""
    encoder = Encoder.of(sizes)
    images = [*dict.fromkeys(pictures(2 * (sizes.samples + sizes.held_out)))]
    rows: list[dict[str, Any]] = []
    for number, picture in enumerate(images[: sizes.samples + sizes.held_out]):
        check()
        sample = encoder.sample(picture)
        row = {name: _npy(bfloat16_bits(sample[key])) for name, key in COLUMNS.items()}
        rows.append({"__key__": f"drawing-{number}", **row})
    for number, row in enumerate(rows[sizes.samples :]):
        row["timestep"] = number % TIMES
    save_rows(folder / "train", rows[: sizes.samples])
    save_rows(folder / "val", rows[sizes.samples :])
    (folder / EMPTY_FOLDER).mkdir()
    shapes = ((1, sizes.text_len, sizes.text_width), (1, sizes.pooled_width))
    for name, shape in zip(EMPTY_FILES, shapes, strict=True):
        (folder / EMPTY_FOLDER / name).write_bytes(_npy(np.zeros(shape, "<f2")))


def save_rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as one Arrow file with the metadata that `datasets.load_from_disk` needs."""
    import pyarrow

    types = {
        "__key__": ("string", pyarrow.string()),
        **{name: ("binary", pyarrow.binary()) for name in COLUMNS},
        "timestep": ("int64", pyarrow.int64()),
    }
    names = [name for name in types if name in rows[0]]
    schema = pyarrow.schema([(name, types[name][1]) for name in names])
    folder.mkdir()
    with (
        pyarrow.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as file,
        pyarrow.ipc.new_stream(file, schema) as stream,
    ):
        for at in range(0, len(rows), BATCH_ROWS):
            batch = pyarrow.RecordBatch.from_pylist(rows[at : at + BATCH_ROWS], schema)
            stream.write_batch(batch)
    features = {name: {"dtype": types[name][0], "_type": "Value"} for name in names}
    info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    state = {
        "_data_files": [{"filename": "data-00000-of-00001.arrow"}],
        "_fingerprint": "0" * 16,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (folder / "dataset_info.json").write_text(json.dumps(info, indent=2) + "\n")
    (folder / "state.json").write_text(json.dumps(state, indent=2) + "\n")


def _npy(values: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values, allow_pickle=False)
    return buffer.getvalue()
