"""Every source becomes the tokens that it holds, and says what is wrong with it."""

from __future__ import annotations

import json
import struct
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.trainer.config import ConfigError, parse_config
from paceline.trainer.data import corpus
from paceline.trainer.data.corpus import TokenCorpus, load_corpus
from paceline.trainer.data.texts import END_OF_DOCUMENT, pack
from tests.trainer.example import settings


def load(steps: int = 6, **changes: Any) -> Any:
    """The corpus of these settings: by default 6 steps of 4 windows of 32 tokens."""
    return load_corpus(parse_config(settings(steps=steps, **changes)))


def test_documents_are_packed_with_an_end_mark_behind_each() -> None:
    tokens = pack([b"ab", b"", b"\xff"], limit=100).tolist()

    assert tokens == [97, 98, END_OF_DOCUMENT, 255, END_OF_DOCUMENT]


def test_packing_stops_where_the_limit_is() -> None:
    asked = []

    def texts() -> Any:
        for text in (b"abc", b"def", b"ghi"):
            asked.append(text)
            yield text

    assert pack(texts(), limit=5).tolist() == [97, 98, 99, END_OF_DOCUMENT, 100]
    assert asked == [b"abc", b"def"]


def test_windows_share_one_token_and_leave_none_out() -> None:
    found = TokenCorpus(torch.arange(10, dtype=torch.int16), seq_len=4, vocab_size=10)

    assert found.num_windows == 2
    assert [found.window(i).tolist() for i in range(2)] == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]
    assert TokenCorpus(torch.arange(4), 4, 10).num_windows == 0
    assert TokenCorpus(torch.arange(0), 4, 10).num_windows == 0


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hé" * 300)

    found = load(source="text", path=str(tmp_path / "a.txt"))

    assert found.window(0)[:4].tolist() == [104, 0xC3, 0xA9, 104]
    assert found.num_tokens == 6 * 4 * 32 + 1


def test_no_more_of_a_text_is_read_than_the_run_can_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "huge.txt"
    with path.open("wb") as file:
        file.truncate(2**40)

    assert load(source="text", path=str(path)).num_tokens == 6 * 4 * 32 + 1
    monkeypatch.setattr(corpus, "MAX_TEXT_TOKENS", 500)
    assert load(source="text", path=str(path)).num_tokens == 500


def test_jsonl_records_are_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "ab", "x": 1}\n\n{"body": "' + "c" * 900 + '"}\n')

    found = load(source="jsonl", path=str(path), text_key="body")

    assert found.tokens[:5].tolist() == [97, 98, END_OF_DOCUMENT, 99, 99]


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", r"a\.jsonl:2: not valid JSON"), ("[1]", "2: the record has no text in field 'text'"),
     ('{"text": 3}', "2: the record has no text"), ('{"body": "a"}', "2: the record has no text")],
)  # fmt: skip
def test_a_bad_jsonl_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")

    with pytest.raises(ConfigError, match=message):
        load(source="jsonl", path=str(path))


@pytest.mark.parametrize(
    ("dtype", "code", "largest"),
    [("uint16", "H", 65535), ("uint32", "I", 70000), ("int32", "i", 70000), ("int64", "q", 70000)],
)
def test_token_files_of_every_width_are_read(
    tmp_path: Path, dtype: str, code: str, largest: int
) -> None:
    ids = [largest, 0, 5] * 300
    (tmp_path / "a.bin").write_bytes(struct.pack(f"<{len(ids)}{code}", *ids))

    found = load(
        source="tokens", path=str(tmp_path / "a.bin"), token_dtype=dtype, vocab_size=80_000
    )

    assert found.window(0).tolist() == (ids * 2)[:33]
    assert found.num_tokens == 6 * 4 * 32 + 1


def test_an_unknown_token_is_named_before_a_device_sees_it(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(struct.pack("<900H", *[320] * 900))
    found = load(source="tokens", path=str(tmp_path / "a.bin"))

    with pytest.raises(ConfigError, match=r"token 320 .* outside the vocabulary of 320"):
        found.window(0)


def test_a_torn_token_file_is_refused(tmp_path: Path) -> None:
    for size in (0, 7):
        (tmp_path / "a.bin").write_bytes(b"x" * size)
        with pytest.raises(ConfigError, match="empty or not a whole number of uint16"):
            load(source="tokens", path=str(tmp_path / "a.bin"))


@pytest.mark.parametrize("source", ["text", "jsonl", "tokens"])
def test_a_source_without_its_file_is_refused(source: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.path: source {source} needs a file"):
        load(source=source)


def test_text_needs_room_for_bytes_in_the_vocabulary() -> None:
    with pytest.raises(ConfigError, match="vocab_size 256: text needs at least 257"):
        load(source="stdlib", vocab_size=256)


def test_the_standard_library_is_real_text_of_this_interpreter() -> None:
    found = load(steps=300, source="stdlib")
    text = bytes(t for t in found.tokens.tolist() if t < 256)
    first = text[: text.find(b"\n", 200)]

    sources = Path(sysconfig.get_path("stdlib")).rglob("*.py")
    assert any(path.read_bytes().startswith(first) for path in sources)
    assert found.num_tokens == 300 * 4 * 32 + 1
    assert END_OF_DOCUMENT in found.tokens


def test_the_standard_library_is_read_in_an_order_drawn_from_the_seed() -> None:
    one, same, other = (load(source="stdlib", seed=seed).tokens for seed in (1, 1, 2))

    assert torch.equal(one, same) and not torch.equal(one, other)


def test_random_windows_are_the_same_everywhere_and_never_twice() -> None:
    one, same = load(source="synthetic"), load(source="synthetic")
    other = load(source="synthetic", seed=2)
    windows = [one.window(i) for i in range(50)]

    assert all(torch.equal(w, same.window(i)) for i, w in enumerate(windows))
    assert len({tuple(w.tolist()) for w in [*windows, *map(other.window, range(50))]}) == 100
    assert int(torch.cat(windows).max()) == 319 and int(torch.cat(windows).min()) == 0


def test_settings_are_json_all_through() -> None:
    assert json.loads(json.dumps(settings())) == settings()
