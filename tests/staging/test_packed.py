"""Packed rows of any form become a data set and its mask, or NeMo's file, and run no code."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from paceline.core.errors import UserError
from paceline.staging.conversions.packed import packed_npy, packed_rows, read_packed
from paceline.staging.converters import ConversionJob, convert
from paceline.trainer.data.indexed_corpus import read_indexed

GOVREPORT = [
    {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]},
    {"input_ids": [9, 10, 11, 12], "labels": [9, 10, 11, 12]},
]
# Of NeMo's own test of its reader: documents that end with 2, 1 for an answer, and what it gives.
PACKED = {
    "input_ids": [10, 11, 12, 2, 20, 21, 22, 23, 2, 30, 31, 32, 2],
    "loss_mask": [0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 1, 1, 1],
    "seq_start_id": [0, 4, 9],
}
LABELS = [11, 12, 2, 21, 22, 23, 2, 31, 32, 2]
LABEL_MASK = [0, 1, 1, 0, 0, 1, 1, 1, 1, 1]


def saved(path: Path, rows: list[Any]) -> Path:
    """As the reference's conversion saves them."""
    np.save(path, np.array(rows, object), allow_pickle=True)
    return path


def reference(row: dict[str, Any]) -> dict[str, Any]:
    """What the reference's conversion makes of a row of labels."""
    return {
        "input_ids": np.array(row["input_ids"], np.int32),
        "loss_mask": [int(label != -100) for label in row["labels"]],
        "seq_start_id": [0],
    }


def mask_in(path: Path) -> list[int]:
    return np.fromfile(path, np.uint8).tolist()


def test_rows_keep_their_targets_as_a_mask(tmp_path: Path) -> None:
    rows = [
        {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]},
        {"input_ids": [9, 10, 11, 12], "labels": [9, 10, 11, 12]},
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")

    assert packed_rows([tmp_path / "a.parquet"], tmp_path / "out" / "a") == (2, 5)

    kept = read_indexed(str(tmp_path / "out" / "a"))
    assert kept.tokens.view(2, 4).tolist() == [row["input_ids"] for row in rows]
    assert kept.lengths.tolist() == [4, 4]
    mask = np.fromfile(tmp_path / "out" / "a.mask", np.uint8)
    assert mask.tolist() == [0, 0, 1, 1, 0, 1, 1, 1]


def test_labels_that_are_no_tokens_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1, 2], "labels": [2, 3]}\n')

    with pytest.raises(UserError, match="record 1: each label must equal its input_id"):
        packed_rows([tmp_path / "a.jsonl"], tmp_path / "a")

    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_nemos_rows_become_the_targets_that_nemo_trains_on(tmp_path: Path) -> None:
    path = saved(tmp_path / "train.npy", [PACKED])

    ((_, row),) = read_packed(path)
    assert packed_rows([path], tmp_path / "train", across=True) == (1, 7)

    follows = [at for at in range(len(row.ids)) if at not in row.starts]
    assert row.ids[follows].tolist() == LABELS
    assert row.targets[follows].tolist() == [bool(value) for value in LABEL_MASK]
    kept = read_indexed(str(tmp_path / "train"))
    assert [[*kept.tokens], mask_in(tmp_path / "train.mask")] == [
        PACKED["input_ids"],
        row.targets.astype(int).tolist(),
    ]


def test_a_mask_may_be_of_the_token_behind(tmp_path: Path) -> None:
    shifted = {**PACKED, "loss_mask": [*PACKED["loss_mask"][1:], 0]}

    ((_, here),) = read_packed(saved(tmp_path / "a.npy", [PACKED]))
    ((_, behind),) = read_packed(saved(tmp_path / "b.npy", [shifted]), "targets")

    assert here.targets.tolist() == behind.targets.tolist() and here.targets.sum() == 7


def test_documents_that_attention_would_mix_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "train.npy", [PACKED])

    with pytest.raises(UserError, match="record 1: holds 3 documents, and the native trainer's"):
        packed_rows([path], tmp_path / "train")

    assert [file.name for file in tmp_path.iterdir()] == ["train.npy"]


