"""A job is changed only where its cluster asks for a binding, and then for every launcher alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.core.hardware import Cluster
from paceline.core.job import Job
from paceline.machines import local
from paceline.machines.node.binding import with_binding
from paceline.machines.node.script import render_node


def job(bind: str, device: str = "cpu") -> Job:
    cluster = Cluster(name="here", device=device, devices_per_node=2, bind=bind)
    return Job("a job", "python", ("main.py", "x"), devices_per_node=2, cluster=cluster)


def test_without_a_binding_the_job_is_what_it_was():
    assert with_binding(job("none")) == job("none")
    alone = Job("a job", "python", ("main.py",))
    assert with_binding(alone) is alone


@pytest.mark.parametrize(("device", "wish"), [("cpu", "cpu"), ("H100-SXM", "cuda")])
def test_auto_goes_by_the_kind_of_device(device: str, wish: str):
    bound_job = with_binding(job("auto", device))
    assert bound_job.program == ("bind.py", wish, "main.py", "x")
    assert "sched_setaffinity" in bound_job.files["bind.py"]
    assert local.render(bound_job).endswith(f" bind.py {wish} main.py x\n")
    assert render_node(bound_job).endswith(f" bind.py {wish} main.py x\n")


def test_a_files_content_travels_with_the_job(tmp_path: Path):
    file = tmp_path / "cores of mine"
    file.write_text("# rank cores nic\n1 4-7\n0 0-3 mlx5_0\n")
    bound_job = with_binding(job(str(file)))
    assert bound_job.program == ("bind.py", "bind.json", "main.py", "x")
    assert json.loads(bound_job.files["bind.json"]) == [
        {"cores": "0-3", "nic": "mlx5_0"},
        {"cores": "4-7", "nic": None},
    ]


def test_a_file_that_misses_ranks_or_is_none_is_refused(tmp_path: Path):
    file = tmp_path / "cores"
    file.write_text("0 0-3\n")
    with pytest.raises(UserError, match="has cores for 1 local rank of 2"):
        with_binding(job(str(file)))
    with pytest.raises(UserError, match="cannot be read"):
        with_binding(job(str(tmp_path / "nothing")))
