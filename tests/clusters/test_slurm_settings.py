"""What a real Slurm makes of CPUs and their hint, whatever SBATCH_ variables there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clusters.bed import Bed
from tests.clusters.slurm_jobs import make_job, start, wait

SHOW = """
import os, pathlib, subprocess
job = subprocess.run(["scontrol", "show", "job", os.environ["SLURM_JOB_ID"]],
                     capture_output=True, text=True).stdout
cpus = os.environ["SLURM_CPUS_PER_TASK"]
pathlib.Path(f"shown-{os.environ['RANK']}").write_text(f"{job} step of {cpus} CPUs\\n")
"""


def test_sbatch_takes_the_sites_settings_and_no_variable_that_job_sh_does_not_show(
    slurm_without_accounting: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = {"SBATCH_TIMELIMIT": "0:07:00", "SBATCH_PARTITION": "small", "SBATCH_GRES": "gpu:8"}
    for name, value in {**slurm_without_accounting.settings, **mine}.items():
        monkeypatch.setenv(name, value)
    job = make_job(program=SHOW, partition="batch", cpus_per_task=3, hint="nomultithread")
    assert wait(start(job, tmp_path / "run")) == 0
    for rank in (0, 1):
        shown = (tmp_path / "run" / f"shown-{rank}").read_text()
        assert "CPUs/Task=3" in shown and "step of 3 CPUs" in shown
        assert "ReqB:S:C:T=0:0:*:1" in shown, "one thread of a core, as the hint says"
        assert "TimeLimit=00:07:00" not in shown, "job.sh has no time limit"
        assert "Partition=batch" in shown, "job.sh names a partition: the user's does not count"
        assert "TresPerNode=gres:gpu:8" not in shown, "job.sh asks for no GPUs"
