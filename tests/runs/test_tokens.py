"""A text and a tokenizer.json become tokens once, and runs train on them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.files.run_folder import STEPS_FOLDER
from paceline.machines.placement import Request
from paceline.runs import flow
from paceline.runs.plan import Plan, make_plan
from paceline.staging.conversions import stdlib_corpus
from paceline.staging.conversions.indexed import files_of

SMALL = ("model.num_layers=1", "model.hidden_size=32", "model.ffn_size=64", "seq_len=32")
FEW = ("dtype=fp32", "global_batch=4", "steps=30", "layout.micro_batch=2", "memory_parts=false")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records with their tokenizer."""
    folder = tmp_path_factory.mktemp("text")
    stdlib_corpus.make_tokenizer(folder)
    records = [json.dumps({"text": f"def f{number}():\n    pass\n" * 9}) for number in range(60)]
    (folder / "text.jsonl").write_text("\n".join(records))
    return folder / "text.jsonl"


def plan(text: Path, runs: Path, *changes: str) -> Plan:
    """A small training on these records' tokens."""
    data = ("data.source=jsonl", f"data.path={text}", f"data.tokenizer={text.parent}")
    overrides = (*SMALL, *FEW, "model.vocab_size=2048", *data, *changes)
    request = Request("tiny-llama", None, overrides, 1, "cpu", runs_dir=runs)
    return make_plan(request)


def test_a_text_is_tokenized_once_before_the_first_run(text: Path, tmp_path: Path) -> None:
    planned = plan(text, tmp_path)
    (tokens,) = planned.token_files
    assert not tokens.exists, "a plan writes nothing"
    phases: list[str] = []

    report = flow.run(planned, tmp_path, [], lambda at: phases.append(at.phase), probe=False)

    assert report.result.status == "ok", report.result.reason
    assert phases[0] == "tokenizing text.jsonl: 100%"
    (start, *_) = next(tmp_path.glob(f"*/{STEPS_FOLDER}/rank-00000.jsonl")).read_text().splitlines()
    assert json.loads(start)["data"]["source"] == "indexed"
    again = plan(text, tmp_path)
    assert again.token_files == planned.token_files and again.token_files[0].exists
    assert again.spec.key == planned.spec.key
    assert files_of(tokens.prefix)[0].parent == tmp_path / "tokens"


def test_another_text_or_tokenizer_is_tokenized_again(text: Path, tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text(text.read_text() + '\n{"text": "x"}')
    (tmp_path / "tokenizer.json").write_bytes((text.parent / "tokenizer.json").read_bytes())

    prefixes = {plan(path, tmp_path).spec.data.path for path in (text, tmp_path / "text.jsonl")}

    assert len(prefixes) == 2


def test_a_vocabulary_without_room_is_refused(text: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"smaller than the 2048 tokens.*model.vocab_size=2048"):
        plan(text, tmp_path, "model.vocab_size=2000")


def test_indexed_data_is_sought_by_its_prefix(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not the prefix of a"):
        plan(tmp_path / "x", tmp_path, "data.source=indexed", "data.tokenizer=null")
    blend = (f"data.blend=[[{tmp_path / 'x'}, 1]]", "data.path=null", "data.tokenizer=null")
    with pytest.raises(UserError, match=r"data\.blend: .*x is not the prefix"):
        plan(tmp_path / "x", tmp_path, "data.source=indexed", *blend)
