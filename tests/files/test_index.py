"""The index agrees with the folders and can always be rebuilt from them."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import SystemFaultError
from paceline.core.result import Result
from paceline.files.documents import write_value
from paceline.files.index import COLUMNS, RUNS, Index, KnownResults, listing
from paceline.files.run_folder import RESULT_FILE, RUN_FILE
from paceline.runs.outcome import evaluate
from tests.files.test_run_folder import make_record, make_run
from tests.runs.example import write_run


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PACELINE_DB", raising=False)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def computed(folder: Path) -> Result:
    return evaluate(folder).result


def not_computed(folder: Path) -> Result:
    pytest.fail(f"{folder} was computed again")


def rows(root: Path) -> list[dict[str, Any]]:
    listed = listing(root, computed)
    assert (listed.left_out, listed.fault) == ([], None)
    return listed.rows


def names(root: Path) -> list[str]:
    return [row["run"] for row in rows(root)]


def index_file(tmp_path: Path) -> Path:
    (file,) = (tmp_path / "cache").rglob("*.sqlite")
    return file


def alter(file: Path, *statements: str) -> None:
    with closing(sqlite3.connect(file)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def test_new_folders_appear_and_gone_ones_vanish(root: Path):
    make_run(root, "b", created="2026-01-01")
    make_run(root, "a", created="2026-01-02")
    assert names(root) == ["b", "a"]
    (root / "b" / RUN_FILE).unlink()
    assert names(root) == ["a"]


def test_a_running_run_is_read_again(root: Path):
    make_run(root, "a", status="running")
    assert rows(root)[0]["status"] == "running"
    write_value(root / "a" / RUN_FILE, make_record("failed", name="a"))
    assert rows(root)[0]["status"] == "failed"


def test_a_finished_run_is_computed_once_and_then_read_from_the_index(root: Path):
    write_run(root, "a")
    first = rows(root)
    assert listing(root, not_computed).rows == first
    assert first[0]["tokens_per_s"] == pytest.approx(256 / 0.2, rel=0.01)
    assert tuple(first[0]) == COLUMNS


@pytest.mark.parametrize("changed", ["run.json", "result.json", "steps/rank-00001.jsonl"])
def test_a_file_written_again_makes_its_run_read_again(root: Path, changed: str):
    folder = write_run(root, "a")
    write_value(folder / RESULT_FILE, computed(folder))
    rows(root)
    (folder / changed).write_bytes((folder / changed).read_bytes())
    read: list[str] = []

    def noted(folder: Path) -> Result:
        read.append(folder.name)
        return computed(folder)

    listing(root, noted)
    listing(root, noted)
    assert read == ["a"]


def test_a_lost_rank_file_changes_the_status(root: Path):
    folder = write_run(root, "a")
    assert rows(root)[0]["status"] == "ok"
    (folder / "steps/rank-00001.jsonl").unlink()
    assert rows(root)[0]["status"] == "failed"


def test_a_result_that_states_another_speed_is_told_and_not_believed(root: Path):
    folder = write_run(root, "a")
    result = computed(folder)
    speed = result.metrics["tokens_per_s"]
    faster = speed.model_copy(update={"value": 99_000.0})
    forged = {"metrics": {**result.metrics, "tokens_per_s": faster}, "status": "failed"}
    write_value(folder / RESULT_FILE, result.model_copy(update=forged))

    for _ in range(2):
        listed = listing(root, computed)
        assert listed.rows[0]["tokens_per_s"] == speed.value and listed.rows[0]["status"] == "ok"
        said = "a: result.json states status failed, tokens_per_s 99000, but its raw files do not"
        assert listed.contradictions == (said,)
    write_value(folder / RESULT_FILE, result)
    assert listing(root, computed).contradictions == ()


def test_known_results_are_whole_and_computed_where_the_index_is_old(root: Path):
    folder = write_run(root, "a")
    result = computed(folder)
    rows(root)
    write_run(root, "b")
    assert KnownResults(not_computed)(folder) == result
    assert KnownResults(computed)(root / "b") == computed(root / "b")


def test_a_torn_result_is_computed_from_the_raw_files(root: Path):
    folder = make_run(root, "a", status="failed")
    (folder / RESULT_FILE).write_text("{")
    assert rows(root)[0]["status"] == "failed"


def test_the_index_can_be_deleted_and_rebuilt(root: Path, tmp_path: Path):
    make_run(root, "a")
    before = rows(root)
    index_file(tmp_path).unlink()
    assert Index.open(root, rebuild=True).rebuild(computed) == (1, [])
    assert rows(root) == before


def test_a_torn_folder_is_left_out_and_named(root: Path):
    make_run(root, "a")
    write_value(root / "b" / RUN_FILE, make_record("failed", name="b"))
    assert names(root) == ["a", "b"]
    (root / "b" / RUN_FILE).write_text("{")
    listed = listing(root, computed)
    assert [row["run"] for row in listed.rows] == ["a"] and "b/run.json" in listed.left_out[0]
    assert Index.open(root).rebuild(computed) == (1, listed.left_out)


@pytest.mark.parametrize("content", [b"x", b"SQLite format 3\0" + b"x" * 9000])
def test_a_file_that_is_no_database_is_made_anew(root: Path, tmp_path: Path, content: bytes):
    make_run(root, "a")
    before = rows(root)
    index_file(tmp_path).write_bytes(content)
    assert rows(root) == before


def test_a_table_of_another_form_is_made_anew(root: Path, tmp_path: Path):
    make_run(root, "a")
    before = rows(root)
    alter(index_file(tmp_path), f"drop table {RUNS.name}", f"create table {RUNS.name} (wrong text)")
    assert rows(root) == before


def test_a_table_that_takes_no_rows_is_told_and_rebuilt(root: Path, tmp_path: Path):
    make_run(root, "a", status="running")
    before = rows(root)
    alter(
        index_file(tmp_path),
        f"alter table {RUNS.name} add x text not null default ''",
        f"create trigger t before insert on {RUNS.name} begin select raise(abort, 'no'); end",
    )
    listed = listing(root, computed)
    assert listed.rows == before and "paceline runs index" in str(listed.fault)
    assert Index.open(root, rebuild=True).rebuild(computed) == (1, [])
    assert rows(root) == before


def test_an_index_that_another_process_holds_does_not_stop_the_list(root: Path, tmp_path: Path):
    make_run(root, "a", status="running")
    before = rows(root)
    with closing(sqlite3.connect(index_file(tmp_path))) as other:
        other.execute("begin exclusive")
        listed = listing(root, computed)
    assert listed.rows == before and "locked" in str(listed.fault)


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
    with pytest.raises(SystemFaultError, match="PACELINE_DB"):
        listing(root, computed)


@pytest.mark.parametrize("url", ["no url", "postgresql://host:port/x", "nothing://x"])
def test_a_url_that_names_no_database_is_one_clear_error(
    root: Path, monkeypatch: pytest.MonkeyPatch, url: str
):
    monkeypatch.setenv("PACELINE_DB", url)
    with pytest.raises(SystemFaultError, match="check PACELINE_DB"):
        Index.open(root)


def test_a_table_of_another_version_is_left_alone(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make_run(root, "a")
    expected = rows(root)
    file = tmp_path / "mine.sqlite"
    alter(file, "create table runs_v0 (run text)", "insert into runs_v0 values ('kept')")
    monkeypatch.setenv("PACELINE_DB", f"sqlite:///{file}")
    assert rows(root) == expected
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute("select run from runs_v0").fetchall() == [("kept",)]


def test_a_database_of_the_user_is_never_deleted(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "mine.sqlite"
    alter(file, f"create table {RUNS.name} (wrong text)")
    monkeypatch.setenv("PACELINE_DB", f"sqlite:///{file}")
    with pytest.raises(SystemFaultError, match="check PACELINE_DB"):
        Index.open(root, rebuild=True)
    alter(file, f"insert into {RUNS.name} values ('kept')")
