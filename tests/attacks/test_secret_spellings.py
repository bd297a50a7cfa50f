"""Secrets by name in every spelling that a file or a terminal gives them."""

from __future__ import annotations

import html
import json
import os
import shlex
from pathlib import Path

import pytest

from paceline.core.secrets import REDACTED, clean, has_secret, redact
from paceline.core.value import Value
from paceline.files.documents import write_text, write_value

VALUES = {
    "quote": 'pa"ss"word1',
    "apostrophe": "pa'ssword1",
    "backslash": "pa\\ss\\word1",
    "tab": "pa\tssword1",
    "control": "pa\x01ss\x1b[31mword1",
    "markup": "pa<ss>&word1",
    "letters": "pässwörd1",
    "lines": "first-line1\nsecond-line2",
    "slash": "/pass/word1",
    "point": ".password1",
    "tilde": "~password1",
    "6 letters": "hunter",
    "7 letters": "letmein",
    "11 letters": "sesameopens",
}


class Text(Value):
    """A document with a text."""

    text: str


@pytest.fixture(params=VALUES)
def value(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SITE_PASSWORD", VALUES[request.param])
    return VALUES[request.param]


@pytest.mark.parametrize("before", ["", "\n", "x: ", "\t", "é "])
def test_no_file_has_it(value: str, before: str, tmp_path: Path) -> None:
    texts = {
        "plain": value,
        "json": json.dumps({"text": before + value}),
        "json-8": json.dumps({"text": before + value}, ensure_ascii=False),
        "python": repr(before + value),
        "html": html.escape(value),
        "shell": shlex.quote(value),
    }
    for name, text in texts.items():
        write_text(tmp_path / name, before + text)
        written = (tmp_path / name).read_text()
        assert REDACTED in written and value not in written, name
        assert "word1" not in written and "line2" not in written, written
    write_value(tmp_path / "value", Text(text=before + value))
    assert value not in json.loads((tmp_path / "value").read_text())["text"]


def test_no_terminal_shows_it(value: str) -> None:
    shown = clean(f"error: cannot log in with {value}: refused")
    assert value not in shown and "word1" not in shown and "line2" not in shown
    assert shown.startswith(f"error: cannot log in with {REDACTED}") and "refused" in shown


@pytest.mark.parametrize("password", ["p'w1", "p\\w1", "it's\\here"])
def test_a_password_in_a_url_may_have_quotes(password: str) -> None:
    text = f"fetching https://robot:{password}@registry.example/img failed"
    assert redact(text) == f"fetching https://{REDACTED}@registry.example/img failed"
    assert password not in redact(json.dumps(text))


def test_private_keys_of_pgp_have_a_form() -> None:
    block = (
        "-----BEGIN PGP PRIVATE " + "KEY BLOCK-----\n\nlQOYBF\n-----END PGP PRIVATE KEY BLOCK-----"
    )
    assert has_secret(block) and redact(f"a {block} b") == f"a {REDACTED} b"
    assert "lQOYBF" not in redact(block.partition("-----END")[0])


def test_places_and_amounts_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", "/tmp/agent.123")
    monkeypatch.setenv("MAX_TOKENS", "4096000")
    text = "socket /tmp/agent.123 takes 4096000 tokens"
    assert redact(text, os.environ) == text
