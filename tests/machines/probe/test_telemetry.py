"""The sampler reads the kernel's own files, of this machine or of another, while programs run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.core.telemetry import energy_between, read_telemetry
from paceline.machines.probe import telemetry_program
from paceline.machines.probe.telemetry import sample_telemetry
from paceline.machines.probe.telemetry_program import (
    Counters,
    NvidiaSmiDevices,
    cpu_temperature_c,
    devices,
    sample,
    start_line,
)
from tests.machines.ranks import wait_gone
from tests.waiting import wait_until

RANGE = 262_143_328_850
SMI = """#!/bin/sh
echo '0, 412.35, 1980, 2619, 61'
echo '1, [N/A], 1980, 2619, 58'
"""


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with two packages, memory, and no devices."""
    root = tmp_path / "host"
    for number, (name, joules) in enumerate([("package-0", 10), ("package-1", 20), ("psys", 99)]):
        put(root, f"sys/class/powercap/intel-rapl:{number}", name, joules)
    put(root, "sys/class/powercap/intel-rapl:0:0", "core", 5)
    put(root, "sys/class/powercap/intel-rapl:0:1", "dram", 1)
    monkeypatch.setenv("PATH", str(tmp_path / "bin") + os.pathsep + "/bin:/usr/bin")
    return root


def put(root: Path, place: str, name: str, joules: float) -> None:
    folder = root / place
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(name + "\n")
    (folder / "energy_uj").write_text(f"{int(joules * 1e6)}\n")
    (folder / "max_energy_range_uj").write_text(f"{RANGE}\n")


def driver(tmp_path: Path, text: str = SMI) -> None:
    """A program in the place of the driver's, which prints as it does."""
    path = tmp_path / "bin/nvidia-smi"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def test_packages_and_memory_are_counted_once_and_through_the_wrap(node: Path):
    counters = Counters(node)
    assert counters.unknown_reason() is None and counters.joules() == 0.0

    put(node, "sys/class/powercap/intel-rapl:0", "package-0", 14)
    put(node, "sys/class/powercap/intel-rapl:0:0", "core", 9)
    put(node, "sys/class/powercap/intel-rapl:0:1", "dram", 1.5)
    assert counters.joules() == pytest.approx(4.5)

    put(node, "sys/class/powercap/intel-rapl:1", "package-1", 0)
    assert counters.joules() == pytest.approx(4.5 + RANGE / 1e6 - 20)


def test_counters_that_cannot_be_read_say_why(node: Path, tmp_path: Path):
    (node / "sys/class/powercap/intel-rapl:1/energy_uj").unlink()
    assert "only be read by root" in str(Counters(node).unknown_reason())
    assert "has no energy counters" in str(Counters(tmp_path / "empty").unknown_reason())


def test_devices_tell_what_they_can(node: Path, tmp_path: Path):
    driver(tmp_path)
    first, second = NvidiaSmiDevices().read()

    assert first == {
        "index": 0,
        "power_w": 412.35,
        "sm_clock_mhz": 1980.0,
        "memory_clock_mhz": 2619.0,
        "temperature_c": 61.0,
    }
    assert "power_w" not in second and second["temperature_c"] == 58.0
    driver(tmp_path, "#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert NvidiaSmiDevices().read() == []


def test_a_look_holds_clocks_and_temperatures(node: Path, tmp_path: Path):
    clock = node / "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq"
    clock.parent.mkdir(parents=True)
    clock.write_text("2450000\n")
    sensor = node / "sys/class/hwmon/hwmon3"
    sensor.mkdir(parents=True)
    (sensor / "name").write_text("k10temp\n")
    (sensor / "temp1_input").write_text("58250\n")
    driver(tmp_path)
    counters = Counters(node)
    program = NvidiaSmiDevices()
    line = sample(node, counters, program, start_line(1.0, counters, program))

    assert (line["cpu_clock_mhz"], line["cpu_temperature_c"]) == (2450.0, 58.25)
    assert line["cpu_energy_j"] == 0.0 and len(line["gpus"]) == 2
    assert cpu_temperature_c(tmp_path / "empty") is None


def lines(folder: Path) -> list[dict[str, Any]]:
    (path,) = (folder / "telemetry").iterdir()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_is_sampled_from_its_beginning_to_behind_its_end(node: Path, tmp_path: Path):
    with sample_telemetry(tmp_path, 0.02, node):
        wait_until(
            lambda: list(tmp_path.glob("telemetry/*")) and len(lines(tmp_path)) > 2, "samples"
        )
        put(node, "sys/class/powercap/intel-rapl:0", "package-0", 13)
        wait_until(lambda: lines(tmp_path)[-1]["cpu_energy_j"] == pytest.approx(3.0), "the energy")
        stop = time.time()
    (path,) = (tmp_path / "telemetry").iterdir()
    telemetry = read_telemetry(path.read_text().splitlines())
    assert telemetry is not None and telemetry.start.sources == {"cpu": "powercap energy counters"}
    energy = energy_between([telemetry], telemetry.samples[0].time_unix, stop)
    assert energy.energy_j == pytest.approx(3.0)
    last = telemetry.samples[-1]
    assert last.time_unix >= stop and last.cpu_energy_j == pytest.approx(3.0)


def test_where_nothing_can_be_read_no_program_runs_and_the_reason_stays(tmp_path: Path):
    before = subprocess.run(["ps", "-ef"], capture_output=True, text=True).stdout
    with sample_telemetry(tmp_path, root=tmp_path / "empty"):
        during = subprocess.run(["ps", "-ef"], capture_output=True, text=True).stdout
        assert during.count(str(tmp_path)) == before.count(str(tmp_path))
    (start,) = lines(tmp_path)

    assert start["sources"] == {} and "powercap" in start["unknown"]["cpu"]
    assert energy_between([read_telemetry([json.dumps(start)])], 0, 1).energy_j is None  # type: ignore[list-item]


def test_this_machine_tells_its_energy_or_why_not():
    counters = Counters(Path("/"))
    start = start_line(1.0, counters, devices())

    assert set(start["sources"]) | set(start["unknown"]) == {"gpu", "cpu"}
    assert all(start["unknown"].values())


def test_the_sampler_ends_with_whoever_started_it(node: Path, tmp_path: Path):
    out = tmp_path / "out.jsonl"
    command = [sys.executable, telemetry_program.__file__, str(out), "0.02", str(node)]
    starter = (
        "import os, subprocess, time; "
        f"print(subprocess.Popen([*{command!r}, str(os.getpid())]).pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    wait_until(lambda: out.exists() and len(out.read_text().splitlines()) > 2, "samples")
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    wait_gone([pid])


def status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"
