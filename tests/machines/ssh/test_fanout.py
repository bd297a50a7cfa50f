"""Many sessions in one loop: bounded starts, whole lines, and an end for each."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.core.errors import SystemFaultError
from paceline.machines.ssh.session import Fanout, Session, allow_files
from tests.waiting import wait_until


def drive(fanout: Fanout, done: Callable[[], bool]) -> None:
    wait_until(lambda: done() or (fanout.step(0.05) and done()), "the sessions", pause_s=0)


def bash(text: str, log: Path | None = None) -> Session:
    return Session("host", ["bash", "-c", text], log)


def test_output_goes_to_the_log_and_the_program_is_heard(tmp_path: Path):
    text = "echo '@rc 5'; printf 'no newline' ; echo '@pgid 7' >&2; echo a warning >&2; exit 4"
    session = bash(text, tmp_path / "log")
    fanout = Fanout([session])
    drive(fanout, lambda: session.ended)
    assert session.code == 4
    assert [(h.word, h.text) for h in session.inbox] == [("@pgid", "7")]
    assert list(session.messages) == ["a warning"]
    assert session.last_output == "@rc 5\nno newline"
    logged = (tmp_path / "log").read_text()
    assert "@rc 5\nno newline" in logged
    assert "a warning" in logged
    assert "@pgid" not in logged
    fanout.close()


def test_lines_of_ssh_that_begin_alike_are_messages():
    session = bash("echo '@@@@@@@@' >&2; echo '@    WARNING: IDENTIFICATION HAS CHANGED!' >&2")
    fanout = Fanout([session])
    drive(fanout, lambda: session.ended)
    assert not session.inbox
    assert len(session.messages) == 2
    fanout.close()


def test_what_is_sent_arrives_whole_however_long_it_is():
    session = bash("wc -c >&2")
    session.send("x" * 3_000_000)
    fanout = Fanout([session])
    drive(fanout, lambda: not session.outbox)
    session.hang_up()
    drive(fanout, lambda: session.ended)
    assert list(session.messages) == ["3000000"]
    fanout.close()


def test_only_so_many_are_on_their_way_at_once():
    sessions = [bash("echo '@ready' >&2; read -r _") for _ in range(7)]
    fanout = Fanout(sessions, at_once=3)
    drive(fanout, lambda: sum(bool(s.inbox) for s in sessions) == 3)
    fanout.step(0.2)
    assert sum(s.started_s is not None for s in sessions) == 3
    for session in sessions:
        session.settled = True
    drive(fanout, lambda: all(s.inbox for s in sessions))
    fanout.close()
    assert all(s.process and s.process.poll() is not None for s in sessions)


def test_a_helper_that_keeps_the_output_open_does_not_keep_the_session():
    session = bash("sleep 30 & echo $!")
    fanout = Fanout([session])
    drive(fanout, lambda: session.ended)
    fanout.close()
    os.kill(int(session.last_output), signal.SIGKILL)


def test_a_missing_ssh_is_a_fault_of_the_system():
    fanout = Fanout([Session("host", ["/nowhere/ssh"])])
    with pytest.raises(SystemFaultError, match="cannot be started: No such file"):
        fanout.step(0)
    fanout.close()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_a_log_on_a_full_disk_is_a_fault_that_names_it():
    session = bash("echo hello; sleep 5", Path("/dev/full"))
    fanout = Fanout([session])
    with pytest.raises(SystemFaultError, match="/dev/full: cannot be written: No space"):
        drive(fanout, lambda: session.ended)
    fanout.close()


def test_the_limit_of_open_files_is_raised_once_for_all_sub_clusters_that_start_together():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        for _ in range(200):
            allow_files(8)
        now = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert now >= min(200 * 8 * 3, before[1] if before[1] > 0 else now)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_more_hosts_than_the_system_allows_are_refused_with_a_remedy():
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] == resource.RLIM_INFINITY:
        pytest.skip("this system allows any number")
    with pytest.raises(SystemFaultError, match="ulimit -Hn"):
        allow_files(10**9)
