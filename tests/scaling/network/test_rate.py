"""Collectives between nodes as the network of an estimate: `paceline estimate --inter FILE`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import UserError
from paceline.core.units import MIB
from paceline.files.documents import write_value
from paceline.scaling.network.rate import network_of_file, network_rate
from paceline.scaling.network.readings import CollectiveTiming
from paceline.scaling.network.report import NetworkReport, network_report
from tests.command import paceline
from tests.scaling.network.test_benchmark_output import HEADER, ranks, written

RANKS, LATENCY_S, BUS = 16, 200e-6, 320e9
"""Two nodes with eight GPUs, whose all-reduce has a latency and the bus bandwidth of eight ports of
40 GB/s."""


def timing(num_bytes: int, **changes: Any) -> CollectiveTiming:
    """An all-reduce with the latency and bandwidth above."""
    took_s = LATENCY_S + num_bytes * 2 * (RANKS - 1) / RANKS / BUS
    fields: dict[str, Any] = {
        "operation": "all_reduce",
        "bytes": num_bytes,
        "ranks": RANKS,
        "latency_s": took_s,
        "slowest_s": took_s,
        "bytes_per_s": num_bytes / took_s,
        "bus_bytes_per_s": num_bytes / took_s * 2 * (RANKS - 1) / RANKS,
        "n": 12,
        "spread": 0.01,
        "wrong": 0,
    }
    return CollectiveTiming(**fields | changes)


def report_of(*rows: CollectiveTiming, faults: tuple[str, ...] = (), **identity: Any):
    """A report of two nodes with eight GPUs."""
    return network_report(
        collectives=rows,
        pairs=(),
        identity={"device": "H100-SXM", "nodes": 2, "devices_per_node": 8, **identity},
        created="2026-01-01T00:00:00+00:00",
        elapsed_s=20.0,
        faults=faults,
    )


SIZES = (MIB, 16 * MIB, 64 * MIB, 256 * MIB)


def test_the_bandwidth_is_that_without_latency() -> None:
    rate = network_rate(report_of(*map(timing, SIZES)), "a")
    assert rate.bus_bytes_per_s == pytest.approx(BUS)
    assert rate.bytes_per_s == pytest.approx(BUS / 8)
    assert (rate.payload_bytes, rate.small_payload_bytes) == (256 * MIB, 64 * MIB)
    assert rate.n == 12 and rate.spread is not None and 0.01 < rate.spread < 0.03


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        (report_of(), "has no all-reduce"),
        (report_of(timing(256 * MIB), nodes=1), "is of one node"),
        (report_of(timing(256 * MIB), nodes=None), "does not state nodes"),
        (report_of(timing(256 * MIB), devices_per_node=0), "does not state nodes"),
        (report_of(timing(256 * MIB), device="cpu"), "gloo"),
        (
            report_of(timing(64 * MIB), timing(256 * MIB), nodes=4),
            "16 ranks, not of all 32",
        ),
        (report_of(timing(256 * MIB, wrong=1)), "wrong results"),
        (report_of(timing(256 * MIB), faults=("rank 3",)), "failed parts"),
        (report_of(timing(16 * MIB)), "16 MiB at most, but a bandwidth needs 64 MiB"),
        (report_of(timing(256 * MIB)), "no all-reduce of 64 MiB or less"),
        (report_of(timing(MIB, latency_s=1.0), timing(64 * MIB)), "that is faster"),
        (report_of(timing(64 * MIB), timing(256 * MIB, spread=0.9)), "varies too much"),
    ],
)
def test_an_unknown_bandwidth_stays_unknown(report: NetworkReport, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        network_rate(report, "a")


def test_the_result_of_the_probe_is_a_folder_or_its_file(tmp_path: Path) -> None:
    write_value(tmp_path / "network.json", report_of(*map(timing, SIZES)))
    of_folder, of_file = (network_of_file(p) for p in (tmp_path, tmp_path / "network.json"))
    assert of_folder.bus_bytes_per_s == of_file.bus_bytes_per_s == pytest.approx(BUS)


def test_an_estimate_takes_the_output_of_nccl_tests(tmp_path: Path) -> None:
    rows = [timing(size) for size in SIZES]
    table = "".join(
        f"{row.bytes:12} {row.bytes // 4:12}  float  sum  -1 {row.latency_s * 1e6:12.2f} "
        f"{row.bytes_per_s / 1e9:8.2f} {row.bus_bytes_per_s / 1e9:8.2f}  0 "
        f"{row.latency_s * 1e6:12.2f} {row.bytes_per_s / 1e9:8.2f} "
        f"{row.bus_bytes_per_s / 1e9:8.2f}  0\n"
        for row in rows
    )
    path = written(tmp_path, "# all_reduce_perf\n" + ranks(2, 8) + HEADER + table)
    words = ("estimate", "llama31-8b", "--gpu", "H100", "--gpus", "32", "--json")
    done = paceline(*words, "--inter", str(path), runs=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    network = result["measured_network"]
    assert network["source"] == str(path) and network["spread"] is None
    assert network["bus_bytes_per_s"] == pytest.approx(BUS, rel=1e-3)
    assert (network["nodes"], network["devices_per_node"]) == (2, 8)
    assert any("measured in " in note and "spread unknown" in note for note in result["notes"])
    other = paceline(*words, "--inter", str(tmp_path / "no-such.txt"), runs=tmp_path)
    assert other.returncode == 1 and "a run, or a file of" in other.stderr
