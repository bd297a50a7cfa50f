"""The texts of the small siblings: from every machine's Python, and the same at every call."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from paceline.core.errors import SystemFaultError
from paceline.mlperf.run import tiny_text
from paceline.mlperf.run.tiny_text import MOST_BYTES, PIECE_BYTES, Domain, text_of


@pytest.mark.parametrize(("domain", "word"), [("code", b"def "), ("prose", b"statement")])
def test_a_text_is_long_enough_to_train_on_and_always_the_same(domain: Domain, word: bytes):
    text = text_of(domain)

    assert 200_000 < len(text) <= MOST_BYTES
    assert text.count(word) > 100
    assert text == text_of(domain)


def test_the_two_domains_share_no_text():
    code, prose = text_of("code"), text_of("prose")

    lines = {line for line in prose.split(b"\n") if len(line) > 40}
    assert len(lines) > 1000
    assert len(lines & set(code.split(b"\n"))) < 0.02 * len(lines)


def test_the_end_that_is_held_out_is_like_the_rest():
    text = text_of("code")

    shares = [part.count(b"self") / len(part) for part in (text[: len(text) // 2], text[-100_000:])]
    assert shares[1] == pytest.approx(shares[0], rel=0.3)


def test_pieces_are_put_in_another_order(monkeypatch: pytest.MonkeyPatch):
    pieces = [bytes([at]) * PIECE_BYTES for at in range(40)]
    monkeypatch.setattr(tiny_text, "_reference", lambda: [b"".join(pieces)])

    text = text_of("prose")

    order = [text[at] for at in range(0, len(text), PIECE_BYTES)]
    assert sorted(order) == list(range(40)) and order != sorted(order)


def test_a_text_that_is_too_long_is_cut_at_a_piece(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiny_text, "_reference", lambda: [bytes(5 * PIECE_BYTES)])
    monkeypatch.setattr(tiny_text, "MOST_BYTES", 2 * PIECE_BYTES + 1)

    assert len(text_of("prose")) == 2 * PIECE_BYTES


def test_sources_of_other_packages_and_of_tests_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("a.py", "b.txt", "pkg/c.py", "test/d.py", "site-packages/e.py", "pydoc_data/f.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"<{name}>")
    monkeypatch.setattr(tiny_text.sysconfig, "get_path", lambda _: str(tmp_path))

    assert sorted(text_of("code").decode().replace("><", ">|<").split("|")) == [
        "<a.py>",
        "<pkg/c.py>",
    ]


def test_a_python_without_the_reference_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pydoc_data", ModuleType("pydoc_data"))
    monkeypatch.delitem(sys.modules, "pydoc_data.topics", raising=False)

    with pytest.raises(SystemFaultError, match="comes without the texts that help"):
        text_of("prose")
