"""Power and energy of a node are sampled during a run, and the sampler ends with the agent."""

from __future__ import annotations

import contextlib
import json
import platform
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from paceline.core.job import Job
from paceline.core.telemetry import Telemetry, energy_between, read_telemetry
from paceline.machines.node.agent import SAMPLER, SYSTEM_ROOT
from paceline.machines.node.script import NODE_SCRIPT, SAMPLER_FILE, prepare_node
from paceline.machines.probe import telemetry
from tests.waiting import wait_until

WAITING = """
import glob, sys, time
deadline = time.monotonic() + 60
while not any(len(open(f).readlines()) >= int(sys.argv[1]) for f in glob.glob("telemetry/*.jsonl")):
    assert time.monotonic() < deadline
    time.sleep(0.02)
for folder in glob.glob(sys.argv[2] + "/sys/class/powercap/*"):
    open(folder + "/energy_uj", "w").write("17000000")
"""
"""Rank that waits for a number of lines, and then uses some energy."""
SLEEPING = "import time; time.sleep(300)"


def make_root(folder: Path) -> Path:
    """A kernel's files of one package that has used 10 J."""
    domain = folder / "sys/class/powercap/intel-rapl:0"
    domain.mkdir(parents=True)
    for name, text in {
        "name": "package-0",
        "energy_uj": "10000000",
        "max_energy_range_uj": "9",
    }.items():
        (domain / name).write_text(text)
    return folder


def started(
    folder: Path, program: str, *arguments: str, root: Path, sampled: bool = True
) -> subprocess.Popen[str]:
    """Node 3 of four at work, with one rank."""
    prepare_node(
        Job(
            "t",
            sys.executable,
            ("rank.py", *arguments),
            files={"rank.py": program},
            nodes=4,
            env={SYSTEM_ROOT: str(root)},
            sampled=sampled,
        ),
        folder,
    )
    return subprocess.Popen(
        ["bash", str(folder / NODE_SCRIPT), "3", "127.0.0.1", "29999"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def file_of(folder: Path) -> Path:
    (path,) = (folder / "telemetry").iterdir()
    return path


def telemetry_of(folder: Path) -> Telemetry:
    telemetry = read_telemetry(file_of(folder).read_text().splitlines())
    assert telemetry is not None
    return telemetry


def child_of(agent: int, file: str) -> psutil.Process:
    """The agent's process that runs a file, once it has started."""

    def child() -> psutil.Process | None:
        for process in psutil.Process(agent).children():
            # What the script itself starts is short.
            with contextlib.suppress(psutil.NoSuchProcess):
                if file in " ".join(process.cmdline()):
                    return process
        return None

    return wait_until(child, f"a process that runs {file}")


def gone(process: psutil.Process, within_s: float = 30) -> bool:
    return not psutil.wait_procs([process], timeout=within_s)[1]


def test_agent_and_sampler_agree_on_their_names():
    assert SAMPLER == SAMPLER_FILE == Path(telemetry.telemetry_program.__file__).name
    assert telemetry.SYSTEM_ROOT == SYSTEM_ROOT


def test_a_node_is_sampled_until_behind_the_end_of_its_ranks(tmp_path: Path):
    root = make_root(tmp_path / "host")
    process = started(tmp_path, WAITING, "2", str(root), root=root)
    output, _ = process.communicate(timeout=120)

    telemetry = telemetry_of(tmp_path)
    assert process.returncode == 0, output
    assert file_of(tmp_path).name == f"00003-{platform.node()}.jsonl"
    assert telemetry.start.host == platform.node() and telemetry.start.sources["cpu"]
    first, last = telemetry.samples[0], telemetry.samples[-1]
    assert energy_between([telemetry], first.time_unix, last.time_unix).parts_j["cpu"] == 7.0


def test_a_node_that_tells_nothing_says_so_and_trains(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    process = started(tmp_path, WAITING, "1", "/nowhere", root=tmp_path / "empty")
    output, _ = process.communicate(timeout=120)

    assert process.returncode == 0, output
    telemetry = telemetry_of(tmp_path)
    assert "powercap" in telemetry.start.unknown["cpu"] and "cpu" not in telemetry.start.sources


@pytest.mark.parametrize("sampled", [True, False])
def test_what_cannot_be_sampled_or_need_not_trains_all_the_same(tmp_path: Path, sampled: bool):
    """A file in the folder's place stands for a disk that takes nothing more."""
    (tmp_path / "telemetry").write_text("in the way")
    process = started(tmp_path, "print('trained')", root=tmp_path, sampled=sampled)

    assert "trained" in process.communicate(timeout=120)[0] and process.returncode == 0
    assert (tmp_path / SAMPLER_FILE).is_file() == sampled


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_sampler_ends_with_its_agent_however_that_ends(tmp_path: Path, number: signal.Signals):
    root = make_root(tmp_path / "host")
    process = started(tmp_path, SLEEPING, root=root)
    sampler, rank = child_of(process.pid, SAMPLER), child_of(process.pid, "rank.py")
    try:
        process.send_signal(number)
        assert gone(sampler), "nobody is left to sample for"
    finally:
        # Nothing ends the ranks of an agent that was killed outright.
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.kill()
        process.communicate(timeout=60)
    assert process.returncode == (143 if number == signal.SIGTERM else -9)


def test_a_sampler_whose_starter_is_gone_before_it_begins_samples_nothing(tmp_path: Path):
    """Another's process id in the starter's place: that of a process that has ended."""
    over = subprocess.Popen([sys.executable, "-c", ""])
    over.wait()
    out = tmp_path / "out.jsonl"
    program = [sys.executable, telemetry.telemetry_program.__file__, str(out), "0.02"]
    subprocess.run([*program, str(make_root(tmp_path)), str(over.pid)], check=True, timeout=60)

    (line,) = out.read_text().splitlines()
    assert json.loads(line)["event"] == "telemetry"
