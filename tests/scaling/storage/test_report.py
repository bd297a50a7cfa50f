"""Lines of disks become rates of hosts, name the slow disk, and say whether a training waits."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.hardware import Cluster
from paceline.estimate.request import EstimateRequest
from paceline.scaling.storage.report import StorageReport, demand_of, storage_report
from tests.scaling.network.test_report import IDENTITY

MB = 1e6


def line(node: int, rate: float, operation: str = "sample", **changes: Any) -> dict[str, Any]:
    """What a host's two processes say, each at half of `rate`, half a percent apart."""
    half = rate / 2
    return {
        "event": "storage",
        "node": node,
        "path": "/data",
        "operation": operation,
        "processes": 2,
        "unit_bytes": 1000,
        "method": "O_DIRECT",
        "cached_share": 0.0,
        "rates": [[0.995 * half, half, 1.005 * half]] * 2,
        "sustained": [half, half],
        "units": [30, 20],
        "unit_s": [1e-3, 3e-3],
        "slow_unit_s": [2e-3, 9e-3],
    } | changes


def place(node: int) -> dict[str, Any]:
    mount = {"path": "/data", "file_system": "ext4", "source": "/dev/vda", "free_bytes": 10**12}
    return {"event": "place", "node": node, "read_ahead_bytes": 2**23, **mount}


def report(*lines: dict[str, Any], need: float | None = None) -> StorageReport:
    names = [f"n{node}" for node in range(9)]
    demand = None
    if need is not None:
        spec = EstimateRequest("tiny-llama", "H100", 4).spec
        demand = demand_of(spec, "an estimate", need).model_copy(update={"sample_bytes": 1000})
    return storage_report(lines, names, IDENTITY, "2026-01-01T00:00:00+00:00", 3.0, [], demand)


def test_processes_add_up_and_the_slowest_stands_beside_them():
    (row,) = report(line(0, 0.0, rates=[[90 * MB] * 3, [10 * MB] * 3])).rows
    assert (row.bytes_per_s, row.slowest_bytes_per_s, row.n) == (100 * MB, 10 * MB, 20)
    assert row.units_per_s == pytest.approx(100_000)
    assert (row.unit_s, row.slow_unit_s, row.spread) == (2e-3, 9e-3, 0.0)
    (alone,) = report(line(0, 0.0, rates=[[1.0], [2.0]])).rows
    assert alone.spread is None  # of one block each nobody knows it


def test_what_may_come_from_the_page_cache_is_marked():
    for share, marked in ((0.0, False), (0.5, True), (None, True)):
        measured = report(line(0, 100 * MB, cached_share=share))
        assert measured.rows[0].may_be_cached is marked
        assert any("page cache (marked *)" in text for text in measured.sentences) is marked
    memory = report({**place(0), "file_system": "tmpfs"}, line(0, 100 * MB)).sentences
    assert "n0:/data is in memory (tmpfs), so no disk was measured." in memory
    (written,) = report(line(0, 100 * MB, "write", cached_share=None)).rows
    assert not written.may_be_cached


def test_the_slow_disk_among_many_hosts_is_named():
    rates = [100 * MB * (1 + 0.002 * (node % 3)) for node in range(9)]
    assert report(*(line(node, rate) for node, rate in enumerate(rates))).slow == ()
    rates[4] = 60 * MB
    measured = report(*(line(node, rate) for node, rate in enumerate(rates)))
    assert [(disk.host, disk.operation) for disk in measured.slow] == [("n4", "sample")]
    assert measured.slow[0].loss == pytest.approx(0.4, abs=0.01)
    assert "n4 is slow: /data" in measured.sentences[0]
    few = report(line(0, 100 * MB), line(1, 10 * MB))
    assert few.slow == () and "at least 8" in " ".join(few.sentences)


def test_a_disk_gives_what_a_training_needs_or_makes_it_wait():
    saved = line(0, 50 * MB, "checkpoint", unit_bytes=64 * 2**20, cached_share=None)
    enough = report(place(0), line(0, 100 * MB), saved, need=50_000)
    (supply,) = enough.supply
    assert (supply.samples_per_s, supply.share, supply.enough) == (100_000, 2.0, True)
    assert enough.demand is not None and "may read 8 MiB around" in " ".join(enough.sentences)
    assert supply.checkpoint_s == pytest.approx(enough.demand.checkpoint_bytes / (50 * MB))
    assert "do not wait" in " ".join(enough.sentences)
    (late,) = report(place(0), line(0, 100 * MB), need=400_000).supply
    assert late.enough is False and late.checkpoint_s is None
    (unknown,) = report(place(0), line(0, 100 * MB, "read"), need=5).supply
    assert unknown.samples_per_s is None and unknown.enough is None
    # Stalls that a median does not show keep loaders waiting all the same.
    stalled = line(0, 100 * MB, sustained=[10 * MB, 10 * MB])
    assert report(place(0), stalled, need=50_000).supply[0].enough is False
    assert report(place(0), stalled, need=50_000).rows[0].bytes_per_s == 100 * MB


def test_a_host_reads_the_samples_of_its_own_replicas_once():
    spec = EstimateRequest("llama31-8b", "H100", 64).spec
    parts = spec.num_parameters
    layout = spec.layout.model_copy(update={"tp": 8, "pp": 2, "cp": 1})  # two hosts a replica
    halves = demand_of(spec.model_copy(update={"layout": layout}), "x", 40.0)
    assert halves.host_samples_per_s == pytest.approx(40.0 / 4)
    layout = layout.model_copy(update={"tp": 1, "pp": 1})  # eight replicas a host, of 64
    whole = demand_of(spec.model_copy(update={"layout": layout}), "x", 40.0)
    assert whole.host_samples_per_s == pytest.approx(40.0 / 8)
    assert whole.sample_bytes == 4 * (spec.training.seq_len + 1)  # 128 k words take four bytes
    assert whole.checkpoint_bytes == 12 * parts
    one = Cluster(name="x", device="H100-SXM", devices_per_node=8)
    alone = demand_of(spec.model_copy(update={"cluster": one}), "x", None, notes=("no",))
    assert alone.host_samples_per_s is None and "no" in alone.sentence
