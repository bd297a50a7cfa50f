"""Check many nodes, as one rank of the check.

Run as python -m paceline.trainer.programs.node_check settings.json, once per device.

Writes JSON lines to check/rank-NNNNN.jsonl: `facts`, `rate` (GEMM, memory), `collective` (inside
the node), `pair` (between two nodes), `fault` for a part that failed, and `end`. The exit code is 0
for any finding, because a node's fault must not end the others.

`facts` are versions, cores, memory, disk and GPUs, found with the standard library only.
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
import time
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from paceline.trainer.config import read_json
from paceline.trainer.measure.event_log import EventLog, redirect_output
from paceline.trainer.measure.machine import core_text, cpu_name
from paceline.trainer.programs.host_program import HostProgram

QUERY_TIMEOUT_S = 15.0
MAX_XIDS = 20
GPU_FIELDS = ("name", "uuid", "driver_version", "memory.total", "pci.bus_id")
REMAPPED_ROWS = {"remapped_rows.pending": "rows_pending", "remapped_rows.failure": "rows_failed"}
"""Fields on remapped rows, which drivers report in either of two queries."""
HEALTH_FIELDS = (
    {"ecc.errors.uncorrected.volatile.total": "ecc_uncorrected"},
    REMAPPED_ROWS,
    {"temperature.gpu": "temperature_c"},
    *(
        {
            f"{group}.hw_slowdown": "hw_slowdown",
            f"{group}.hw_thermal_slowdown": "hw_thermal_slowdown",
            f"{group}.hw_power_brake_slowdown": "hw_power_brake_slowdown",
            f"{group}.sw_thermal_slowdown": "sw_thermal_slowdown",
        }
        for group in ("clocks_throttle_reasons", "clocks_event_reasons")
    ),
)
"""Field queries, sent separately: a driver that lacks one field rejects the whole query."""
XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")


def node_facts() -> dict[str, Any]:
    """Return the facts that affect speed or health, None if unknown, in less than a second."""
    cores, (folder_free, folder_size) = usable_cores(), _disk(".")
    return {
        "host": os.environ.get("PACELINE_HOST") or platform.node(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "nccl": _version("nvidia-nccl-cu12") or _version("nvidia-nccl-cu13"),
        "cpu": cpu_name(),
        "cores": cores,
        "num_cores": num_cores(cores),
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "memory_bytes": _memory("MemTotal"),
        "memory_available_bytes": _memory("MemAvailable"),
        "load": os.getloadavg()[0],
        "folder_free_bytes": folder_free,
        "folder_bytes": folder_size,
        "temporary_free_bytes": _disk(os.environ.get("TMPDIR") or "/tmp")[0],
        "gpus": gpus(),
        "xids": xids(),
    }


def usable_cores() -> str:
    """Return the hardware threads that ranks may use on this host, such as `0-3,8`.

    The binding of this rank has no effect on the result.
    """
    cores = json.loads(os.environ.get("PACELINE_BOUND", "{}")).get("host_cores")
    if cores is not None:
        return cores
    if hasattr(os, "sched_getaffinity"):
        return core_text(os.sched_getaffinity(0))
    return core_text(range(os.cpu_count() or 1))


def num_cores(text: str) -> int:
    """Return the count of numbers in a list such as `0-3,8`."""
    ends = [part.partition("-") for part in text.split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ends)


def gpus() -> list[dict[str, Any]]:
    """Return the GPUs with their health as the driver reports it; empty without a driver."""
    rows = _smi(GPU_FIELDS)
    devices: list[dict[str, Any]] = [
        dict(zip(("name", "uuid", "driver", "memory", "address"), row, strict=True)) for row in rows
    ]
    for fields in HEALTH_FIELDS if devices else ():
        if set(fields.values()) <= set(devices[0]):
            continue
        for gpu, values in zip(devices, _smi(tuple(fields)), strict=False):
            gpu.update(zip(fields.values(), map(_smi_value, values), strict=True))
    if devices and "rows_pending" not in devices[0]:
        for gpu, values in zip(devices, _smi(tuple(REMAPPED_ROWS), "remapped-rows"), strict=False):
            gpu.update(zip(REMAPPED_ROWS.values(), map(_smi_value, values), strict=True))
    return devices


def xids() -> list[dict[str, Any]] | None:
    """Return the driver's last errors in the kernel log; None if it cannot be read."""
    text = _output(["dmesg"])
    if text is None:
        return None
    errors = [{"address": m[1], "xid": int(m[2])} for m in XID.finditer(text)]
    return errors[-MAX_XIDS:]


def _smi(fields: tuple[str, ...], about: str = "gpu") -> list[list[str]]:
    text = _output(["nvidia-smi", f"--query-{about}={','.join(fields)}", "--format=csv,noheader"])
    rows = [line.split(", ") for line in (text or "").splitlines()]
    return [row for row in rows if len(row) == len(fields)]


def _smi_value(text: str) -> str | None:
    """Return a field's value; None for N/A, [N/A], [Not Supported] and [Unknown Error]."""
    value = text.strip()
    return None if value.startswith("[") or value == "N/A" else value


