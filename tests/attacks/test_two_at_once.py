"""Commands of one user at the same time, and names that are not text."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.files.archive import unpack, write_archive
from paceline.files.locks import exclusive
from tests.attacks.reproductions import refused, stored_run
from tests.command import PLAIN, paceline

LINE = (
    " iteration {:8d}/     100 | consumed samples: {:12d} | elapsed time per iteration (ms): {}.0 "
    "| learning rate: 1.0E-04 | global batch size:    16 | lm loss: 5.0E+00 |\n"
)
LOG = "".join(LINE.format(number, number * 16, 1000 + number % 3) for number in range(1, 41))
FACTS = ("--model", "tiny-gpt", "--seq-len", "256", "--gpus", "8", "--device", "H100")


def _start(runs: Path, *words: object) -> subprocess.Popen[str]:
    env = {**os.environ, **PLAIN, "PACELINE_RUNS": str(runs), "XDG_CACHE_HOME": str(runs / "cache")}
    command = [sys.executable, "-m", "paceline", *map(str, words)]
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, stdout=-3, text=True)


def test_one_log_is_imported_once(tmp_path: Path):
    log = tmp_path / "a.log"
    log.write_text(LOG)
    runs = tmp_path / "runs"
    processes = [_start(runs, "runs", "import", log, *FACTS) for _ in range(4)]
    errors = [process.communicate()[1] for process in processes]
    assert sorted(process.returncode for process in processes) == [0, 1, 1, 1], errors
    assert len(list(runs.glob("*/run.json"))) == 1


def test_one_group_has_one_controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with exclusive(tmp_path, "group 'g'"):
        words = ["--", sys.executable, "-c", "pass"]
        done = paceline("run", "--repeat", 2, "--group", "g", *words, runs=tmp_path)
    assert done.returncode == 1 and "is in use by another command" in done.stderr, done.stderr
    assert not list(tmp_path.glob("20*"))


def test_one_of_several_bundles_is_written(tmp_path: Path):
    target = tmp_path / "bundle.tar.gz"

    def members():
        target.write_text("of another command")
        yield from ()

    with pytest.raises(UserError, match="already exists"):
        write_archive(target, members())
    assert target.read_text() == "of another command"
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_whose_name_is_not_text_hides_no_other(tmp_path: Path):
    runs = tmp_path / "runs"
    runs.mkdir()
    folder = stored_run(runs)
    folder.rename(runs / os.fsdecode(b"2026-\xff"))
    kept = stored_run(runs)
    for verb in (["list"], ["list", "--json"], ["index"], ["history"]):
        done = paceline("runs", *verb, runs=runs)
        assert "Traceback" not in done.stderr, (verb, done.stderr)
        assert kept.name in done.stdout or verb not in (["list"], ["list", "--json"])
    done = paceline("runs", "list", runs=runs)
    assert "has a name that is not UTF-8 text" in done.stderr


def test_a_folder_of_runs_is_text(tmp_path: Path):
    words = "-m", "paceline", "runs", "list"
    env = {**os.environb, b"PACELINE_RUNS": os.fsencode(tmp_path) + b"/r\xff"}
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True)
    refused(done, 1, "is not UTF-8 text")


@pytest.mark.parametrize("header", [b"0 a=b\n", b"nonsense", b"9" * 5000 + b" a=b\n"])
def test_a_malformed_extension_hides_no_member(tmp_path: Path, header: bytes):
    def member(name: str, content: bytes, kind: bytes = tarfile.REGTYPE) -> bytes:
        info = tarfile.TarInfo(name)
        info.type, info.size = kind, len(content)
        packed = info.tobuf(tarfile.USTAR_FORMAT)
        return packed + content + bytes(-len(content) % 512)

    logs = [member(f"{number}.log", b"log") for number in range(4)]
    parts = [*logs[:2], member("p", header, tarfile.XHDTYPE), *logs[2:], bytes(10240)]
    archive = tmp_path / "x.tar"
    archive.write_bytes(b"".join(parts))
    try:
        names = unpack(archive, tmp_path / "out").files
    except UserError as error:
        assert "cannot be read as an archive" in str(error)
    else:
        assert names == ("0.log", "1.log", "2.log", "3.log")


def test_a_throughput_near_zero_is_refused(tmp_path: Path):
    table = tmp_path / "s.csv"
    hosts = [f"h{number},{'5e-324' if number == 3 else 99}" for number in range(1, 13)]
    pairs = [f'"h{number},h{number + 1}",190' for number in (1, 3, 5)]
    table.write_text("\n".join(["hosts,samples_per_second", *hosts, *pairs]) + "\n")
    done = paceline("scale", "--from", table, runs=tmp_path)
    refused(done, 1, "is not a positive number")
