"""What Slurm gets is the text that stands in scripts, and nothing a user wrote escapes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import UserError
from paceline.core.hardware import Cluster, SlurmSettings
from paceline.core.job import Job
from paceline.core.layout import Layout
from paceline.engines import native
from paceline.machines import slurm
from paceline.machines.node.script import render_node
from paceline.machines.slurm.script import array_script, batch_options, restart_lines
from tests.example import make_spec

SCRIPTS = Path(__file__).parent / "scripts"
EVERYTHING: dict[str, Any] = {
    "partition": "gpu",
    "account": "bench",
    "qos": "high",
    "reservation": "mlperf",
    "constraint": "[rack1|rack2]",
    "gres": "gpu:h100:8,nic:1",
    "exclude": ("node-007", "node-[011-012]"),
    "segment": 2,
    "requeue": True,
    "container_image": "nvcr.io#nvidia/pytorch:24.10",
    "container_mounts": ("/data:/data:ro", "/it's here:/x"),
}


def make_job(
    name: str = "tiny-opt", *, nodes: int = 2, timeout_s: float | None = None, **site: Any
) -> Job:
    cluster = Cluster(
        name="site",
        device="H100-SXM",
        nodes=nodes,
        devices_per_node=8,
        launcher="slurm",
        hosts=site.pop("hosts", ()),
        interface=site.pop("interface", None),
        slurm=SlurmSettings(**site),
    )
    return Job(
        name=name,
        python="python3",
        program=("main.py",),
        nodes=nodes,
        devices_per_node=8,
        timeout_s=timeout_s,
        cluster=cluster,
    )


GOLDEN = {
    "slurm_plain.sh": make_job(),
    "slurm_everything.sh": make_job(
        timeout_s=61, hosts=("node-004", "node-002"), interface="ib0", **EVERYTHING
    ),
    "slurm_step.sh": make_job(allocation="4711", timeout_s=600),
    "slurm_step_hosts.sh": make_job(allocation="4711", hosts=("a-2", "a-1"), interface="ib0"),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_scripts_are_the_golden_ones(name: str) -> None:
    assert slurm.render(GOLDEN[name]) == (SCRIPTS / name).read_text()


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("slurm_*.sh")), ids=lambda path: path.name)
def test_bash_accepts_the_golden_scripts(path: Path) -> None:
    assert subprocess.run(["bash", "-n", path], capture_output=True, text=True).stderr == ""


def test_an_array_goes_to_each_folder() -> None:
    jobs = [make_job("a"), make_job("b"), make_job("c")]
    text = array_script(jobs, ["/runs/a b", "/runs/$(touch x)\n#SBATCH -N9", "/runs/c"], at_once=2)
    assert text == (SCRIPTS / "slurm_array.sh").read_text()
    with pytest.raises(UserError, match="request different resources"):
        array_script([make_job("a"), make_job("b", nodes=3)], ["/a", "/b"])


def begun(folder: Path, restart: int, retries: int) -> int:
    """What job.sh does first in its start of that number; its exit code."""
    cluster = make_job(requeue=True, retries=retries).cluster
    assert cluster
    script = "\n".join(["set -uo pipefail", *restart_lines(cluster)])
    place = {"SLURM_JOB_ID": "5", "SLURM_RESTART_COUNT": str(restart), "PATH": os.environ["PATH"]}
    return subprocess.run(["bash", "-c", script], cwd=folder, env=place, check=False).returncode


def test_every_start_keeps_what_the_one_before_it_wrote(tmp_path: Path) -> None:
    for restart in range(3):
        assert begun(tmp_path, restart, retries=2) == 0
        assert not [*tmp_path.glob("logs/*"), *tmp_path.glob("mlperf/*")]
        for name in ("logs", "steps", *(("mlperf", "telemetry") if restart else ())):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "said.txt").write_text(f"start {restart}")
    kept = {
        str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.glob("*/**/said.txt")
    }
    assert {place: text for place, text in kept.items() if place.startswith("attempts")} == {
        "attempts/5.0/logs/said.txt": "start 0",
        "attempts/5.0/steps/said.txt": "start 0",
        **{
            f"attempts/5.1/{name}/said.txt": "start 1"
            for name in ("logs", "steps", "mlperf", "telemetry")
        },
    }
    assert kept["mlperf/said.txt"] == "start 2"
    assert begun(tmp_path, 3, retries=2) == 1 and (tmp_path / "mlperf" / "said.txt").exists()


@pytest.mark.parametrize(("seconds", "minutes"), [(1, 1), (60, 1), (60.5, 2), (7200, 120)])
def test_time_limits_are_whole_minutes_rounded_up(seconds: float, minutes: int) -> None:
    assert f"#SBATCH --time={minutes}\n" in slurm.render(make_job(timeout_s=seconds))


def test_gpus_are_asked_for_and_processors_are_not() -> None:
    assert "#SBATCH --gres=gpu:8\n" in slurm.render(make_job())
    job = make_job()
    assert job.cluster
    on_cpu = replace(job, cluster=job.cluster.model_copy(update={"device": "cpu"}))
    assert "gres" not in slurm.render(on_cpu)


@pytest.mark.parametrize(
    ("site", "expected"),
    [
        ({}, ["--mem=0", "--time=20"]),
        ({"mem": "none"}, ["--time=20"]),
        ({"mem": "180G", "time": "2:00:00"}, ["--mem=180G", "--time=2:00:00"]),
        ({"mem": "none", "qos": "dev", "account": "a"}, ["--account=a", "--qos=dev", "--time=20"]),
    ],
)
def test_a_site_sets_memory_and_time_or_leaves_memory_out(
    site: dict[str, str], expected: list[str]
) -> None:
    options = batch_options(make_job(timeout_s=1200, **site))
    names = ("--mem=", "--time=", "--qos=", "--account=")
    assert [option for option in options if option.startswith(names)] == expected


def test_memory_and_time_come_from_the_variables_of_sbatch() -> None:
    variables = {"SBATCH_MEM_PER_NODE": "64G", "SBATCH_TIMELIMIT": "30"}
    site = SlurmSettings(time="2:00:00").with_variables(variables)
    assert (site.mem, site.time) == ("64G", "2:00:00")


HOSTILE = [
    "x y",
    "x\n#SBATCH --nodes=9",
    "x\ttouch",
    "$(touch owned)",
    "`id`",
    "x;touch owned",
    "x'",
    'x"',
    "x#y",
    "x\\y",
    "\x00",
    "x\u2028y",
    "",
]


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize(
    "name",
    [
        "partition",
        "account",
        "qos",
        "reservation",
        "constraint",
        "gres",
        "mem",
        "time",
        "hint",
        "exclude",
        "allocation",
    ],
)
def test_values_that_slurm_could_read_otherwise_are_refused(name: str, value: str) -> None:
    if name == "allocation" and not value:
        return
    setting = (value,) if name == "exclude" else value
    with pytest.raises(UserError, match=f"cluster.slurm.{name}"):
        slurm.render(make_job(**{name: setting if name != "exclude" or value else ("a", "\n")}))


@pytest.mark.parametrize("value", HOSTILE)
def test_a_jobs_name_is_made_harmless(value: str) -> None:
    lines = slurm.render(make_job(name=value)).splitlines()
    assert len(lines) == len(slurm.render(make_job()).splitlines())
    assert lines[1].removeprefix("#SBATCH --job-name=").replace("-", "").isalnum()


@pytest.mark.parametrize("image", ["a\nb", "a\x1bb"])
def test_control_characters_in_an_image_are_refused(image: str) -> None:
    with pytest.raises(UserError, match="container_image"):
        slurm.render(make_job(container_image=image))


@pytest.mark.parametrize("name", ["100%j", "a\\b", "a\nb"])
def test_folders_that_slurm_would_rename_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="which Slurm interprets"):
        slurm.check_folder(tmp_path / name)
    slurm.check_folder(tmp_path / "$(touch owned); it's")
    with pytest.raises(UserError):
        slurm.check_folder(tmp_path / "a:b", container=True)


def steps_of(job: Job) -> str:
    return "\n".join(line for line in slurm.render(job).splitlines() if "srun " in line)


def test_cpus_and_their_hint_are_asked_of_the_job_and_of_its_step() -> None:
    text = slurm.render(job := make_job(cpus_per_task=40, hint="nomultithread"))
    assert "#SBATCH --cpus-per-task=40\n#SBATCH --hint=nomultithread\n" in text
    assert "--cpus-per-task=40 --hint=nomultithread " in steps_of(job)
    assert "--cpu-bind" not in steps_of(job), "srun refuses a hint together with it"


def test_a_hint_without_a_number_of_cpus_would_bind_a_step_to_one() -> None:
    job = make_job(hint="nomultithread")
    assert "#SBATCH --hint=nomultithread\n" in slurm.render(job)
    assert "--cpu-bind=none" in steps_of(job) and "--hint" not in steps_of(job)


def test_a_step_of_an_allocation_takes_the_cpus_that_the_site_says() -> None:
    (line,) = steps_of(make_job(allocation="4711", cpus_per_task=40)).splitlines()
    assert line.count("--cpus-per-task") == 1 and "--cpus-per-task=40" in line


def test_no_generic_resources_are_asked_for_where_the_site_says_none() -> None:
    for job in (make_job(gres="none"), make_job(gres="none", allocation="4711")):
        assert "gres" not in slurm.render(job)


def test_an_image_has_its_own_python_unless_one_is_named() -> None:
    cluster = make_job(container_image="nvcr.io#nvidia/pytorch:24.10").cluster
    assert cluster and cluster.interpreter == "python3"
    assert cluster.model_copy(update={"python": "/opt/py"}).interpreter == "/opt/py"
    assert cluster.model_copy(update={"launcher": "ssh"}).interpreter == sys.executable
    spec = make_spec(cluster=cluster, layout=Layout(micro_batch=1))
    job = native.job(spec, "x")
    assert "exec python3 agent.py" in render_node(job) and sys.executable not in render_node(job)
    assert native.missing(spec) is None
