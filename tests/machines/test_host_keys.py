"""Fingerprints are shown, and nothing makes ssh trust a host by itself."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.machines.host_keys import scan, write_known_hosts

pytestmark = pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="OpenSSH's client is absent")


def new_key(folder: Path, name: str) -> tuple[str, str]:
    """A key's public half (`ssh-ed25519 AAAA...`) and its fingerprint."""
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(folder / name)]
    subprocess.run(command, check=True)
    listed = subprocess.run(
        ["ssh-keygen", "-l", "-f", str(folder / f"{name}.pub")],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return (folder / f"{name}.pub").read_text().strip(), listed.split()[1]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """ssh's configuration: `far` on another port, `hidden` behind a host, own known hosts."""
    path = tmp_path / "config"
    path.write_text(
        f"Host far\n HostName 10.0.0.7\n Port 2222\nHost hidden\n ProxyJump far\n"
        f"Host *\n UserKnownHostsFile {tmp_path}/known\n GlobalKnownHostsFile none\n"
    )
    return path


def show(folder: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """Have every host show `key`: a program stands in for the network."""
    (folder / "bin").mkdir(exist_ok=True)
    program = folder / "bin" / "ssh-keyscan"
    program.write_text(
        f'#!/bin/sh\necho "$@" > {folder}/asked\necho "# a remark"\n'
        f'for last; do :; done\nprintf "%s {key}\\n" "$last"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")


def test_a_host_is_asked_where_ssh_would_go(
    tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch
):
    key, fingerprint = new_key(tmp_path, "a")
    show(tmp_path, monkeypatch, key)
    (scanned,) = scan(["far"], config)
    assert (tmp_path / "asked").read_text().split() == ["-T", "5", "-p", "2222", "--", "10.0.0.7"]
    assert (scanned.host, scanned.kind, scanned.bits) == ("far", "ED25519", 256)
    assert (scanned.fingerprint, scanned.state) == (fingerprint, "unknown")
    assert scanned.line == f"[10.0.0.7]:2222 {key}"


def test_a_key_is_held_against_those_that_ssh_knows(
    tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch
):
    host_key, other_key = new_key(tmp_path, "own")[0], new_key(tmp_path, "other")[0]
    (tmp_path / "known").write_text(f"near {host_key}\n[10.0.0.7]:2222 {other_key}\n")
    show(tmp_path, monkeypatch, host_key)
    keys = scan(["near", "far"], config)
    assert [key.state for key in keys] == ["known", "changed"]
    with pytest.raises(UserError, match="far: shows another key than the one that ssh knows"):
        write_known_hosts(keys, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_host_behind_another_and_a_silent_one_have_no_key(
    tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch
):
    show(tmp_path, monkeypatch, "")
    (tmp_path / "bin" / "ssh-keyscan").write_text("#!/bin/sh\n")
    behind, silent = scan(["hidden", "near"], config)
    assert behind.state == "unreachable" and "behind another host" in (behind.note or "")
    assert silent.note == "near port 22 shows no key"


def test_keys_go_to_a_new_file_only(tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch):
    show(tmp_path, monkeypatch, new_key(tmp_path, "a")[0])
    keys = scan(["near"], config)
    file = tmp_path / "new"
    assert write_known_hosts(keys, file) == 1
    assert file.read_text().startswith("near ssh-ed25519 ") and file.stat().st_mode & 0o077 == 0
    with pytest.raises(UserError, match="known hosts are never changed"):
        write_known_hosts(keys, file)
