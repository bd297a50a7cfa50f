"""What is put around which rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.hardware import Cluster
from paceline.core.job import Job
from paceline.core.run import RunSpec
from paceline.core.training import Profiling
from paceline.engines import native
from paceline.profiles import nccl_logs as nccl
from paceline.profiles.nsys import tool as nsys
from paceline.profiles.nsys.tool import NsysSettings, first_words, nsys_words, output_pattern
from paceline.profiles.tools import PROGRAM, wrap_ranks
from tests.example import make_spec


def spec_of(device: str, **asked: object) -> RunSpec:
    profile = Profiling.model_validate({"tool": "nsys", "ranks": (0, 9), **asked})
    cluster = Cluster(name="here", device=device, nodes=2, devices_per_node=8)
    return make_spec(ranks=16, cluster=cluster, profile=profile)


def test_the_command_is_that_of_the_published_recipe() -> None:
    """Options of NVIDIA's Llama 3.1 recipe (dgxc-benchmarking 25.01), the file's name included."""
    words = nsys_words("cuda", "profiles/x", NsysSettings())
    assert words[:2] == ["nsys", "profile"]
    assert {*words[2:]} == {
        "--output=profiles/x", "--force-overwrite=true", "--inherit-environment=true",
        "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", "--nic-metrics=true",
        "--capture-range=cudaProfilerApi", "--capture-range-end=stop",
    }  # fmt: skip
    assert output_pattern("llama31-70b", "fp8", 64) == (
        "profiles/llama31-70b-fp8_64g_{job}_{node}_{local}"
    )
    assert first_words("cuda", NsysSettings()) == []


def test_gpu_counters_and_cpu_samples_are_added_when_asked_for() -> None:
    more = NsysSettings(gpu_metrics=True, cpu=True)
    assert first_words("cuda", more) == ["--gpu-metrics-device=all"]
    words = nsys_words("cuda", "x", more)
    assert "--sample=process-tree" in words and "--backtrace=none" in words


def test_a_cpu_run_is_recorded_as_a_whole() -> None:
    words = nsys_words("cpu", "x", NsysSettings(gpu_metrics=True))
    assert "--trace=osrt,nvtx" in words
    assert not [word for word in words if "capture-range" in word or "metrics" in word]
    assert first_words("cpu", NsysSettings(gpu_metrics=True)) == []


def test_chosen_ranks_and_the_first_of_a_host_are_written_down() -> None:
    spec = spec_of("H100", gpu_metrics=True)
    job = nsys.attach(native.job(spec, "x"), spec)
    settings = json.loads(job.files["profiles/tool.json"])
    assert settings["ranks"] == [0, 9] and settings["before_first"] == ["--gpu-metrics-device=all"]
    assert job.program[:3] == ("profiled_rank.py", "profiles/tool.json", "trainer")


def test_nccl_logs_a_file_a_rank_and_the_trainer_counts() -> None:
    spec = spec_of("H100", tool="nccl")
    job = nccl.attach(native.job(spec, "x"), spec)
    assert json.loads(job.files["profiles/tool.json"])["env"] == {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,ENV,COLL,P2P,NET,TUNING",
        "NCCL_DEBUG_FILE": "{folder}/profiles/nccl-{rank}.%h.%p.log",
        "PACELINE_TRAFFIC": "profiles",
    }
    assert nccl.unsupported(make_spec(ranks=1)) is not None
    assert nccl.unsupported(make_spec(ranks=2)) is None
    assert nccl.unsupported(make_spec(ranks=2, engine="torchtitan")) is not None


def test_on_a_gpu_only_the_native_trainer_tells_nsys_when_to_begin() -> None:
    foreign = spec_of("H100").model_copy(update={"engine": "torchtitan"})
    assert "cannot start and stop the capture" in str(nsys.unsupported(foreign))
    here = make_spec(ranks=2, engine="torchtitan")
    assert (nsys.unsupported(here) or "nsys is not in PATH").startswith("nsys is not in PATH")
    problem = nsys.unsupported(make_spec(ranks=2, engine="nemo"))
    assert "cannot start and stop the capture" in str(problem)


@pytest.mark.parametrize(
    ("rank", "local", "ran"),
    [(0, 0, ["-u", "-B"]), (9, 1, ["-u"]), (3, 3, [])],
)
def test_the_rank_list_is_honoured(tmp_path: Path, rank: int, local: int, ran: list[str]) -> None:
    """The words before the program stand for a tool; -B for what a host's first rank adds."""
    tool = [sys.executable, "-c", "import sys; print(sys.argv[1:])", "-u"]
    job = wrap_ranks(
        Job("x", "python", ("show.py", "a")), (0, 9), before=tool, before_first=["-B"],
        env={"WHERE": "{rank} of {node}, {job}"},
    )  # fmt: skip
    for name, text in job.files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "show.py").write_text("import os; print([], os.environ.get('WHERE'))")
    place = {"RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": "1", "PATH": "/usr/bin"}
    done = subprocess.run(
        [sys.executable, *job.program], cwd=tmp_path, env=place, capture_output=True, text=True
    )
    if not ran:
        assert done.stdout == "[] None\n", done.stderr
    else:
        assert done.stdout == f"{[*ran, sys.executable, 'show.py', 'a']}\n", done.stderr


def test_a_missing_tool_is_said_by_the_rank(tmp_path: Path) -> None:
    settings = tmp_path / "tool.json"
    words = {"ranks": None, "env": {}, "before": ["no-such-tool"], "before_first": []}
    settings.write_text(json.dumps(words))
    command = [sys.executable, str(PROGRAM), str(settings), "x.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "no-such-tool is not installed on this host" in done.stderr
