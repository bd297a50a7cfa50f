"""A submission whose trainer is in an image alone, run by its own run.sub on two nodes."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.core.result import Result
from paceline.files.run_folder import read_record
from paceline.runs import flow
from paceline.runs.plan import Plan, make_plan
from tests.clusters.bed import Bed
from tests.clusters.foreign_jobs import lose, on_site, request, with_variable, words
from tests.clusters.slurm_jobs import Background
from tests.engines.batch_site import CONFIG, SYSTEM
from tests.waiting import wait_until

SUBMISSION = SYSTEM.with_name("mlperf_container")
PROGRAMS = ("bash", "cat", "date", "env", "seq", "sleep", "touch", "true")


@pytest.fixture
def bed(slurm_cluster: Bed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bed:
    return on_site(slurm_cluster, monkeypatch, tmp_path)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A root of its own: the trainer, a shell, and what these need of this machine."""
    root = tmp_path / "llama31_8b"
    shutil.copytree(SUBMISSION / "image", root)
    for name in ("bin", "lib", "lib64", "etc", "data", "results"):
        (root / "usr" / name).mkdir(exist_ok=True)
        (root / name).mkdir() if name in ("etc", "data", "results") else (root / name).symlink_to(
            f"usr/{name}"
        )
    for name in PROGRAMS:
        program = shutil.which(name)
        assert program
        shutil.copy(program, root / "usr" / "bin" / name)
        listed = subprocess.run(["ldd", program], capture_output=True, text=True).stdout
        for library in re.findall(r"(/\S+) \(0x", listed):
            place = root / Path(library).parent.relative_to("/")
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, place)
    return root


def plan_of(folder: Path, image: Path, *overrides: str) -> Plan:
    (folder / "c4").mkdir()
    (folder / "c4" / "c4.txt").write_text("text of C4\n")
    settings = {
        "config": str(SUBMISSION / CONFIG),
        "container": str(image),
        "data": str(folder / "c4"),
    }
    chosen = words(settings, "engine=mlperf", "seed=7", *overrides)
    return make_plan(request(folder, "llama31-8b", "mlperf-trial", chosen))


def run(plan: Plan, runs: Path) -> tuple[Result, Path]:
    report = flow.run(plan, runs, ["test"], lambda _: None, probe=False)
    return report.result, Path(report.folder)


def test_a_submission_trains_in_its_container(bed: Bed, image: Path, tmp_path: Path) -> None:
    result, folder = run(plan_of(tmp_path, image), tmp_path / "runs")

    assert result.status == "ok" and result.steps_done == 40, result.reason
    assert result.metrics["step_time_s"].value == pytest.approx(0.502, abs=0.001)
    seen = [(folder / "results" / f"seen-{rank}.txt").read_text() for rank in range(4)]
    variables = [dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE)) for text in seen]
    nodes = [entry["SLURMD_NODENAME"] for entry in variables]
    assert nodes == ["node-001", "node-001", "node-002", "node-002"]
    mounted = {"/data", "/dev", "/proc", "/results", "/sys", "/tmp", f"/{SUBMISSION.parts[1]}"}
    roots = mounted | {f"/{path.name}" for path in image.iterdir()}
    for rank, entry in enumerate(variables):
        assert (entry["RANK"], entry["WORLD_SIZE"], entry["SEED"]) == (str(rank), "4", "7")
        assert entry["cwd"] == "/workspace/llm" and entry["data"] == "text of C4"
        assert set(entry["root"].split()) <= roots, "nothing of the host but the job's folder"
        assert "data_is_writable" not in entry
        assert entry["BED_CONTAINER_NAME"].startswith("llama31_8b_")
        assert "BED_CONTAINER_IMAGE" not in entry, "the container is found by its name"
    assert not list(image.glob("workspace/llm/scratch-*")), "the image stays as it was"
    assert not list((tmp_path / "c4").glob("mine"))


def test_a_trainer_that_hangs_ends_with_the_time_that_was_asked_for(
    bed: Bed, image: Path, tmp_path: Path
) -> None:
    plan = with_variable(plan_of(tmp_path, image, "time_limit_s=8"), "HANGS")
    result, _ = run(plan, tmp_path / "runs")

    assert (result.status, result.steps_done) == ("timeout", 20)
    assert result.reason == "the time limit of 8 s passed"
    wait_until(lambda: not bed.slurm.jobs(), "the end of the job")


def knows_its_nodes(runs: Path) -> bool:
    """Whether a controller has noted where its job runs; Slurm tells no more of a lost node."""
    return any(re.search(r"node-(002|\[)", each.read_text()) for each in runs.glob("*/slurm.json"))


def test_a_lost_node_ends_the_trial_by_its_name(bed: Bed, image: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    running = Background(run, with_variable(plan_of(tmp_path, image), "HANGS"), runs)
    wait_until(lambda: len(list(runs.glob("*/results/seen-*.txt"))) == 4, "the ranks to run", 60)
    wait_until(lambda: knows_its_nodes(runs), "the controller to see the job run", 60)
    lose(bed, "node-002")
    result, folder = running.result()

    assert (result.status, result.steps_done) == ("failed", 20)
    assert re.fullmatch(r"Slurm job \d+ lost a node: node-002", str(result.reason))
    assert read_record(folder).faulty_hosts == ("node-002",)
    wait_until(lambda: not bed.slurm.jobs(), "the job to be gone: a trial is not restarted")
