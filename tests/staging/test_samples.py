"""Data sets of fine-tuning become records."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from paceline.core.errors import UserError
from paceline.staging.conversions.packed import answers


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
