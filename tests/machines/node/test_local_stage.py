"""What a job names of the stage folder here is named on the nodes' own disks, and nothing else."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from pydantic import ValidationError

from paceline.core.hardware import Cluster
from paceline.core.job import Job
from paceline.machines.node.script import on_node_disks, presence_lines, render_node

FILE = "corpus-0a1b2c3d/content/code.jsonl"


def job_of(here: Path, stage: str | None) -> Job:
    cluster = Cluster(name="c", device="cpu", devices_per_node=1, stage=stage)
    return Job(
        name="job",
        python="python3",
        program=("main.py", f"--data={here}/{FILE}", f"/mnt{here}/{FILE}", f"{here}-old/{FILE}"),
        env={"DATA": f"/a:{here}/{FILE}"},
        files={"settings.json": json.dumps({"path": f"{here}/{FILE}"})},
        cluster=cluster,
    )


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stage folder whose name JSON writes in another way."""
    folder = tmp_path / "stäge"
    monkeypatch.setenv("PACELINE_STAGE", str(folder))
    return folder


def test_paths_below_the_stage_folder_are_those_of_the_node(here: Path):
    moved = on_node_disks(job_of(here, "/local/stage/"))
    there = f"/local/stage/{FILE}"
    others = (f"/mnt{here}/{FILE}", f"{here}-old/{FILE}")
    assert moved.program == ("main.py", f"--data={there}", *others)
    assert moved.env == {"DATA": f"/a:{there}"}
    assert json.loads(moved.files["settings.json"]) == {"path": there}
    assert "/local/stage" in render_node(job_of(here, "/local/stage"))
    plain = job_of(here, None)
    assert on_node_disks(plain) is plain and presence_lines(plain) == []


def test_a_node_without_the_asset_says_so(here: Path, tmp_path: Path):
    local = tmp_path / "node's disk"
    (line,) = presence_lines(on_node_disks(job_of(here, str(local))))
    missing = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert missing.returncode == 66
    assert (
        f"corpus-0a1b2c3d is not staged in {local}; run `paceline recipes stage" in missing.stderr
    )
    (local / "corpus-0a1b2c3d").mkdir(parents=True)
    (local / "corpus-0a1b2c3d" / "manifest.json").touch()
    assert subprocess.run(["bash", "-c", line]).returncode == 0


def test_the_folder_must_be_the_same_on_every_node(here: Path):
    with pytest.raises(ValidationError, match="is not an absolute path"):
        job_of(here, "stage")
