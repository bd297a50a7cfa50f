"""The index says what the folders say, and can always be made anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import SystemFaultError
from paceline.rundir import RUN_FILE, write_value
from paceline.store.index import Index
from tests.test_rundir import make_record, make_run


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PACELINE_DB", raising=False)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def names(root: Path) -> list[str]:
    return [row["run"] for row in Index.open(root).rows(root)]


def test_new_folders_appear_and_gone_ones_vanish(root: Path):
    make_run(root, "a", created="2026-01-01")
    make_run(root, "b", created="2026-01-02")
    assert names(root) == ["a", "b"]
    (root / "a" / RUN_FILE).unlink()
    assert names(root) == ["b"]


def test_a_running_run_is_read_again(root: Path):
    make_run(root, "a", status="running")
    assert Index.open(root).rows(root)[0]["status"] == "running"
    write_value(root / "a" / RUN_FILE, make_record("failed", name="a"))
    assert Index.open(root).rows(root)[0]["status"] == "failed"


def test_the_index_can_be_deleted_and_rebuilt(root: Path, tmp_path: Path):
    make_run(root, "a")
    before = Index.open(root).rows(root)
    for file in (tmp_path / "cache").rglob("*.sqlite"):
        file.unlink()
    assert Index.open(root).rebuild(root) == (1, [])
    assert Index.open(root).rows(root) == before


def test_a_torn_folder_is_left_out_and_named(root: Path):
    make_run(root, "a")
    (root / "b").mkdir()
    (root / "b" / RUN_FILE).write_text("{")
    count, unreadable = Index.open(root).rebuild(root)
    assert count == 1 and "b/run.json" in unreadable[0]


def test_two_roots_do_not_mix(root: Path, tmp_path: Path):
    make_run(root, "a")
    make_run(tmp_path / "other", "b")
    assert names(root) == ["a"] and names(tmp_path / "other") == ["b"]


def test_a_database_that_cannot_be_opened_is_one_clear_error(
    root: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PACELINE_DB", "sqlite:////nonexistent/folder/x.sqlite")
    with pytest.raises(SystemFaultError, match="PACELINE_DB"):
        Index.open(root)
