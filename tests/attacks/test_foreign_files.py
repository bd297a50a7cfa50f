"""Files of others that are read in passing: sizes, kinds, numbers and characters of no file."""

from __future__ import annotations

import io
import json
import os
import random
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.core.text import encodable
from paceline.engines.deepspeed_chat.launch import lacks_tokenizer_name
from paceline.engines.launch.environments import MANIFEST, VARIABLE, installed
from paceline.estimate.validation import read_table
from paceline.files import hf_hub
from paceline.files.documents import parse_json
from paceline.runs import command_pairs
from paceline.runs.run_environment import recorded_environment
from paceline.staging.conversions.tokenization import _text_of
from tests.attacks.surfaces import SURFACES

BY_NAME = {surface.name: surface for surface in SURFACES}
GOOD = {"versions": {"a": "1"}, "size_bytes": 7, "requirements": ["a"], "isolated": False}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("size_bytes", 1e999), ("size_bytes", -1), ("size_bytes", "7x"), ("versions", ["a"])),
        *(("requirements", 7), ("isolated", None), ("other", 1)),
    ],
)
def test_an_environment_with_a_damaged_manifest_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object
):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    manifest = tmp_path / "torchtitan" / MANIFEST
    manifest.parent.mkdir()
    manifest.write_text(json.dumps(GOOD))
    environment = installed("torchtitan")
    assert environment is not None and environment.size_bytes == 7
    manifest.write_text(json.dumps({**GOOD, name: value}).replace("Infinity", "1e999"))
    assert installed("torchtitan") is None
    manifest.unlink()
    os.mkfifo(manifest)
    assert installed("torchtitan") is None


@pytest.mark.parametrize("kind", ["pipe", "device", "link"])
def test_the_trainer_in_a_run_folder_is_a_file_of_the_folder(tmp_path: Path, kind: str):
    (tmp_path / "outside.py").write_text("secret = 1")
    (program := tmp_path / "run" / "trainer").mkdir(parents=True)
    (program / "main.py").write_text("pass")
    with_program = recorded_environment(tmp_path / "run", {})
    path = program / "other.py"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else "../../outside.py")
    assert with_program != recorded_environment(tmp_path / "run", {})
    path.unlink()
    assert with_program == recorded_environment(tmp_path / "run", {})


@pytest.mark.parametrize("text", ["[]", "7", "null"])
def test_a_config_that_is_no_mapping_says_nothing(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_text(text)
    assert not lacks_tokenizer_name(tmp_path)


def test_half_a_character_becomes_a_question_mark():
    text = json.dumps({"\ud800": ["a\udfffb", "é", 1e308]})
    assert encodable(json.loads(text), text) == {"?": ["a?b", "é", 1e308]}
    with pytest.raises(ValueError):
        parse_json(text)


@pytest.mark.parametrize(
    ("name", "part", "old"),
    [("traces", "trace.json", b'"gemm"'), ("MLPerf results", "result_0.txt", b'"Example"')],
)
def test_half_a_character_in_a_name_is_printed(tmp_path: Path, name: str, part: str, old: bytes):

    parts = BY_NAME[name].example(random.Random(0))
    assert old in parts[part]
    BY_NAME[name].read({**parts, part: parts[part].replace(old, b'"a\\ud800b"')}, tmp_path)


def test_a_record_of_endless_depth_is_a_clear_error():
    with pytest.raises(UserError, match="invalid JSON: is nested too deeply"):
        _text_of(b"[" * 100_000, "text", "a.jsonl")


def test_a_table_without_end_is_refused(tmp_path: Path):
    (tmp_path / "table.csv").symlink_to("/dev/zero")
    with pytest.raises(UserError, match="is not a regular file"):
        read_table(tmp_path / "table.csv")


def test_only_the_end_of_a_long_output_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command_pairs, "MAX_READ_CHARS", 12)
    monkeypatch.setenv("MY_TOKEN", "Qw8Xk2Zp9")
    path = tmp_path / "a.log"
    path.write_bytes(b"first\nkey Qw8Xk2Zp9 \xff\n" + b"x" * 100 + b"\nloss: 2.5\n")
    assert command_pairs._without_secrets(path) == "x\nloss: 2.5\n"
    kept = path.read_text()
    assert "Qw8Xk2Zp9" not in kept and kept.startswith("first\nkey ") and "loss: 2.5" in kept


class Endless(io.RawIOBase):
    """An answer that never ends."""

    def read1(self, size: int) -> bytes:
        return b"x" * size


def test_a_config_without_end_is_not_downloaded(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(OSError, match="too large"):
        hf_hub._content(Endless())
    monkeypatch.setattr(hf_hub, "MAX_DOWNLOAD_S", -1)
    with pytest.raises(OSError, match="takes too long"):
        hf_hub._content(io.BytesIO(b"{}"))
    monkeypatch.undo()
    assert hf_hub._content(io.BytesIO(b"{}")) == b"{}"
