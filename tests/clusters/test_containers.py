"""A submission whose trainer is in an image alone, run by its own run.sub on two nodes."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.core.result import Result
from paceline.runs import flow
from paceline.runs.plan import Plan, make_plan
from tests.clusters.bed import Bed
from tests.clusters.foreign_jobs import on_site, request, words
from tests.engines.batch_site import CONFIG, SYSTEM

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
    first_line = (SUBMISSION / "config_common.sh").read_text().splitlines()[0]
    roots = mounted | {f"/{path.name}" for path in image.iterdir()}
    for rank, entry in enumerate(variables):
        assert (entry["RANK"], entry["WORLD_SIZE"], entry["SEED"]) == (str(rank), "4", "7")
        assert entry["cwd"] == "/workspace/llm" and entry["data"] == "text of C4"
        assert set(entry["root"].split()) <= roots, "nothing of the host but the job's folder"
        assert "data_is_writable" not in entry
        assert entry["BED_CONTAINER_NAME"].startswith("llama31_8b_")
        assert entry["BED_CONTAINER_ENV"] == "MASTER_PORT,MASTER_ADDR"
        assert entry["common"] == first_line, "one file is mounted"
        assert entry["same_path"].startswith(f"{folder}/results/"), "mounted where it is"
        assert "BED_CONTAINER_IMAGE" not in entry, "the container is found by its name"
    assert not list(image.glob("workspace/llm/scratch-*")), "the image stays as it was"
    assert not list((tmp_path / "c4").glob("mine"))
