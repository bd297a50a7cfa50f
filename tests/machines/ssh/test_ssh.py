"""The SSH launcher with a local fake of ssh: what is rendered, started, and ended."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from paceline.core.errors import SystemFaultError, UserError
from paceline.machines import ssh
from paceline.machines.ssh import remote
from paceline.machines.ssh import run as ssh_run
from paceline.machines.ssh.run import SshRun
from paceline.runs import flow
from paceline.runs.plan import Plan
from tests.example import make_spec
from tests.machines.ranks import exit_code
from tests.machines.ssh.fake_ssh import install, make_job
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def argv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ssh_run, "FOLLOW_S", 0.3)
    return install(tmp_path / "bin", monkeypatch)


def start(folder: Path, *hosts: str, **fields: object) -> SshRun:
    job = make_job(hosts, **fields)  # type: ignore[arg-type]
    folder.mkdir(exist_ok=True)
    ssh.prepare(job, folder)
    return ssh.submit(job, folder)


def finish(run: SshRun) -> int:
    code = exit_code(run)
    run.sweep()
    return code


def wait_for_none_left(folder: Path) -> None:
    """Wait until no process runs in a folder: a watcher's last sleep takes a moment."""
    wait_until(lambda: not ranks(folder), f"the end of what runs in {folder}")


def ranks(folder: Path) -> list[int]:
    """Processes that run in a folder."""
    pids: list[int] = []
    for process in psutil.process_iter(["cwd"]):
        if process.info["cwd"] == str(folder):
            pids.append(process.pid)
    return pids


def test_the_script_on_disk_is_the_rendered_text_and_bash_can_read_it(tmp_path: Path):
    job = make_job(["a", "b"])
    ssh.prepare(job, tmp_path)
    script = tmp_path / "job.sh"
    assert script.read_text() == ssh.render(job)
    assert "b: bash node.sh 1 ADDRESS PORT" in ssh.render(job)
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0


KILLED = """
import os, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), 9)
time.sleep(60)
"""


def test_what_dies_on_a_host_was_not_killed_for_this_machines_lack_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(flow, "oom_kills", itertools.count().__next__)
    job = make_job(["a", "b"], files={"rank.py": KILLED})
    assert job.cluster
    plan = Plan(make_spec(cluster=job.cluster), job, {})
    report = flow.run(plan, tmp_path / "runs", ["test"], lambda _: None, probe=False)
    assert report.result.status == "failed"
    assert "rank 1 was killed by SIGKILL" in (report.result.reason or "")


def test_a_job_runs_on_every_host_and_its_secrets_reach_it_alone(tmp_path: Path, argv: Path):
    folder = tmp_path / "run $(touch owned) 'x' \n;"
    run = start(folder, "a", "b", env={"MY_TOKEN": "s3 cret"})
    assert finish(run) == 0
    assert (folder / "logs" / "host-a.log").read_text() == "rank 0 s3 cret\n"
    assert (folder / "logs" / "host-b.log").read_text() == "rank 1 s3 cret\n"
    words = argv.read_text().split("\0")
    assert words.count(remote.COMMAND) == 2
    assert not [word for word in words if "s3 c" in word or "touch" in word]
    assert not [p for p in folder.iterdir() if p.is_file() and "s3 cret" in p.read_text()]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bin", folder.name]
    assert run.verdict() is None


def test_as_many_hosts_as_nodes_are_needed(tmp_path: Path):
    job = make_job(["a", "b"])
    for wrong, told in (
        (replace(job, nodes=3), "hosts: there are 2 hosts for 3 nodes; list one host per node"),
        (replace(job, cluster=None), "hosts: there are 0 hosts for 2 nodes; .* with --hosts"),
    ):
        with pytest.raises(UserError, match=told):
            ssh.prepare(wrong, tmp_path)


def test_a_host_at_fault_stops_everything_before_it_starts(tmp_path: Path):
    with pytest.raises(SystemFaultError, match=r"stranger: its host key is unknown.*fingerprint"):
        start(tmp_path / "run", "a", "stranger")
    wait_for_none_left(tmp_path / "run")


def test_the_code_of_the_rank_that_failed_first_is_the_jobs(tmp_path: Path):
    run = start(tmp_path / "run", "a", "b", "c", seconds=0.5, code=5)
    assert finish(run) == 5
    assert run.verdict() is None
    assert "@exit rank=1 code=5" in (tmp_path / "run" / "logs" / "host-b.log").read_text()
    wait_for_none_left(tmp_path / "run")


def test_a_local_ssh_that_dies_is_a_lost_host_whose_ranks_end(tmp_path: Path):
    run = start(tmp_path / "run", "a", "b", seconds=100)
    wait_for_ranks(run, tmp_path / "run")
    victim = run.hosts[1].session.process
    assert victim
    victim.kill()
    assert finish(run) == ssh_run.LOST_CODE
    verdict = run.verdict()
    assert verdict is not None
    assert verdict.hosts == ("b",)
    wait_for_none_left(tmp_path / "run")


def test_a_host_that_returns_no_sign_of_life_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ssh_run, "SLACK_S", 6.0)  # the other host may be late on a busy machine
    run = start(tmp_path / "run", "a", "b", seconds=100, alive_interval_s=1)
    wait_for_ranks(run, tmp_path / "run")
    shell = run.hosts[0].session.process
    assert shell
    frozen = [shell.pid, *(p.pid for p in psutil.Process(shell.pid).children(recursive=True))]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    assert finish(run) == ssh_run.LOST_CODE
    verdict = run.verdict()
    assert verdict is not None
    assert (verdict.hosts, "no heartbeat for" in verdict.reason) == (("a",), True)
    for pid in filter(psutil.pid_exists, frozen):
        os.kill(pid, signal.SIGCONT)
    wait_for_none_left(tmp_path / "run")


def test_time_in_which_the_controller_stood_still_is_nobodys_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = start(tmp_path / "run", "a", seconds=100)
    wait_for_ranks(run, tmp_path / "run")
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 1000)
    assert run.poll() is None
    run.stop()
    assert run.verdict() is None


def test_stop_ends_everything_and_may_be_called_again(tmp_path: Path):
    run = start(tmp_path / "run", "a", "b", seconds=100, timeout_s=0.01)
    wait_for_ranks(run, tmp_path / "run")
    wait_until(lambda: run.timed_out, "the time limit")
    assert run.stop() == 143
    assert (run.stop(), run.poll()) == (143, 143)
    run.sweep()
    wait_for_none_left(tmp_path / "run")
    assert not run.sockets.exists()


def wait_for_ranks(run: SshRun, folder: Path) -> None:
    """Follow a job until all its ranks have said something."""

    def all_spoke() -> bool:
        assert run.poll() is None
        return all(host.session.last_output for host in run.hosts)

    wait_until(all_spoke, "the ranks")
    assert ranks(folder)
