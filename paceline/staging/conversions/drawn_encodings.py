"""Encodings of small drawings as MLCommons ships those of Flux.1: train/, val/, empty_encodings/.

Each part is a folder as Hugging Face datasets saves it; `flux` makes shards of them.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.value import PositiveInt, Value
from paceline.staging.conversions.flux import EMPTY_FILES, EMPTY_FOLDER
from paceline.staging.conversions.random_data import Encoder, bfloat16_bits, pictures

COLUMNS = {"t5_encodings": "text", "clip_encodings": "pooled", "mean": "mean", "logvar": "logvar"}
"""What the tensors of a drawing are called there."""
TIMES = 8
BATCH_ROWS = 64


class DrawnEncodingSizes(Value):
    """How many drawings there are, and what the encoders make of them."""

    samples: PositiveInt
    held_out: PositiveInt
    latent_channels: PositiveInt = 16
    latent_size: PositiveInt
    text_len: PositiveInt
    text_width: PositiveInt
    pooled_width: PositiveInt


def make_drawn_encodings(
    folder: Path, sizes: DrawnEncodingSizes, check: Callable[[], None]
) -> None:
    """Draw and encode train/ and val/, no drawing of one in the other; an empty text is zeros."""
    encoder = Encoder.of(sizes)
    drawings = [*dict.fromkeys(pictures(2 * (sizes.samples + sizes.held_out)))]
    rows: list[dict[str, Any]] = []
    for number, picture in enumerate(drawings[: sizes.samples + sizes.held_out]):
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
    """One Arrow file and what `datasets.load_from_disk` needs beside it."""
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
