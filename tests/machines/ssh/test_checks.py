"""The checks before a start: each fault by its rule, and all hosts at fault in one error."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from paceline.core.errors import SystemFaultError
from paceline.core.hardware import SshSettings
from paceline.machines.ssh.checks import (
    HostCheck,
    HostRequirements,
    _Examination,
    apply_rules,
    check_hosts,
    raise_for_faults,
)
from paceline.machines.ssh.session import Message, Session
from tests.machines.ssh.fake_ssh import install

LIMITS = SshSettings(connect_timeout_s=5, alive_interval_s=1)
SOUND = HostCheck(
    host="a",
    round_trip_s=0.01,
    clock_skew_s=0.0,
    python="3.11.2",
    torch="2.13.0",
    open_files=65536,
    folder="shared",
    free_bytes=10**12,
    temporary="/tmp",
    temporary_free_bytes=10**12,
    address="10.0.0.1",
    interfaces=("eth0", "lo"),
)
QUESTIONS = HostRequirements("python3", Path("/runs/r"), "eth0", 16)


def changed(**fields: object) -> HostCheck:
    return SOUND.model_copy(update=fields)


def test_a_sound_host_has_no_fault():
    assert apply_rules([SOUND], QUESTIONS)[0].fault is None


@pytest.mark.parametrize(
    ("fields", "fault", "remedy"),
    [
        ({"clock_skew_s": -3.0}, "its clock is 3.0 s behind (at most 1 s)", "NTP"),
        ({"clock_skew_s": 1.5}, "its clock is 1.5 s ahead", "NTP"),
        ({"open_files": 256}, "allows 256 open files (at least 1024)", "nofile"),
        ({"folder": "missing"}, "does not see /runs/r", "--runs-dir"),
        ({"folder": "another"}, "sees other files in /runs/r", "--runs-dir"),
        ({"folder": "read-only"}, "cannot write to /runs/r", "--runs-dir"),
        ({"free_bytes": 1000}, "free in /runs/r", "free disk space"),
        ({"temporary_free_bytes": 0}, "free in /tmp", "free disk space"),
        ({"address": None}, "has no address on eth0 (its interfaces: eth0, lo)", "--interface"),
    ],
)
def test_each_rule_has_a_sentence_and_a_remedy(fields: dict[str, object], fault: str, remedy: str):
    (check,) = apply_rules([changed(**fields)], QUESTIONS)
    assert fault in (check.fault or "")
    assert remedy in (check.remedy or "")


def test_a_clock_is_judged_against_the_round_trip():
    far = changed(clock_skew_s=1.4, round_trip_s=1.0)
    assert apply_rules([far], QUESTIONS)[0].fault is None


def test_many_ranks_need_many_files():
    many = HostRequirements("python3", world_size=4096)
    assert "at least 16384" in (apply_rules([changed(open_files=8192)], many)[0].fault or "")
    assert apply_rules([changed(open_files=-1)], many)[0].fault is None


def test_the_odd_version_is_named_and_not_the_usual_one():
    checks = [SOUND, changed(host="b", torch="2.12.0"), SOUND, changed(host="c", torch=None)]
    faults = [check.fault for check in apply_rules(checks, QUESTIONS)]
    assert faults == [
        None,
        "has torch 2.12.0, most hosts have 2.13.0",
        None,
        "has torch missing, most hosts have 2.13.0",
    ]


def test_two_names_of_one_machine_are_one_error_that_names_both():
    here = {"machine": "boot-1 alpha", "addresses": ("10.0.0.1", "10.1.0.1")}
    checks = [
        changed(host="a", server_address="10.0.0.1", **here),
        changed(
            host="b", server_address="10.0.0.2", machine="boot-2 beta", addresses=("10.0.0.2",)
        ),
        changed(host="alias", server_address="10.1.0.1", **here),
    ]
    after = apply_rules(checks, QUESTIONS)
    assert [bool(check.fault) for check in after] == [False, False, True]
    message = "alias: is the same machine as a: alpha at 10.0.0.1, 10.1.0.1; list each"
    with pytest.raises(SystemFaultError, match=message):
        raise_for_faults(after)


@pytest.mark.parametrize(
    "other",
    [
        {"machine": "boot-1 beta"},  # virtual hosts share a kernel
        {"machine": "boot-2 alpha"},  # clones share a name, and behind a router the address
        {"addresses": ("10.0.0.2",)},
        {"server_address": "127.0.0.1"},  # with the first reached so too: tunnels
    ],
)
def test_hosts_that_share_less_are_not_taken_for_one(other: dict[str, object]):
    at = {"server_address": "127.0.0.1"} if "server_address" in other else {}
    first = {"server_address": "10.0.0.1", "machine": "boot-1 alpha", "addresses": ("10.0.0.1",)}
    checks = [changed(host="a", **{**first, **at}), changed(host="b", **{**first, **other})]
    assert not any(check.fault for check in apply_rules(checks, QUESTIONS))


def test_one_error_names_every_host_at_fault():
    checks = [
        *(changed(host=f"node-{i:03}", fault="does not answer", remedy="look") for i in range(3)),
        changed(host="b", fault="is full", remedy="free disk space"),
        SOUND,
    ]
    with pytest.raises(SystemFaultError) as caught:
        raise_for_faults(checks)
    assert str(caught.value) == (
        "4 of 5 hosts: node-[000-002] does not answer, b is full; look; free disk space"
    )
    with pytest.raises(SystemFaultError, match=r"^node-\[000-002\]: does not answer; look$"):
        raise_for_faults([*checks[:3], SOUND])
    raise_for_faults([SOUND])


def test_hosts_are_asked_and_each_tells_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(tmp_path, monkeypatch)
    hosts = ["good", "stranger", "silent", "late", "small", "broken", "talker"]
    began = time.monotonic()
    checks = check_hosts(hosts, HostRequirements(sys.executable), LIMITS)
    faults = {check.host: check.fault or "" for check in checks}
    assert list(faults) == hosts
    assert faults["good"] == faults["talker"] == ""
    assert faults["stranger"] == "its host key is unknown"
    assert faults["silent"] == "its login did not finish within 5 s"
    assert "behind" in faults["late"]
    assert "allows 200 open files" in faults["small"]
    assert faults["broken"] == "ssh failed: ssh: line noise"
    good = checks[0]
    assert good.python == ".".join(map(str, sys.version_info[:3]))
    assert abs(good.clock_skew_s or 9) < 1
    assert 0 < (good.round_trip_s or 0) < 10
    assert (good.reached_on, good.server_address) == ("lo", "127.0.0.1")
    assert time.monotonic() - began < 60


def test_a_host_that_is_reached_without_a_network_has_no_server_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    install(tmp_path, monkeypatch)
    (check,) = check_hosts(["piped"], HostRequirements(sys.executable), LIMITS)
    assert (check.fault, check.server_address) == (None, None)


def test_an_interpreter_that_does_not_run_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    install(tmp_path, monkeypatch)
    (check,) = check_hosts(["good"], HostRequirements("/no where/python; id"), LIMITS)
    assert "cannot run /no where/python; id:" in (check.fault or "")


def test_a_folder_is_shared_when_the_hosts_see_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    install(tmp_path / "bin", monkeypatch)
    folder = tmp_path / "$(id) 'x'\n"
    folder.mkdir()
    (check,) = check_hosts(["good"], HostRequirements(sys.executable, folder), LIMITS)
    assert (check.folder, check.fault) == ("shared", None)
    assert (check.free_bytes or 0) > 0
    assert not list(folder.iterdir())


def test_the_jobs_environment_is_there_when_the_interpreter_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    install(tmp_path, monkeypatch)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "token is $MY_TOKEN"; exit 1\n')
    python.chmod(0o755)
    (check,) = check_hosts(["good"], HostRequirements(str(python)), LIMITS, {"MY_TOKEN": "a 'b'"})
    assert (check.fault or "").endswith("token is a 'b'")


def test_what_the_interpreter_says_besides_does_not_hide_the_facts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    install(tmp_path, monkeypatch)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho before; echo \'{"python": "3.11.2"}\'; echo after >&2\n')
    python.chmod(0o755)
    (check,) = check_hosts(["good"], HostRequirements(str(python)), LIMITS)
    assert (check.python, check.fault) == ("3.11.2", None)
    python.write_text("#!/bin/sh\necho '{half'\n")
    (check,) = check_hosts(["good"], HostRequirements(str(python)), LIMITS)
    assert "{half" in (check.fault or "")


@pytest.mark.parametrize(
    ("date", "has_skew"),
    [("1700000000.5", True), ("1700000000.%N", True), ("", False), ("?", False)],
)
def test_a_host_whose_date_says_nothing_has_no_skew_and_no_fault(date: str, has_skew: bool):
    session = Session("a", ["true"])
    examination = _Examination(session, "a", QUESTIONS, LIMITS, asked_s=time.monotonic())
    examination._handle_clock(Message(time.monotonic(), "@clock", date))
    ((trip_s, skew_s),) = examination.clock
    assert trip_s >= 0 and (skew_s is not None) == has_skew
    assert apply_rules([changed(clock_skew_s=None)], QUESTIONS)[0].fault is None