def test_what_is_written_is_what_the_reference_writes(tmp_path: Path) -> None:
    parquet.write_table(pa.Table.from_pylist(GOVREPORT), tmp_path / "train.parquet")

    assert packed_npy([tmp_path / "train.parquet"], tmp_path / "train.npy") == 2

    content = (tmp_path / "train.npy").read_bytes()
    assert b"numpy._core" not in content, "NumPy 1 reads it"
    rows = np.load(tmp_path / "train.npy", allow_pickle=True)
    for row, expected in zip(rows, map(reference, GOVREPORT), strict=True):
        assert row["input_ids"].dtype == np.int32
        assert {**row, "input_ids": row["input_ids"].tolist()} == {
            **expected,
            "input_ids": expected["input_ids"].tolist(),
        }


@pytest.mark.parametrize("form", ["parquet", "npy"])
def test_staging_makes_both_forms_of_either(form: str, tmp_path: Path) -> None:
    source = tmp_path / "source" / "data"
    source.mkdir(parents=True)
    for part in ("train", "validation"):
        if form == "npy":
            saved(source / f"{part}.npy", [reference(row) for row in GOVREPORT])
        else:
            parquet.write_table(pa.Table.from_pylist(GOVREPORT), source / f"{part}-00000.parquet")
    inputs = {"gov-report": tmp_path / "source"}

    for maker in ("packed-rows", "packed-npy"):
        convert(maker, ConversionJob(tmp_path, inputs, {}, lambda: None))

    for part in ("train", "validation"):
        assert mask_in(tmp_path / f"{part}.mask") == [0, 0, 1, 1, 0, 1, 1, 1]
        assert len(read_indexed(str(tmp_path / part)).lengths) == 2
        rows = [row for _, row in read_packed(tmp_path / f"{part}.npy")]
        assert [row.mask.tolist() for row in rows] == [[False, False, True, True], [True] * 4]


def test_a_maker_without_rows_says_which_it_takes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no train\* or validation\*; allowed: .parquet"):
        convert("packed-npy", ConversionJob(tmp_path, {"a": tmp_path}, {}, lambda: None))
    with pytest.raises(UserError, match="needs exactly one asset"):
        convert("packed-rows", ConversionJob(tmp_path, {}, {}, lambda: None))


class Poison:
    """What runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def test_a_poisoned_file_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    path = saved(tmp_path / "train.npy", [{**PACKED, "loss_mask": Poison(mark)}])

    with pytest.raises(
        UserError, match="system, which packed rows do not need; the file may be malicious"
    ):
        next(read_packed(path))

    assert not mark.exists()
    assert len(np.load(path, allow_pickle=True)) == 1 and mark.exists(), "it is poison"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"input_ids": []}, "input_ids is empty"),
        ({"input_ids": [1, -2]}, "invalid token ids"),
        ({"input_ids": np.array([1.5, 2.5])}, "is not a .npy file of rows"),
        ({"input_ids": np.ones((2, 2), int)}, "is not a .npy file of rows"),
        ({"loss_mask": [1, 0]}, "loss_mask must be 0 or 1 for each"),
        ({"loss_mask": [2] * 13}, "loss_mask must be 0 or 1 for each"),
        ({"loss_mask": None}, "loss_mask is not a list of integers"),
        ({"seq_start_id": [1, 4]}, "seq_start_id must be 0 and ascending"),
        ({"seq_start_id": [0, 4, 13]}, "seq_start_id must be 0 and ascending"),
        ({"input_ids": [1.0, 1e300]}, "input_ids is not a list of integers"),
        ({"seq_start_id": [0, float("nan")]}, "seq_start_id is not a list of integers"),
        ({"loss_mask": [[0] * 13] * 13}, "loss_mask is not a list of integers"),
    ],
)
def test_a_row_that_contradicts_itself_is_named(
    change: dict[str, Any], what: str, tmp_path: Path
) -> None:
    path = saved(tmp_path / "train.npy", [PACKED, {**PACKED, **change}])

    with pytest.raises(UserError, match=what):
        list(read_packed(path))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93NUMPY\x01\x00",
        b"\x93NUMPY\x07\x00abc",
        pickle.dumps([PACKED]),
    ],
)
def test_what_is_no_file_of_rows_is_said(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(content)

    with pytest.raises(UserError, match=r"a\.npy: (is not a .* file of rows|has unsupported)"):
        next(read_packed(tmp_path / "a.npy"))


def test_plain_numbers_are_no_rows(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(3))

    with pytest.raises(UserError, match="holds int64, not rows"):
        next(read_packed(tmp_path / "a.npy"))
