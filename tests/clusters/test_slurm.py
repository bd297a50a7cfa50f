"""Runs in the queue of a real Slurm: what is asked for runs, and what goes wrong is named."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.core.errors import SystemFaultError, UserError
from paceline.files.run_folder import read_record
from paceline.machines import slurm
from paceline.machines.slurm.batch import BatchRun
from paceline.runs import outcome
from tests.clusters.bed import Bed
from tests.clusters.slurm_jobs import (
    RANK,
    Background,
    make_job,
    start,
    train,
    until_ranks_run,
    wait,
)
from tests.waiting import wait_until

LONG = {"steps": 600, "step_s": 0.1}
RESULT_LINES = """
import os, pathlib
if os.environ["RANK"] == "0":
    pathlib.Path("mlperf").mkdir(exist_ok=True)
    started = os.environ.get("SLURM_RESTART_COUNT", "0")
    pathlib.Path("mlperf/result.txt").write_text("start " + started)
"""
SMALL = [
    "--set",
    "model.num_layers=1",
    "--set",
    "seq_len=64",
    "--set",
    "dtype=fp32",
    "--set",
    "steps=48",
    "--set",
    "global_batch=16",
    "--set",
    "micro_batch=4",
]


@pytest.fixture
def bed(slurm_cluster: Bed, monkeypatch: pytest.MonkeyPatch) -> Bed:
    for name, value in slurm_cluster.settings.items():
        monkeypatch.setenv(name, value)
    return slurm_cluster


@pytest.fixture
def plain(slurm_without_accounting: Bed, monkeypatch: pytest.MonkeyPatch) -> Bed:
    for name, value in slurm_without_accounting.settings.items():
        monkeypatch.setenv(name, value)
    return slurm_without_accounting


def job_number(bed: Bed) -> str:
    (number,) = bed.slurm.jobs()
    return number


@pytest.mark.nightly
def test_the_tiny_opt_trains_on_four_nodes(bed: Bed, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "paceline",
        "run",
        "tiny-opt",
        "--no-probe",
        "--json",
        "--launcher",
        "slurm",
        "--nodes",
        "4",
        *SMALL,
    ]
    environment = {**bed.env, "PACELINE_RUNS": str(tmp_path / "runs")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["status"] == "ok" and result["steps_done"] == 48
    assert [rank["host"] for rank in result["ranks"]] == list(bed.names)
    assert "is running on node-[001-004]" in done.stderr


def test_hosts_are_taken_in_the_given_order_and_interface(bed: Bed, tmp_path: Path) -> None:
    hosts = ("node-003", "node-001")
    report = train(tmp_path, make_job(hosts=hosts, interface="eth0"))
    assert report.result.status == "ok"
    assert tuple(rank.host for rank in report.result.ranks) == hosts
    log = (Path(report.folder) / "logs" / "host-node-003.log").read_text()
    assert f"rank 0 at {bed.hosts['node-003'].address} " in log


def test_what_slurm_refuses_is_told_in_its_words(bed: Bed, tmp_path: Path) -> None:
    with pytest.raises(SystemFaultError, match="invalid partition specified: nowhere"):
        train(tmp_path / "a", make_job(partition="nowhere"))
    (folder,) = (tmp_path / "a").glob("*/run.json")
    assert read_record(folder.parent).status == "failed"
    with pytest.raises(SystemFaultError, match="Requested node configuration is not available"):
        train(tmp_path / "b", make_job(gres="gpu:9"))
    report = train(tmp_path / "c", make_job(partition="small"))
    assert report.result.status == "failed"
    assert "can never start: PartitionNodeLimit" in str(report.result.reason)


def test_a_job_that_somebody_cancels_names_who(bed: Bed, tmp_path: Path) -> None:
    running = Background(train, tmp_path, make_job(**LONG))
    until_ranks_run(tmp_path)
    bed.slurm.ask("scancel", job_number(bed))
    result = running.result().result
    assert (result.status, "cancelled by root (user id 0)" in result.reason) == ("cancelled", True)
    assert result.steps_done > 0


def test_a_rank_that_fails_ends_the_others_and_is_named(bed: Bed, tmp_path: Path) -> None:
    result = train(tmp_path, make_job(code=3)).result
    assert (result.status, result.reason) == ("failed", "rank 1: ended with exit code 3")
    assert not [
        line for h in bed.hosts.values() for line in h.leftovers().values() if "rank" in line
    ]


def test_the_time_limit_counts_from_the_start_and_keeps_the_steps(bed: Bed, tmp_path: Path) -> None:
    result = train(tmp_path, make_job(**LONG, timeout_s=10)).result
    assert (result.status, result.steps_done > 0) == ("timeout", True)
    assert not bed.slurm.jobs()


def test_slurms_own_time_limit_is_one_too(bed: Bed, tmp_path: Path) -> None:
    running = Background(train, tmp_path, make_job(**LONG))
    until_ranks_run(tmp_path)
    # Slurm's shortest limit is a minute, but the end of a job that runs can be moved up.
    soon = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 2))
    bed.slurm.ask("scontrol", "update", f"jobid={job_number(bed)}", f"endtime={soon}")
    result = running.result().result
    assert (result.status, "at its time limit" in result.reason) == ("timeout", True)
    assert result.steps_done > 0


def test_a_drained_node_is_named_or_waited_for(bed: Bed, tmp_path: Path) -> None:
    bed.slurm.drain(bed.hosts["node-002"], "bad cable")
    with pytest.raises(SystemFaultError, match="node-002 is drained, bad cable"):
        start(make_job(hosts=("node-001", "node-002")), tmp_path / "named")
    run = start(make_job(nodes=4), tmp_path / "any")
    wait_until(lambda: run.poll() is None and "queue: " in run.phase, "the reason")
    assert not run.timed_out
    bed.slurm.resume(bed.hosts["node-002"])
    assert wait(run) == 0


def test_a_lost_slurmd_costs_one_attempt_and_its_node(bed: Bed, tmp_path: Path) -> None:
    running = Background(train, tmp_path, make_job(**LONG, retries=1))
    until_ranks_run(tmp_path)
    bed.slurm.stop(bed.hosts["node-002"])
    report = running.result()
    assert report.result.status == "ok"
    lost = "lost a node: node-002; job"
    assert any(
        lost in warning and "without node-002" in warning for warning in report.result.warnings
    )
    kept = json.loads((Path(report.folder) / "slurm.json").read_text())
    assert [attempt["state"] for attempt in kept["attempts"]] == ["NODE_FAIL", "COMPLETED"]
    assert list(kept["excluded"]) == ["node-002"] and "node-002" not in kept["attempts"][1]["nodes"]
    earlier = Path(report.folder) / "attempts" / f"{kept['attempts'][0]['job']}.0"
    assert (earlier / "steps" / "rank-00000.jsonl").exists()


def test_a_job_that_slurm_starts_anew_keeps_its_logs_apart(bed: Bed, tmp_path: Path) -> None:
    running = Background(
        train, tmp_path, make_job(**LONG, requeue=True, program=RESULT_LINES + RANK)
    )
    until_ranks_run(tmp_path)
    number = job_number(bed)
    bed.slurm.ask("scontrol", "requeue", number)
    report = running.result()
    assert report.result.status == "ok"
    kept = f"the output of the previous start is in attempts/{number}.0"
    assert f"Slurm restarted job {number} (restart 1); {kept}" in report.result.warnings
    folder = Path(report.folder)
    earlier = folder / "attempts" / f"{number}.0"
    assert (earlier / "logs" / "launcher.log").exists()
    assert (folder / "mlperf" / "result.txt").read_text() == "start 1"
    assert (earlier / "mlperf" / "result.txt").read_text() == "start 0"
    assert len((folder / "slurm.status").read_text().splitlines()) >= 3


def test_secrets_are_in_no_file_argument_or_record_of_slurm(bed: Bed, tmp_path: Path) -> None:
    program = "import os, time; assert os.environ['MY_TOKEN'][:3] == 'hid'; time.sleep(float(600))"
    secret = "hidden-7f3a"
    folder = tmp_path / "run"
    job = make_job(env={"MY_TOKEN": secret, "OPEN": "told"}, program=program)
    run = start(job, folder)
    wait_until(lambda: run.poll() is None and "running" in run.phase, "the start")
    number = job_number(bed)
    shown = bed.slurm.ask("scontrol", "show", "job", "-dd", number)
    shown += bed.slurm.ask("scontrol", "write", "batch_script", number, "-")
    shown += bed.slurm.ask("sacct", "-j", number, "-P", "-o", "ALL")
    shown += "".join(line for host in bed.hosts.values() for line in host.processes().values())
    assert "rank.py" in shown and secret not in shown
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files and not [path for path in files if secret in path.read_text(errors="replace")]
    assert run.poll() is None, "the ranks have the secret"
    run.stop()


@pytest.mark.parametrize(
    "name", ["a b", "$(touch owned)", "x;touch owned", 'it\'s "q" #', "#SBATCH -N9"]
)
def test_hostile_folders_and_names_stay_names(bed: Bed, tmp_path: Path, name: str) -> None:
    run = start(
        make_job(nodes=1, steps=1, name=f"{name}\n#SBATCH --nodes=3\ntouch owned"), tmp_path / name
    )
    assert wait(run) == 0
    assert not list(tmp_path.rglob("owned"))


CONTAINED = """
import json, os
names = ("BED_CONTAINER_IMAGE", "BED_CONTAINER_MOUNTS", "BED_CONTAINER_WORKDIR")
print(json.dumps([os.environ[name] for name in names]))
"""


def test_a_container_gets_the_run_folder_and_the_mounts(bed: Bed, tmp_path: Path) -> None:
    image, folder = "nvcr.io#nvidia/pytorch:24.10; touch owned", tmp_path / "a run"
    mounts = {"container_image": image, "container_mounts": ("/data set:/data:ro",)}
    run = start(make_job(nodes=1, program=CONTAINED, **mounts), folder)
    assert wait(run) == 0
    options = json.loads((folder / "logs" / "host-node-001.log").read_text())
    assert options == [image, f"{folder}:{folder},/data set:/data:ro", str(folder)]
    assert not list(folder.rglob("owned"))


def test_a_container_without_its_plugin_is_refused_before_submitting(
    plain: Bed, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="needs the Pyxis plugin"):
        train(tmp_path, make_job(container_image="docker://python"))
    record = read_record(next(tmp_path.glob("*/run.json")).parent)
    assert record.status == "failed" and "Pyxis" in str(record.reason)
    assert not plain.slurm.jobs()


def test_an_array_runs_every_folder_and_what_depends_on_it_waits(bed: Bed, tmp_path: Path) -> None:
    jobs = [make_job(nodes=1, steps=3, code=code) for code in (0, 0, 5)]
    folders = [tmp_path / f"task {n}" for n in range(3)]
    for job, folder in zip(jobs, folders, strict=True):
        folder.mkdir()
        slurm.prepare(job, folder)
    runs = slurm.submit_array(jobs, folders, tmp_path, at_once=2)
    array = runs[0].id.partition("_")[0]
    after = start(
        make_job(nodes=1, steps=1), tmp_path / "after", after=[f"{array}_0", f"{array}_1"]
    )
    never = start(make_job(nodes=1, steps=1), tmp_path / "never", after=[f"{array}_2"])
    assert [wait(run) == 0 for run in runs] == [True, True, False]
    assert wait(after) == 0
    assert wait(never) != 0
    verdict = never.verdict()
    assert verdict and verdict.status == "cancelled"
    assert "waited for a job that failed" in verdict.reason
    assert not (tmp_path / "never" / "slurm.status").exists()


CONTROLLER = """
import sys, time
from pathlib import Path
from tests.clusters.slurm_jobs import make_job, train
folder, steps, allocation = sys.argv[1:]
train(Path(folder), make_job(steps=int(steps), step_s=0.1, allocation=allocation or None))
"""


def test_a_job_outlives_its_killed_controller_and_is_found_again(bed: Bed, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", CONTROLLER, str(tmp_path), "150", ""]
    controller = subprocess.Popen(argv, env=bed.env)
    until_ranks_run(tmp_path)
    controller.send_signal(signal.SIGKILL)
    controller.wait()
    folder = next(tmp_path.glob("*/run.json")).parent
    alone = outcome.evaluate(folder).result
    assert (
        alone.status == "incomplete"
        and f"Slurm job {job_number(bed)} may still be running" in str(alone.reason)
    )
    wait_until(lambda: outcome.evaluate(folder).result.status == "ok", "the end of the job", 120)
    assert outcome.evaluate(folder).result.steps_done == 150
    assert slurm.cancel_orphan(folder) is None


def test_what_a_killed_controller_left_can_be_cancelled(bed: Bed, tmp_path: Path) -> None:
    run = start(make_job(**LONG), tmp_path / "run")
    assert isinstance(run, BatchRun)
    assert slurm.cancel_orphan(tmp_path / "run") == run.id
    wait_until(lambda: not bed.slurm.jobs(), "the end of the job", 30)


def test_without_accounting_the_job_itself_tells_its_end(plain: Bed, tmp_path: Path) -> None:
    assert train(tmp_path / "ok", make_job()).result.status == "ok"
    failed = train(tmp_path / "bad", make_job(code=3)).result
    assert (failed.status, failed.reason) == ("failed", "rank 1: ended with exit code 3")
    running = Background(train, tmp_path / "gone", make_job(**LONG))
    until_ranks_run(tmp_path / "gone")
    plain.slurm.ask("scancel", job_number(plain))
    cancelled = running.result().result
    assert cancelled.status == "cancelled" and "by another user" in cancelled.reason
