"""Text becomes Megatron's indexed data sets: the same bytes by any number of workers."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from paceline.core.errors import UserError
from paceline.staging.conversions import stdlib_corpus, tokenization
from paceline.staging.conversions.indexed import IndexedWriter, files_of
from paceline.staging.conversions.tokenization import end_id, load_tokenizer, tokenize
from paceline.trainer.data.indexed_corpus import HEAD, read_indexed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tokenizer.json, and records one of which is empty and one of which names the end mark."""
    folder = tmp_path_factory.mktemp("made")
    stdlib_corpus.make_tokenizer(folder)
    texts = ["def f(x):\n    return x\n", "", "héllo <|endoftext|> 世界", *map(str, range(300))]
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "a.jsonl").write_text("\n\n".join(lines) + "\n")
    return folder


def num_documents(prefix: Path) -> int:
    """Documents of an index, empty ones included."""
    return HEAD.unpack(files_of(prefix)[1].read_bytes()[: HEAD.size])[-1] - 1


def test_the_files_are_laid_out_as_megatron_reads_them(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a.b", np.dtype("uint16")) as writer:
        writer.add_documents([[1, 2, 3], [], [70]])

    data, index = (path.read_bytes() for path in files_of(tmp_path / "a.b"))

    assert data == struct.pack("<4H", 1, 2, 3, 70)
    assert index == b"MMIDIDX\0\0" + struct.pack("<QBQQ2i2q4q", 1, 8, 2, 4, 3, 1, 0, 6, 0, 1, 1, 2)


def test_two_writers_of_one_data_set_do_not_mix(tmp_path: Path) -> None:
    dtype = np.dtype("uint16")
    with IndexedWriter(tmp_path / "a", dtype) as later:
        with IndexedWriter(tmp_path / "a", dtype) as earlier:
            later.add_documents([[1] * 10_000])
            earlier.add_documents([[2] * 10_000])
        assert set(read_indexed(str(tmp_path / "a")).tokens.tolist()) == {2}

    assert read_indexed(str(tmp_path / "a")).tokens.tolist() == [1] * 10_000
    assert {path.name for path in tmp_path.iterdir()} == {"a.bin", "a.idx"}


def test_every_document_comes_back_with_its_end(folder: Path, tmp_path: Path) -> None:
    how = tokenization.tokenization(folder)
    seen: list[tuple[int, int]] = []

    count = tokenize(
        [folder / "a.jsonl"], tmp_path / "a", how, progress=lambda *at: seen.append(at)
    )

    kept, tokenizer = read_indexed(str(tmp_path / "a.idx")), load_tokenizer(how.tokenizer)
    documents = [ids.tolist() for ids in kept.tokens.split(kept.lengths.tolist())]
    texts = [tokenizer.decode(ids[:-1]) for ids in documents]
    assert texts[:3] == ["def f(x):\n    return x\n", "héllo  世界", "0"]
    assert num_documents(tmp_path / "a") == 303 and len(texts) == 302
    assert {ids[-1] for ids in documents} == {end_id(how.tokenizer)}
    assert count == len(kept.tokens)
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
    assert num_documents(tmp_path / "together") == 606


def test_a_text_file_is_one_document(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n" * 50)
    how = tokenization.tokenization(folder, text_key=None)

    tokenize([tmp_path / "a.txt"], tmp_path / "a", how)

    kept = read_indexed(str(tmp_path / "a"))
    assert num_documents(tmp_path / "a") == 1
    assert load_tokenizer(how.tokenizer).decode(kept.tokens.tolist()) == "one\n\ntwo\n" * 50


@pytest.mark.parametrize(("line", "what"), [('{"a": 1}', "no text in"), ("{", "invalid JSON")])
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

    with pytest.raises(UserError, match="give the end-of-document token"):
        tokenization.tokenization(tmp_path)
    with pytest.raises(UserError, match="did you mean '<over>'"):
        tokenization.tokenization(tmp_path, end="<ovr>")
    assert tokenization.tokenization(tmp_path, end="<over>").end == 0
