"""Runs that are steps of an allocation: at the same time on nodes of their own, ended with it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.core.errors import SystemFaultError, UserError
from paceline.machines.local import LocalRun
from tests.clusters.bed import Bed
from tests.clusters.slurm_jobs import Background, make_job, start, train, until_ranks_run, wait
from tests.clusters.test_slurm import CONTROLLER, LONG
from tests.waiting import wait_until

PAIRS = (("node-001", "node-002"), ("node-004", "node-003"))


@pytest.fixture
def bed(slurm_cluster: Bed, monkeypatch: pytest.MonkeyPatch) -> Bed:
    for name, value in slurm_cluster.settings.items():
        monkeypatch.setenv(name, value)
    return slurm_cluster


@pytest.fixture
def allocation(bed: Bed) -> Iterator[str]:
    """The number of an allocation of all four nodes."""
    words = ["salloc", "--no-shell", "--nodes=4", "--exclusive", "--mem=0"]
    done = subprocess.run(words, env=bed.env, capture_output=True, text=True, timeout=60)
    number = done.stderr.split()[-1]
    yield number
    bed.slurm.ask("scancel", number)


def times(folder: str) -> tuple[float, float]:
    """When the first rank began and the last one ended, by their own lines."""
    files = sorted(Path(folder).glob("steps/rank-*.jsonl"))
    lines = [list(map(json.loads, file.read_text().splitlines())) for file in files]
    begin = min(rank_lines[0]["time_unix"] for rank_lines in lines)
    return begin, max(rank_lines[-1]["time_unix"] for rank_lines in lines)


def test_two_runs_share_an_allocation_at_the_same_time(allocation: str, tmp_path: Path) -> None:
    jobs = [make_job(steps=30, step_s=0.1, hosts=hosts, allocation=allocation) for hosts in PAIRS]
    both = [Background(train, tmp_path / str(n), job) for n, job in enumerate(jobs)]
    reports = [running.result() for running in both]
    assert [report.result.status for report in reports] == ["ok", "ok"]
    assert [tuple(rank.host for rank in report.result.ranks) for report in reports] == list(PAIRS)
    spans = [times(report.folder) for report in reports]
    assert max(begin for begin, _ in spans) < min(end for _, end in spans)


def test_a_rank_that_fails_in_a_step_is_named(allocation: str, tmp_path: Path) -> None:
    result = train(tmp_path, make_job(code=3, allocation=allocation)).result
    assert (result.status, result.reason) == ("failed", "rank 1: ended with exit code 3")


def test_a_cancelled_step_and_an_ended_allocation_are_told_apart(
    bed: Bed, allocation: str, tmp_path: Path
) -> None:
    running = Background(train, tmp_path / "step", make_job(**LONG, allocation=allocation))
    until_ranks_run(tmp_path / "step")
    bed.slurm.ask("scancel", f"{allocation}.0")
    result = running.result().result
    assert result.status == "cancelled" and "another user cancelled the step" in result.reason
    running = Background(train, tmp_path / "all", make_job(**LONG, allocation=allocation))
    until_ranks_run(tmp_path / "all")
    bed.slurm.ask("scancel", allocation)
    result = running.result().result
    assert result.status == "incomplete" and result.steps_done > 0
    assert f"allocation {allocation} ended (CANCELLED)" in result.reason
    with pytest.raises(SystemFaultError, match=f"allocation {allocation}: is CANCELLED"):
        start(make_job(allocation=allocation), tmp_path / "late")


def test_hosts_outside_the_allocation_are_refused(allocation: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"does not contain node-009; allowed: node-\[001-004\]"):
        start(make_job(hosts=("node-001", "node-009"), allocation=allocation), tmp_path / "outside")
    with pytest.raises(UserError, match="has fewer than 5 nodes"):
        start(make_job(nodes=5, allocation=allocation), tmp_path / "more")
    with pytest.raises(SystemFaultError, match="allocation 99999: is unknown"):
        start(make_job(allocation="99999"), tmp_path / "unknown")


def test_a_stopped_step_leaves_nothing_and_its_nodes_are_free(
    bed: Bed, allocation: str, tmp_path: Path
) -> None:
    run = start(make_job(**LONG, allocation=allocation), tmp_path / "stopped")
    assert isinstance(run, LocalRun)
    until_ranks_run(tmp_path / "stopped")
    assert run.stop() != 0 and run.verdict() is None
    assert not bed.slurm.ask("squeue", "-h", "-s", "-j", allocation).strip()
    assert wait(start(make_job(nodes=4, allocation=allocation), tmp_path / "next")) == 0


def test_a_step_ends_with_its_killed_controller(bed: Bed, allocation: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", CONTROLLER, str(tmp_path), "600", allocation]
    controller = subprocess.Popen(argv, env=bed.env)
    until_ranks_run(tmp_path)
    controller.send_signal(signal.SIGKILL)
    controller.wait()
    steps = ("squeue", "-h", "-s", "-j", allocation)
    wait_until(lambda: not bed.slurm.ask(*steps).strip(), "the end of the step", 30)