def _output(command: list[str]) -> str | None:
    try:
        process = subprocess.run(command, capture_output=True, timeout=QUERY_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.decode(errors="replace") if process.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _memory(name: str) -> int | None:
    match = re.search(rf"^{name}:\s+(\d+) kB", _read("/proc/meminfo") or "", re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _disk(folder: str) -> tuple[int | None, int | None]:
    """Return the free and all bytes of the folder's file system."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None, None
    return usage.free, usage.total


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return None


SCHEMA = 1
POLL_INTERVAL_S = 0.05


def main(path: str) -> int:
    """Run every part; a failed part is reported, and the next one starts."""
    settings = read_json(path)
    rank = int(os.environ.get("RANK", "0"))
    redirect_output("logs", rank)
    events = EventLog("check", rank)
    NodeCheck(settings, rank, events).run()
    return 0


class NodeCheck(HostProgram):
    """Measurements and facts of one rank.

    Settings are {device, dtype, seconds, at_once, rounds, alone_s}. `rounds` list pairs of nodes.
    With `alone_s` no rank communicates with another, and a device that is not done `alone_s`
    seconds after torch was imported is killed.
    """

    def run(self) -> None:
        """Write facts, join, and measure rates, collectives and health."""
        if self.local == 0:
            self.part("facts", lambda: self.write("facts", schema=SCHEMA, **node_facts()))
        if alone_s := self.settings.get("alone_s"):
            self.part("rates", lambda: self.rates_in_child(alone_s))
        else:
            self.part("join", self.join)
            self.part("rates", self.rates)
        if self.joined:
            self.part("collective", self.inside)
            self.part("pairs", lambda: self.pairs(self.settings.get("rounds", []), self.pair))
        if self.local == 0:
            # After the load: only then does a throttled clock show.
            self.part("health", lambda: self.write("health", gpus=gpus()))
        self.write("end")

    def rates_in_child(self, limit_s: float) -> None:
        """Measure the rates in a child process, so that a device that hangs blocks nothing else.

        A fork is safe because torch is not imported yet; the child writes to the same file. The
        device has `limit_s` from the import on: a slow import, as from a busy file server, is not
        the device's fault, and only the time limit of the whole check ends it.
        """
        import_end, import_end_writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                import torch  # noqa: F401

                os.write(import_end_writer, b"1")
                self.open_device()
                self.part("gemm", self.gemm)
                self.part("memory", self.memory)
            except BaseException as error:  # a fork may only end by _exit
                self.write("fault", part="gemm", reason=" ".join(str(error).split())[:300])
            os._exit(0)
        os.close(import_end_writer)
        os.read(import_end, 1)  # returns when the child has imported torch, or has ended
        os.close(import_end)
        deadline = time.monotonic() + limit_s
        while (child_status := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)  # a driver may still hold it, so do not wait
                raise TimeoutError(f"the device did not answer within {limit_s:.0f} s")
            time.sleep(POLL_INTERVAL_S)
        if code := os.waitstatus_to_exitcode(child_status[1]):
            raise ChildProcessError(f"the device's process was killed by signal {-code}")

    def rates(self) -> None:
        """Measure GEMMs and memory, on `at_once` nodes at the same time."""
        at_once = self.settings.get("at_once") or self.size
        num_nodes = self.size // self.ranks_per_node
        for first in range(0, num_nodes, at_once):
            if first <= self.node < first + at_once:
                self.part("gemm", self.gemm)
                self.part("memory", self.memory)
            if self.joined and num_nodes > at_once:
                self.barrier()

    def gemm(self) -> None:
        """Measure the sustained rate of one square GEMM."""
        from paceline.trainer.measure.clock import clock_of
        from paceline.trainer.programs.bandwidth import rate_statistics, sustained_rates
        from paceline.trainer.programs.gemm import flops, make_gemm

        shape = (8192,) * 3 if self.kind == "cuda" else (1024,) * 3
        work = make_gemm(self.settings["dtype"], shape, self.device)
        rates = sustained_rates(work, flops(shape), clock_of(self.device), self.settings["seconds"])
        self.write("rate", what="gemm", value=median(rates), **rate_statistics(rates))

    def memory(self) -> None:
        """Measure the copy rate with data larger than the caches."""
        from paceline.trainer.programs.bandwidth import SIZES_BYTES, measure_copy

        short = self.kind == "cpu" and self.settings["seconds"] < 1
        size = SIZES_BYTES[self.kind][0 if short else -1]
        result = measure_copy(self.device, size, self.settings["seconds"] / 2)
        self.write("rate", what="memory", value=result.pop("bytes_per_s"), **result)

    def inside(self) -> None:
        """Measure all-reduce among the ranks of this node."""
        if self.ranks_per_node > 1:
            first = self.node * self.ranks_per_node
            result = self.measure(list(range(first, first + self.ranks_per_node)))
            self.write("collective", **result)
        self.barrier()

    def pair(self, partner: int) -> None:
        """Measure all-reduce with the same rank of another node."""
        ranks = sorted(node * self.ranks_per_node + self.local for node in (self.node, partner))
        self.write("pair", partner=partner, **self.measure(ranks))

    def measure(self, ranks: list[int]) -> dict[str, Any]:
        """Return the all-reduce rates of the largest and of a small payload, in a new group."""
        from paceline.trainer.programs.allreduce import PAYLOADS_BYTES, measure

        small, _, large = PAYLOADS_BYTES[self.kind]
        group = self.group(ranks)
        seconds = self.settings["seconds"] / 2
        result = measure(self.device, len(ranks), large, seconds, group)
        latency_s = measure(self.device, len(ranks), small, seconds / 10, group)["latency_s"]
        return {**result, "latency_s": latency_s}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: node_check settings.json")
    code = main(sys.argv[1])
    sys.stdout.flush()
    os._exit(code)  # a normal exit may wait for peers that never answer
