"""Data sets of fine-tuning become records, or rows of tokens with the targets among them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from paceline.core.errors import UserError
from paceline.staging.conversions.samples import answers, packed_rows
from paceline.trainer.data.indexed import read_indexed


def test_answers_go_behind_their_prompts(tmp_path: Path) -> None:
    rows = [
        {"prompt": "\n\nHuman: a?\n\nAssistant:", "chosen": " é", "rejected": "x", "response": " é"}
    ]
    parquet.write_table(pa.Table.from_pylist(rows * 700), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text(json.dumps(rows[0]) + "\n\n")
    seen: list[tuple[int, int]] = []

    count = answers(
        [tmp_path / "a.parquet", tmp_path / "b.jsonl"],
        tmp_path / "sft.jsonl",
        lambda *at: seen.append(at),
    )

    records = [json.loads(line) for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    assert count == len(records) == 701
    assert {tuple(record.items()) for record in records} == {
        (
            ("prompt", rows[0]["prompt"]),
            ("chosen", " é"),
            ("text", "\n\nHuman: a?\n\nAssistant: é"),
        )
    }
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1]


def test_a_record_without_an_answer_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "chosen": "b"}\n{"prompt": "a"}\n')

    with pytest.raises(UserError, match=r"a\.jsonl: record 2: .* no prompt and chosen"):
        answers([tmp_path / "a.jsonl"], tmp_path / "sft.jsonl")

    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


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

    with pytest.raises(UserError, match="record 1: the row's labels are not its input_ids"):
        packed_rows([tmp_path / "a.jsonl"], tmp_path / "a")

    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
