"""What tiny recipes are staged from is real: other libraries read it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.staging.conversions import stdlib_corpus
from paceline.staging.converters import ConversionJob, convert
from paceline.trainer.data.indexed_corpus import read_indexed

MAKERS = {
    "tokenizer": stdlib_corpus.make_tokenizer,
    "jsonl": stdlib_corpus.make_jsonl,
    "indexed": stdlib_corpus.make_indexed,
    "gpt2": stdlib_corpus.make_gpt2,
}


def test_every_maker_fills_its_folder_and_says_how_far_it_is(tmp_path: Path) -> None:
    files: dict[str, set[str]] = {}
    for name, maker in MAKERS.items():
        (tmp_path / name).mkdir()
        seen: list[tuple[int, int]] = []
        maker(tmp_path / name, lambda *at, seen=seen: seen.append(at))
        assert seen and all(0 <= done <= total for done, total in seen)
        files[name] = {path.name for path in (tmp_path / name).iterdir()}

    assert {"code-0.bin", "code-0.idx", "code-1.bin", "code-1.idx"} < files["indexed"]
    parts = [read_indexed(str(tmp_path / "indexed" / f"code-{number}")) for number in (0, 1)]
    assert min(len(part.tokens) for part in parts) > 100_000
    with (tmp_path / "jsonl" / "code.jsonl").open() as lines:
        assert all(json.loads(line)["text"] is not None for line in lines)
    tokenizers = {
        (tmp_path / name / "tokenizer.json").read_bytes() for name in MAKERS if name != "jsonl"
    }
    assert len(tokenizers) == 1


def test_settings_that_a_maker_does_not_take_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no settings: vocab_size"):
        convert("jsonl", ConversionJob(tmp_path, {}, {"vocab_size": 7}, lambda: None))


def test_transformers_loads_the_model_and_its_tokenizer(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    stdlib_corpus.make_gpt2(tmp_path, lambda done, total: None)

    model, tokenizer = (
        kind.from_pretrained(tmp_path) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    ids = tokenizer("import os\n", return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == "import os\n" and len(ids[0]) < 5
    assert torch.isfinite(model(ids, labels=ids).loss)
