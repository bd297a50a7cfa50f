"""Data of the small siblings: made once, named by its content, whoever makes it first."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.mlperf.rules import SIBLINGS
from paceline.mlperf.run import tiny_data
from paceline.mlperf.run.tiny_data import Prepared, prepared


@pytest.fixture(autouse=True)
def a_place_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@contextmanager
def unshown(plan: Any) -> Any:
    raise AssertionError("no base model should be trained here")
    yield


def test_prepared_data_has_a_digest_of_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = prepared(SIBLINGS["llama31_8b_tiny"], "cpu", unshown)
    monkeypatch.setattr(tiny_data, "text_of", lambda domain: b"x" * 1000)
    other = prepared(SIBLINGS["llama31_8b_tiny"], "cpu", unshown)

    assert isinstance(first, Prepared) and first.digest != other.digest
    assert Path(other.overrides[1].removeprefix("data.path=")).read_bytes() == b"x" * 1000


def test_drawings_that_another_series_made_meanwhile_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rename = Path.rename

    def late(folder: Path, target: Path) -> Path:
        shutil.copytree(folder, target)
        return rename(folder, target)

    monkeypatch.setattr(Path, "rename", late)
    data = prepared(SIBLINGS["flux1_tiny"], "cpu", unshown)

    assert Path(data.overrides[1].removeprefix("data.path=")).is_file()
