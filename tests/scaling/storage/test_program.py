"""A host's program measures what is there, says what is not, and leaves nothing behind."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.trainer.measure.disk import BLOCK_BYTES, DiskFile, timed_units
from paceline.trainer.programs.storage import cached_share, figures

SETTINGS = {
    "device": "cpu",
    "operations": ["write", "read", "sample", "checkpoint", "small_file"],
    "processes": [1, 2],
    "seconds": 0.1,
    "size_bytes": 4 * BLOCK_BYTES,
    "sample_bytes": 514,
}


def lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "storage/rank-00000.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@contextmanager
def started(folder: Path, **changes: Any) -> Iterator[subprocess.Popen[bytes]]:
    (folder / "question.json").write_text(json.dumps(SETTINGS | changes))
    command = [sys.executable, "-m", "paceline.trainer.programs.storage", "question.json"]
    process = subprocess.Popen(command, cwd=folder)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_every_operation_is_measured_by_one_and_by_all(tmp_path: Path):
    data = tmp_path / "data"
    data.mkdir()
    absent = str(tmp_path / "absent")
    with started(tmp_path, paths=[str(data), absent, "/proc"]) as process:
        assert process.wait(60) == 0
    measured = [line for line in lines(tmp_path) if line["event"] == "storage"]
    assert [(line["operation"], line["processes"]) for line in measured] == [
        (operation, count) for operation in SETTINGS["operations"] for count in (1, 2)
    ]
    for line in measured:
        assert len(line["rates"]) == line["processes"]
        assert all(rate > 0 for rates in line["rates"] for rate in rates)
        assert line["operation"] not in ("read", "sample") or line["cached_share"] is not None
    faults = {line["part"]: line["reason"] for line in lines(tmp_path) if line["event"] == "fault"}
    assert faults[absent] == "is not a folder on this host" and "/proc" in faults
    (place, *_) = (line for line in lines(tmp_path) if line["event"] == "place")
    assert place["file_system"] and place["free_bytes"] > 0
    assert lines(tmp_path)[-1]["event"] == "end"
    assert list(data.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_nothing_stays_after_a_kill(tmp_path: Path, number: signal.Signals):
    data = tmp_path / "data"
    data.mkdir()
    with started(tmp_path, paths=[str(data)], seconds=300, operations=["write"]) as process:
        while not any(line["event"] == "place" for line in lines(tmp_path)):
            time.sleep(0.02)
        process.send_signal(number)
        process.wait(30)
    deadline = time.monotonic() + 30
    while holders(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert holders(tmp_path) == [] and list(data.iterdir()) == []


def holders(folder: Path) -> list[str]:
    """Processes that still work in the folder."""
    places: list[str] = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        try:
            places += [str(link)] if link.readlink() == folder else []
        except OSError:
            continue
    return places


def test_the_name_is_gone_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    names: list[list[Path]] = []

    def look(self: DiskFile, handle: int, offset: int) -> None:
        names.append(list(tmp_path.iterdir()))
        raise OSError(errno.EINVAL, "O_DIRECT takes nothing after all")

    monkeypatch.setattr(DiskFile, "_write_block", look)
    file = DiskFile(tmp_path / "file", 4 * BLOCK_BYTES, 514, 1, None)
    assert file.direct_fd is None and names in ([], [[]])  # none where it was refused before


def test_a_link_at_the_name_is_not_followed(tmp_path: Path):
    victim, name = tmp_path / "victim", tmp_path / "file"
    file = DiskFile(name, 4 * BLOCK_BYTES, 514, 1, None)
    name.symlink_to(victim)
    for make in (file.small_file, lambda: DiskFile(name, BLOCK_BYTES, 514, 1, None)):
        with pytest.raises(FileExistsError):
            make()
    assert name.is_symlink() and not victim.exists()


def test_samples_larger_than_what_was_written_are_written_first(tmp_path: Path):
    file = DiskFile(tmp_path / "file", 4 * BLOCK_BYTES, BLOCK_BYTES + 1, 1, None)
    file.write()
    file.prepare("sample")
    assert file.written == 2 * BLOCK_BYTES
    assert timed_units(file, "sample", 0.0)[0][0] == BLOCK_BYTES + 1
    huge = DiskFile(tmp_path / "file", BLOCK_BYTES, BLOCK_BYTES + 1, 1, None)
    with pytest.raises(ValueError, match="is smaller than a sample of"):
        huge.prepare("sample")


def test_processes_pool_their_pages_and_few_units_have_no_percentile(tmp_path: Path):
    assert cached_share([(1, 10), (0, 90)]) == 0.01
    assert cached_share([(0, 10), None]) is None
    file = DiskFile(tmp_path / "file", BLOCK_BYTES, 514, 1, None)
    for number, slow in ((99, 99.0), (100, 99.0), (101, 100.0), (200, 198.0)):
        units = [(1, float(second)) for second in range(number, 0, -1)]
        assert figures(file, "write", None, units)["slow_unit_s"] == slow


def test_what_lies_in_the_page_cache_is_seen(tmp_path: Path):
    file = DiskFile(tmp_path / "file", 4 * BLOCK_BYTES, 514, 1, None)
    assert list(tmp_path.iterdir()) == []
    for _ in range(4):
        assert file.write() == BLOCK_BYTES
    assert file.written == 4 * BLOCK_BYTES
    file.prepare("sample")
    timed_units(file, "sample", 0.0)
    assert file.view is not None
    assert len(file.view[:]) == file.written  # now all of it is there
    file.cached = file.pages = 0
    file.draws = 5
    for _ in range(5):
        timed_units(file, "sample", 0.0)
    assert file.pages >= 5 and file.cached == file.pages
