"""Run folders: written whole or not at all, found by name, honest about who is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest

from paceline import __version__
from paceline.core.errors import SystemFaultError, UserError
from paceline.core.result import Status
from paceline.files.documents import write_text, write_value
from paceline.files.run_folder import (
    RUN_FILE,
    Controller,
    RunRecord,
    boot_id,
    current_status,
    find_run,
    folder_name,
    new_run_folder,
    read_record,
    run_folders,
    runs_root,
    this_controller,
)
from tests.example import make_spec


def make_record(status: Status = "ok", **fields: object) -> RunRecord:
    values: dict[str, object] = {
        "name": "x",
        "created": "2026-01-01T00:00:00+00:00",
        "command": ("paceline", "run"),
        "spec": make_spec(),
        "status": status,
        "paceline_version": __version__,
    }
    return RunRecord.model_validate({**values, **fields})


def make_run(root: Path, name: str, **fields: object) -> Path:
    write_value(root / name / RUN_FILE, make_record(name=name, **fields))
    return root / name


def test_a_record_survives_the_round_trip(tmp_path: Path):
    record = make_record(controller=this_controller())
    write_value(tmp_path / RUN_FILE, record)
    assert read_record(tmp_path) == record


def test_a_failed_write_leaves_the_old_file_and_no_temporary_file(tmp_path: Path):
    path = tmp_path / "a.json"
    write_text(path, "old")
    with pytest.raises(UserError, match="cannot be written as UTF-8"):
        write_text(path, "new \ud800")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_file_that_does_not_fit_on_the_disk_is_one_clear_error_and_keeps_the_old_file(
    tmp_path: Path,
):
    write_text(tmp_path / "a.json", "old")
    program = (
        "import resource, signal; from pathlib import Path\n"
        "from paceline.files.documents import write_text\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        f"write_text(Path({str(tmp_path / 'a.json')!r}), 'x' * 5000)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "SystemFaultError" in done.stderr and "cannot be written: File too large" in done.stderr
    assert [p.read_text() for p in tmp_path.iterdir()] == ["old"]


def test_a_place_that_cannot_be_written_is_one_clear_error(tmp_path: Path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(SystemFaultError, match="run folder cannot be created"):
        new_run_folder(blocked, make_spec())


def test_equal_runs_of_one_day_get_folders_of_their_own(tmp_path: Path):
    first, second = (new_run_folder(tmp_path, make_spec()) for _ in range(2))
    assert first != second and second.name == f"{first.name}-2"


def test_the_name_says_what_ran():
    name = folder_name(make_spec(), datetime(2026, 1, 2, tzinfo=UTC), "night")
    assert name.startswith("2026-01-02-example-night-dp2-2xcpu-")


@pytest.mark.parametrize("recipe", ["../../etc", "a/b", "</script><img onerror=x>", "  ", "\n"])
def test_a_hostile_name_stays_one_plain_folder(tmp_path: Path, recipe: str):
    folder = new_run_folder(tmp_path, make_spec(recipe=recipe))
    assert folder.parent == tmp_path and "/" not in folder.name and "<" not in folder.name


def test_a_run_is_found_by_folder_prefix_tag_and_last(tmp_path: Path):
    old = make_run(tmp_path, "2026-01-01-a", created="2026-01-01T00:00:00+00:00")
    new = make_run(tmp_path, "2026-01-02-b", created="2026-01-02T00:00:00+00:00", tag="night")
    assert find_run(tmp_path, str(old)) == old
    assert find_run(tmp_path, "2026-01-01") == old
    assert find_run(tmp_path, "night") == find_run(tmp_path, "last") == new
    with pytest.raises(UserError, match="matches 2 runs"):
        find_run(tmp_path, "2026")
    with pytest.raises(UserError, match="is not in"):
        find_run(tmp_path, "nothing")


def test_no_runs_is_an_error_that_says_how_to_start(tmp_path: Path):
    with pytest.raises(UserError, match="paceline run tiny-llama"):
        find_run(tmp_path, "last")


def test_a_run_whose_controller_is_gone_is_incomplete():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    gone = Controller(pid=process.pid, boot_id=boot_id(), started_unix=0, host=os.uname().nodename)
    assert current_status(make_record("running", controller=gone)) == "incomplete"
    assert current_status(make_record("ok", controller=gone)) == "ok"


def test_a_run_from_before_the_last_boot_is_incomplete():
    me = this_controller().model_copy(update={"boot_id": "another"})
    assert current_status(make_record("running", controller=me)) == "incomplete"


def test_another_process_with_the_same_pid_is_not_the_controller():
    me = this_controller()
    by_clock = me.model_copy(update={"started_ticks": None})
    impostors = (
        by_clock.model_copy(update={"started_unix": me.started_unix - 100}),
        me.model_copy(update={"started_ticks": (me.started_ticks or 0) + 1}),
    )
    for same in (me, by_clock):
        assert current_status(make_record("running", controller=same)) == "running"
    for impostor in impostors[: 2 if sys.platform == "linux" else 1]:
        assert current_status(make_record("running", controller=impostor)) == "incomplete"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts ticks since boot")
def test_a_changed_clock_does_not_end_a_run():
    me = this_controller()
    before = me.model_copy(update={"started_unix": me.started_unix - 3600})
    assert current_status(make_record("running", controller=before)) == "running"


def test_a_controller_that_nobody_has_waited_for_is_gone():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = psutil.Process(process.pid).create_time()
    run = make_record(
        "running",
        controller=Controller(
            pid=process.pid, boot_id=boot_id(), started_unix=started, host=os.uname().nodename
        ),
    )
    assert current_status(run) == "running"
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and still a zombie
    assert current_status(run) == "incomplete"
    process.communicate()


def test_a_torn_record_is_one_clear_error(tmp_path: Path):
    folder = make_run(tmp_path, "a")
    text = (folder / RUN_FILE).read_text()
    (folder / RUN_FILE).write_text(text[: len(text) // 2])
    with pytest.raises(UserError, match=f"{RUN_FILE}: is not valid JSON: EOF"):
        read_record(folder)
    assert run_folders(tmp_path) == [folder]


def test_the_place_of_runs_is_the_option_then_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PACELINE_RUNS", raising=False)
    assert runs_root(None) == Path("runs")
    monkeypatch.setenv("PACELINE_RUNS", "/a")
    assert runs_root(None) == Path("/a") and runs_root(Path("b")) == Path("b")
