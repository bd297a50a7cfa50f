"""Text becomes Megatron's indexed data sets: the same bytes by any number of workers."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from paceline.core.errors import UserError
from paceline.staging.conversions import made, tokenization
from paceline.staging.conversions.indexed import IndexedWriter, files_of, read_indexed
from paceline.staging.conversions.tokenization import tokenize
from paceline.staging.conversions.tokenizer import end_id, load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tokenizer.json, and records one of which is empty and one of which names the end mark."""
    folder = tmp_path_factory.mktemp("made")
    made.make_tokenizer(folder)
    texts = ["def f(x):\n    return x\n", "", "héllo <|endoftext|> 世界", *map(str, range(300))]
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "a.jsonl").write_text("\n\n".join(lines) + "\n")
    return folder


def test_the_files_are_laid_out_as_megatron_reads_them(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a.b", np.dtype("uint16")) as writer:
        writer.add_documents([[1, 2, 3], [], [70]])

    data, index = (path.read_bytes() for path in files_of(tmp_path / "a.b"))

    assert data == struct.pack("<4H", 1, 2, 3, 70)
    assert index == b"MMIDIDX\0\0" + struct.pack("<QBQQ2i2q4q", 1, 8, 2, 4, 3, 1, 0, 6, 0, 1, 1, 2)


def test_every_document_comes_back_with_its_end(folder: Path, tmp_path: Path) -> None:
    how = tokenization.tokenization(folder)
    seen: list[tuple[int, int]] = []

    count = tokenize(
        [folder / "a.jsonl"], tmp_path / "a", how, progress=lambda *at: seen.append(at)
    )

    kept, tokenizer = read_indexed(tmp_path / "a.idx"), load_tokenizer(how.tokenizer)
    texts = [tokenizer.decode(kept.sequence(i)[:-1].tolist()) for i in range(len(kept.lengths))]
    assert texts[:3] == ["def f(x):\n    return x\n", "héllo  世界", "0"]
    assert kept.num_documents == 303 and len(texts) == 302
    assert {int(kept.sequence(i)[-1]) for i in range(302)} == {end_id(how.tokenizer)}
    assert count == len(kept.tokens) == kept.lengths.sum()
    assert seen[-1][0] == seen[-1][1] == (folder / "a.jsonl").stat().st_size


def test_the_number_of_workers_changes_no_byte(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenization, "CHUNK_BYTES", 700)
    how, sources = tokenization.tokenization(folder), [folder / "a.jsonl", folder / "a.jsonl"]

    tokenize(sources, tmp_path / "alone", how)
    tokenize(sources, tmp_path / "together", how, workers=2)

    for alone, together in zip(
        files_of(tmp_path / "alone"), files_of(tmp_path / "together"), strict=True
    ):
        assert alone.read_bytes() == together.read_bytes()
    assert read_indexed(tmp_path / "together").num_documents == 606


def test_a_text_file_is_one_document(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n" * 50)
    how = tokenization.tokenization(folder, text_key=None)

    tokenize([tmp_path / "a.txt"], tmp_path / "a", how)

    kept = read_indexed(tmp_path / "a")
    assert kept.num_documents == 1
    assert load_tokenizer(how.tokenizer).decode(kept.tokens.tolist()) == "one\n\ntwo\n" * 50


@pytest.mark.parametrize(("line", "what"), [('{"a": 1}', "no text under"), ("{", "no JSON")])
def test_a_record_without_text_is_named_and_leaves_no_data_set(
    folder: Path, tmp_path: Path, line: str, what: str
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' + line + "\n")

    with pytest.raises(UserError, match=rf"a\.jsonl: byte 14: .*{what}"):
        tokenize([tmp_path / "a.jsonl"], tmp_path / "a", tokenization.tokenization(folder))

    assert not any(path.exists() for path in files_of(tmp_path / "a"))


def test_a_tokenizer_without_a_usual_end_asks_for_its_name(folder: Path, tmp_path: Path) -> None:
    content = (folder / "tokenizer.json").read_text().replace("<|endoftext|>", "<over>")
    (tmp_path / "tokenizer.json").write_text(content)

    with pytest.raises(UserError, match="name the token of an end"):
        tokenization.tokenization(tmp_path)
    with pytest.raises(UserError, match="did you mean '<over>'"):
        tokenization.tokenization(tmp_path, end="<ovr>")
    assert tokenization.tokenization(tmp_path, end="<over>").end == 0


def test_a_torn_data_set_is_named(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a", np.dtype("int32")) as writer:
        writer.add_documents([[1, 2, 3], [4]])
    data, index = files_of(tmp_path / "a")
    whole = index.read_bytes()

    index.write_bytes(whole[:-4])
    with pytest.raises(UserError, match="torn"):
        read_indexed(tmp_path / "a")
    index.write_bytes(whole)
    data.write_bytes(data.read_bytes()[:-4])
    with pytest.raises(UserError, match="12 bytes, and its index speaks of 16"):
        read_indexed(tmp_path / "a")
    index.write_bytes(b"\0" * 100)
    with pytest.raises(UserError, match="no index of Megatron"):
        read_indexed(tmp_path / "a")
