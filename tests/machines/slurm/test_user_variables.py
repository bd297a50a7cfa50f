"""The user's SBATCH_ variables: passed on where job.sh says nothing, told of where it does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.core.job import Job
from paceline.machines.placement import Request
from paceline.machines.slurm.user_variables import passed_on, remarks
from paceline.runs.plan import make_plan
from tests.machines.slurm.test_script import make_job


def on_cpus(job: Job) -> Job:
    assert job.cluster
    return replace(job, cluster=job.cluster.model_copy(update={"device": "cpu"}))


@pytest.mark.parametrize(
    ("variable", "value", "site"),
    [
        ("SBATCH_ACCOUNT", "bench", {}),
        ("SBATCH_PARTITION", "gpu", {}),
        ("SBATCH_TIMELIMIT", "2:00:00", {}),
        ("SBATCH_HINT", "nomultithread", {}),
        ("SBATCH_WCKEY", "x", {}),
        ("SBATCH_GPUS_PER_NODE", "8", {"gres": "none"}),
    ],
)
def test_what_job_sh_says_nothing_of_is_passed_on_and_told(
    variable: str, value: str, site: dict[str, Any]
) -> None:
    job = make_job(**site)
    assert passed_on(job, {variable: value, "PATH": "/bin"}) == {variable}
    (remark,) = remarks(job, {variable: value})
    assert f"sbatch is given {variable}={value}" in remark


@pytest.mark.parametrize(
    ("variable", "value", "job", "why"),
    [
        ("SBATCH_PARTITION", "b", make_job(partition="a"), "job.sh says --partition=a"),
        ("SBATCH_TIMELIMIT", "60", make_job(timeout_s=61), "job.sh says --time=2"),
        ("SBATCH_GPUS_PER_NODE", "4", make_job(), "job.sh says --gres=gpu:8"),
        ("SBATCH_GRES", "gpu:4", make_job(gres="gpu:h100:8"), "job.sh says --gres=gpu:h100:8"),
        ("SBATCH_GPUS_PER_NODE", "8", on_cpus(make_job()), "asks for no --gres"),
        ("SBATCH_EXPORT", "NONE", make_job(), "job.sh says --export=ALL"),
        ("SBATCH_REQUEUE", "1", make_job(), "asks for no --requeue"),
        ("SBATCH_ARRAY_INX", "1-9", make_job(), "not among those that are passed on"),
    ],
)
def test_what_would_win_over_job_sh_is_kept_from_sbatch_and_told(
    variable: str, value: str, job: Job, why: str
) -> None:
    assert passed_on(job, {variable: value}) == set()
    (remark,) = remarks(job, {variable: value})
    assert f"{variable}={value} is kept from sbatch" in remark and why in remark


@pytest.mark.parametrize(
    ("variable", "value"),
    [("SBATCH_GPUS_PER_NODE", "8"), ("SBATCH_GPUS_PER_NODE", "h100:8"), ("SBATCH_GRES", "gpu:8")],
)
def test_what_asks_for_the_same_is_not_told(variable: str, value: str) -> None:
    assert passed_on(make_job(), {variable: value}) == set()
    assert remarks(make_job(), {variable: value}) == []


def test_a_plan_tells_it_before_anything_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "site.yaml"
    text = "name: site\ndevice: cpu\nnodes: 2\ndevices_per_node: 1\nlauncher: slurm\n"
    file.write_text(text + "slurm: {partition: a}\n")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("SBATCH_PARTITION", "b")
    plan = make_plan(Request("tiny-llama", cluster=str(file)))
    kept = "SBATCH_PARTITION=b is kept from sbatch: job.sh says --partition=a"
    assert kept in plan.notices and "#SBATCH --partition=a\n" in plan.script
