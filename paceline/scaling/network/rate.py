"""Bandwidth of the network of a measurement of collectives, as an input of estimates."""

from __future__ import annotations

from math import hypot
from pathlib import Path

from paceline.core.errors import UserError
from paceline.core.units import MIB, binary, percent
from paceline.estimate.measured_network import MAX_SPREAD, NetworkRate
from paceline.files.documents import read_value
from paceline.scaling.network.benchmark_output import read_benchmark
from paceline.scaling.network.measurement import REPORT_FILE
from paceline.scaling.network.readings import CollectiveTiming, bus_factor
from paceline.scaling.network.report import NetworkReport

REMEDY = "measure all GPUs of two nodes or more: all_reduce_perf -b 16M -e 1G -f 4"
MIN_PAYLOAD = 64 * MIB
"""Minimum largest payload in bytes. Gradients and parameters of large models travel in such pieces,
and NCCL changes its algorithm and protocol below."""
MIN_RATIO = 4
"""Minimum ratio of the two payloads whose difference gives the bandwidth."""


def network_of_file(path: Path) -> NetworkRate:
    """Return the network in a result of `paceline probe network`, or in output of nccl-tests.

    Raises UserError for another file, and as `network_rate` does.
    """
    file = path / REPORT_FILE if path.is_dir() else path
    if file.suffix == ".json":
        return network_rate(read_value(file, NetworkReport), str(path))
    return network_rate(read_benchmark(file, None, None), str(path))


def network_rate(report: NetworkReport, source: str) -> NetworkRate:
    """Return the bus bandwidth of the all-reduce of all devices, without latency.

    It is the bus factor times the difference of two payloads over that of their times. Raises
    UserError if several nodes with GPUs did not take part, or if the payloads are too small.
    """
    rows = [row for row in report.collectives if row.operation == "all_reduce"]
    rows.sort(key=lambda row: row.bytes)
    if problem := _problem(report, rows):
        raise UserError(source, problem, remedy=REMEDY)
    large = rows[-1]
    smaller = [row for row in rows if row.bytes * MIN_RATIO <= large.bytes]
    if not smaller or not smaller[-1].latency_s < large.latency_s:
        below = binary(large.bytes / MIN_RATIO)
        raise UserError(
            source,
            f"has no all-reduce of {below} or less that is faster than that of the largest",
            remedy=REMEDY,
        )
    small = smaller[-1]
    took_s = large.latency_s - small.latency_s
    bus_bytes = bus_factor("all_reduce", large.ranks) * (large.bytes - small.bytes)
    spread = None
    if large.spread is not None and small.spread is not None:
        spread = hypot(large.spread * large.latency_s, small.spread * small.latency_s) / took_s
    if spread is not None and spread > MAX_SPREAD:
        raise UserError(
            source,
            f"has an all-reduce that varies too much: spread {percent(spread, 0)}",
            remedy=REMEDY,
        )
    return NetworkRate(
        source=source,
        device=str(report.identity.get("device")),
        nodes=report.identity["nodes"],
        devices_per_node=report.identity["devices_per_node"],
        transports=(),
        interfaces=(),
        bus_bytes_per_s=bus_bytes / took_s,
        spread=spread,
        n=min(small.n, large.n),
        payload_bytes=large.bytes,
        small_payload_bytes=small.bytes,
    )


def _problem(report: NetworkReport, rows: list[CollectiveTiming]) -> str | None:
    """Return why the report has no bandwidth of a network, if it has none."""
    nodes, per_node = report.identity.get("nodes"), report.identity.get("devices_per_node")
    if not rows:
        return "has no all-reduce"
    if not (isinstance(nodes, int) and isinstance(per_node, int) and per_node > 0):
        return "does not state nodes and devices per node"
    if nodes < 2:
        return "is of one node: its collectives did not use a network between nodes"
    if report.identity.get("device") == "cpu":
        return "is of CPUs: the rate of their all-reduce (gloo) is not that of GPUs"
    # A file may hold tables of several sizes of the job; nodes and devices are the last one's.
    if other := {row.ranks for row in rows} - {nodes * per_node}:
        return f"has an all-reduce of {min(other)} ranks, not of all {nodes * per_node} devices"
    if report.faults or any(row.wrong for row in rows):
        return "has wrong results or failed parts"
    if rows[-1].bytes < MIN_PAYLOAD:
        size = binary(rows[-1].bytes)
        return f"has an all-reduce of {size} at most, but a bandwidth needs {binary(MIN_PAYLOAD)}"
    return None
