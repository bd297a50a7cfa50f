"""The program on a host: run here by the very command that ssh is given."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from paceline.machines.ssh import remote
from tests.waiting import wait_until

SLEEPER = "import sys, time; open(sys.argv[1], 'w').write('x'); time.sleep(100)"


class Host:
    """The program's process, its standard input kept open as a connection keeps it."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            ["sh", "-c", remote.COMMAND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def send(self, text: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(text)
        self.process.stdin.flush()

    def read_message(self, word: str) -> str:
        """The rest of the next line that begins with a word."""
        assert self.process.stderr
        for line in self.process.stderr:
            if line.startswith(f"{word} "):
                return line.removeprefix(f"{word} ").rstrip("\n")
        raise AssertionError(f"{word} never came")


@pytest.fixture
def host() -> Iterator[Host]:
    started = Host()
    started.send(remote.greeting({"MY_TOKEN": "s3 $c'r\n;et"}))
    with started.process:
        yield started
        try:
            finish(started)
        finally:
            started.process.kill()


@pytest.fixture
def stranger(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the same user in a group of its own, with another job's mark."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPER, str(tmp_path / "other")],
        env={**os.environ, remote.MARK: "another"},
        start_new_session=True,
    )
    wait_until((tmp_path / "other").exists, "the expected end")
    yield process
    assert process.poll() is None, "the stranger was ended"
    process.kill()
    process.wait()


def finish(host: Host) -> tuple[str, str]:
    """Both outputs to their end; standard input is closed."""
    if host.process.stdin and host.process.stdin.closed:
        return "", ""
    return host.process.communicate(timeout=30)


def through_a_second_connection(text: str) -> str:
    """What is heard from a program of its own."""
    done = subprocess.run(
        ["sh", "-c", remote.COMMAND], input=text, capture_output=True, text=True, timeout=30
    )
    return done.stderr


def node_script(folder: Path, text: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "node.sh").write_text(text)
    return str(folder)


def test_the_job_sees_its_words_and_its_secrets_as_they_are(host: Host, tmp_path: Path):
    folder = node_script(tmp_path / "a b;'$(id)", 'printf "%s|" "$@" "$MY_TOKEN"; exit 3\n')
    host.send(remote.start(folder, "mark", 30, "0", "a;b $(id)", "x\ny"))
    assert int(host.read_message("@pgid")) > 1
    assert host.read_message("@rc") == "3"
    assert finish(host)[0] == "0|a;b $(id)|x\ny|s3 $c'r\n;et|"


def test_no_process_list_shows_what_is_sent(host: Host, tmp_path: Path):
    folder = node_script(tmp_path, "sleep 100\n")
    host.send(remote.start(folder, "secretmark", 30, "0"))
    host.read_message("@pgid")
    family = [host.process.pid, *(p.pid for p in psutil.Process(host.process.pid).children(True))]
    lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in family]
    assert not [line for line in lines if "s3 $c" in line or "secretmark" in line or folder in line]


def test_a_death_by_a_signal_is_a_code_of_the_job(host: Host, tmp_path: Path):
    host.send(remote.start(node_script(tmp_path, "kill -9 $$\n"), "mark", 30))
    assert host.read_message("@rc") == "137"


def test_signs_of_life_come_back(host: Host, tmp_path: Path):
    host.send(remote.start(node_script(tmp_path, "sleep 100\n"), "mark", 30))
    host.send("1\n2\n")
    assert [host.read_message("@alive"), host.read_message("@alive")] == ["1", "2"]


@pytest.mark.parametrize("how", ["its connection ends", "no heartbeat comes"])
def test_the_job_ends_by_itself_when(host: Host, tmp_path: Path, how: str):
    script = f'exec {sys.executable} -c "{SLEEPER}" started\n'
    silence_s = 60 if how.startswith("its") else 2
    host.send(remote.start(node_script(tmp_path, script), "m1", silence_s))
    group = int(host.read_message("@pgid"))
    if silence_s == 60:
        wait_until((tmp_path / "started").exists, "the expected end")
        finish(host)
    else:
        assert host.read_message("@rc") == "143"
    wait_until(
        lambda: not [p for p in psutil.process_iter() if _group(p.pid) == group], "the expected end"
    )


def test_a_job_that_carries_no_mark_yet_ends_with_its_connection_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    late = remote.PROGRAM.replace("    export", "    sleep 1\n    export")
    assert late != remote.PROGRAM
    monkeypatch.setattr(remote, "PROGRAM", late)
    job = remote.start(node_script(tmp_path, "sleep 100\n"), "mark", 30)
    assert "@rc 143" in through_a_second_connection(remote.greeting({}) + job)


def test_ranks_that_left_the_group_and_ignore_sigterm_are_ended_and_others_are_not(
    host: Host, stranger: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stubborn = f"trap '' TERM; setsid {sys.executable} -c \"{SLEEPER}\" far & wait; sleep 100\n"
    quick = remote.PROGRAM.replace(f"SECONDS + {remote.GRACE_S}", "SECONDS + 1")
    monkeypatch.setattr(remote, "PROGRAM", quick)
    host.send(remote.start(node_script(tmp_path, stubborn), "mine", 60))
    group = int(host.read_message("@pgid"))
    wait_until((tmp_path / "far").exists, "the expected end")
    assert through_a_second_connection(remote.end("mine", group)) == "@ended\n"
    assert host.read_message("@rc") == "137"
    assert not [p for p in psutil.process_iter(["cmdline"]) if "far" in (p.info["cmdline"] or [])]


def test_a_group_whose_number_belongs_to_somebody_else_is_left_alone(
    stranger: subprocess.Popen[bytes],
):
    assert through_a_second_connection(remote.end("mine", stranger.pid)) == "@ended\n"


def test_an_interpreter_that_is_missing_is_told(host: Host):
    host.send(remote.request_facts("/nowhere/python", "facts"))
    assert "No such file" in host.read_message("@unable")


def test_a_folder_that_is_missing_is_a_code(host: Host, tmp_path: Path):
    host.send(remote.start(str(tmp_path / "nowhere"), "mark", 30))
    assert host.read_message("@rc") == "72"


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0
