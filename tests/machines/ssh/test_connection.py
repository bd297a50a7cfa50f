"""The ssh command: one constant remote command, safe words, and messages that are understood."""

from __future__ import annotations

import os
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.core.hardware import SshSettings
from paceline.machines.ssh import remote
from paceline.machines.ssh.connection import MAX_SOCKET_PATH, explain, private_folder, ssh_argv


def test_the_remote_command_is_the_same_for_every_host():
    commands = {ssh_argv(host, SshSettings())[-1] for host in ("a", "b", "10.0.0.1")}
    assert commands == {remote.COMMAND}


def test_ssh_asks_nothing_and_notices_a_dead_host():
    argv = ssh_argv("a", SshSettings(config="/c", connect_timeout_s=7, alive_interval_s=3))
    assert argv[:3] == ["ssh", "-F", "/c"]
    at_home = ssh_argv("a", SshSettings(config="~/.ssh/cluster"))[2]
    assert at_home == str(Path.home() / ".ssh/cluster")
    for option in (
        "BatchMode=yes",
        "ConnectTimeout=7",
        "ServerAliveInterval=3",
        "ServerAliveCountMax=3",
    ):
        assert option in argv


def test_nothing_weakens_the_check_of_host_keys():
    words = " ".join(ssh_argv("a", SshSettings(), "/s/0", master=True)).lower()
    assert "hostkey" not in words
    assert "knownhosts" not in words


@pytest.mark.parametrize("name", ["-oProxyCommand=id", "a;id", "$(id)", "a b", "a\nb", "", "a'b"])
def test_a_hostile_host_name_never_reaches_ssh(name: str):
    with pytest.raises(UserError, match="not a host name"):
        ssh_argv(name, SshSettings())


def test_ssh_itself_takes_the_options():
    argv = ssh_argv("somewhere", SshSettings(), "/tmp/socket", master=True)
    shown = subprocess.run(["ssh", "-G", *argv[1:-1]], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "batchmode yes" in shown.stdout
    assert "hostname somewhere" in shown.stdout


def test_sockets_lie_where_nobody_else_looks_under_a_short_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    folder = private_folder()
    try:
        assert len(str(folder)) <= MAX_SOCKET_PATH
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert not list(deep.iterdir())
    finally:
        folder.rmdir()


def test_what_a_killed_process_left_is_removed_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    done = subprocess.Popen(["true"])
    done.wait()
    gone, used = f"/tmp/pl-{done.pid}-abcdefgh", f"/tmp/pl-{done.pid}-in_use"
    ours, foreign = f"/tmp/pl-{os.getpid()}-abcdefgh", "/tmp/pl-abcdefgh-x"
    for name in (gone, used, ours, foreign):
        Path(name).mkdir()
    Path(used, "0").touch()
    private_folder().rmdir()
    try:
        assert not Path(gone).exists()
        assert all(Path(name).exists() for name in (used, ours, foreign))
    finally:
        Path(used, "0").unlink()
        for name in (used, ours, foreign):
            Path(name).rmdir()


@pytest.mark.parametrize("name", ["a folder", "100%h"])
def test_sockets_lie_where_ssh_reads_the_path_as_it_is(name: str, monkeypatch: pytest.MonkeyPatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        odd = Path(short, name)
        odd.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(odd))
        folder = private_folder()
        try:
            assert not list(odd.iterdir())
            argv = ssh_argv("somewhere", SshSettings(), str(folder / "0"), master=True)
            shown = subprocess.run(["ssh", "-G", *argv[1:-1]], capture_output=True, text=True)
            assert f"controlpath {folder}/0" in shown.stdout
        finally:
            folder.rmdir()


@pytest.mark.parametrize(
    ("messages", "what", "remedy"),
    [
        ("Host key verification failed.", "host key is unknown", "compare its fingerprint"),
        (
            "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
            "host key has changed",
            "ssh-keygen -R",
        ),
        ("u@h: Permission denied (publickey).", "without a password", "ssh-copy-id"),
        ("ssh: Could not resolve hostname x: Name or service not known", "not resolve", "hosts"),
        ("ssh: connect to host x port 22: Connection timed out", "does not answer", "up"),
        ("Timeout, server x not responding.", "does not answer", "up"),
        ("ssh: connect to host x port 22: Connection refused", "no ssh server", "sshd"),
        ("ssh: connect to host x port 22: No route to host", "does not answer", "up"),
    ],
)
def test_a_message_of_ssh_is_told_as_what_it_means(messages: str, what: str, remedy: str):
    cause, advice = explain(messages)
    assert what in cause
    assert remedy in (advice or "")


def test_a_greeting_of_the_host_is_no_cause():
    greeting = "Permission denied to strangers. Idle sessions are timed out after an hour."
    cause = explain(f"{greeting}\nssh: connect to host a port 22: Connection refused\nlost\n")
    assert cause[0] == "no ssh server is listening"


def test_ssh_says_why_whatever_the_configuration_asks_of_it(tmp_path: Path):
    config = tmp_path / "config"
    config.write_text("Host *\nLogLevel QUIET\n")
    argv = ssh_argv("nobody.invalid", SshSettings(config=str(config)))
    done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert explain(done.stderr)[0] == "its name does not resolve"


def test_an_unknown_message_is_told_as_it_is():
    assert explain("hello\nweird thing\n") == ("ssh failed: weird thing", None)
    assert explain("") == ("ssh ended without a message", None)
