"""Samples power, energy, clocks and temperatures of one host beside a run: standard library only.

    python telemetry_program.py FILE INTERVAL_S ROOT PARENT

One JSON object a line goes to FILE until SIGTERM, or until PARENT, the process that started it, is
gone. `ROOT` is where the kernel's files are looked for.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ASK_LIMIT_S = 10.0
GPU_FIELDS = ("index", "power.draw", "clocks.sm", "clocks.mem", "temperature.gpu")
GPU_NAMES = ("index", "power_w", "sm_clock_mhz", "memory_clock_mhz", "temperature_c")
COUNTED = re.compile(r"package|dram")
"""Domains of the processors' energy; cores lie inside the package, the platform around it."""


class Counters:
    """The processors' energy since the first look, through the counters' wrapping."""

    def __init__(self, root: Path) -> None:
        domains = sorted((root / "sys/class/powercap").glob("intel-rapl:*"))
        self._domains = [d for d in domains if COUNTED.match(_read(d / "name") or "")]
        self._last = [self._microjoules(domain) for domain in self._domains]
        self._sum_uj = 0

    def why_unknown(self) -> str | None:
        """Why the processors' energy cannot be read, None if it can."""
        if not self._domains:
            return "the kernel offers no energy counters (powercap)"
        if None in self._last:
            return "the energy counters (powercap) can be read by root only"
        return None

    def joules(self) -> float | None:
        """Joules since the start; None when a counter cannot be read any more."""
        for at, domain in enumerate(self._domains):
            now, before = self._microjoules(domain), self._last[at]
            if now is None or before is None:
                return None
            span = int(_read(domain / "max_energy_range_uj") or 0)
            self._sum_uj += now - before if now >= before else now - before + span
            self._last[at] = now
        return self._sum_uj / 1e6

    def _microjoules(self, domain: Path) -> int | None:
        text = _read(domain / "energy_uj")
        return int(text) if text and text.isdigit() else None


def start_line(root: Path, interval_s: float, counters: Counters) -> dict[str, Any]:
    """Where the figures come from, and why some are not there."""
    sources, unknown = {}, {}
    if any("power_w" in gpu for gpu in gpus()):
        sources["gpu"] = "nvidia-smi power.draw"
    else:
        unknown["gpu"] = "no driver of NVIDIA devices tells their power (nvidia-smi)"
    if reason := counters.why_unknown():
        unknown["cpu"] = reason
    else:
        sources["cpu"] = "powercap energy counters"
    return {
        "event": "telemetry",
        "schema_version": 1,
        "host": platform.node(),
        "interval_s": interval_s,
        "sources": sources,
        "unknown": unknown,
    }


def sample(root: Path, counters: Counters, start: dict[str, Any]) -> dict[str, Any]:
    """One look at everything that tells something."""
    line: dict[str, Any] = {"event": "sample", "time_unix": time.time()}
    if "gpu" in start["sources"]:
        line["gpus"] = gpus()
    if "cpu" in start["sources"]:
        line["cpu_energy_j"] = counters.joules()
    texts = [
        _read(p)
        for p in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_cur_freq")
    ]
    clocks = [int(clock) / 1000 for clock in texts if clock and clock.isdigit()]
    if clocks:
        line["cpu_clock_mhz"] = sum(clocks) / len(clocks)
    if (hottest := cpu_temperature_c(root)) is not None:
        line["cpu_temperature_c"] = hottest
    return line


def cpu_temperature_c(root: Path) -> float | None:
    """The hottest sensor of the processors, None where there is none."""
    sensors = (root / "sys/class/hwmon").glob("hwmon*")
    names = [s for s in sensors if _read(s / "name") in ("coretemp", "k10temp", "zenpower")]
    texts = [_read(path) for sensor in names for path in sensor.glob("temp*_input")]
    return max((int(t) / 1000 for t in texts if t and t.isdigit()), default=None)


def gpus() -> list[dict[str, Any]]:
    """What nvidia-smi tells of each device now; empty without it."""
    if shutil.which("nvidia-smi") is None:
        return []
    question = f"--query-gpu={','.join(GPU_FIELDS)}"
    command = ["nvidia-smi", question, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [line.split(", ") for line in done.stdout.splitlines()] if done.returncode == 0 else []
    return [_gpu(row) for row in rows if len(row) == len(GPU_FIELDS) and row[0].strip().isdigit()]


def _gpu(row: list[str]) -> dict[str, Any]:
    numbers = {name: _number(text) for name, text in zip(GPU_NAMES, row, strict=True)}
    readings = {name: value for name, value in numbers.items() if value is not None}
    return {**readings, "index": int(row[0])}


def main(path: str, interval_s: float, root: Path, parent: int) -> None:
    """Sample until told to end, or until `parent` is not there any more to tell."""
    told_to_end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told_to_end.set())
    counters = Counters(root)
    with Path(path).open("w", encoding="utf-8", buffering=1) as out:
        start = start_line(root, interval_s, counters)
        out.write(json.dumps(start) + "\n")
        due, last = time.monotonic(), not start["sources"]
        while not last and os.getppid() == parent:
            # Asked before the sample: the last one lies behind the end of what is measured.
            last = told_to_end.is_set()
            out.write(json.dumps(sample(root, counters, start)) + "\n")
            due = max(due + interval_s, time.monotonic())
            told_to_end.wait(max(0.0, due - time.monotonic()))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
