"""Copies and all-reduce are measured for real, and a failed program is reported with its reason."""

from __future__ import annotations

import sys

import pytest

from paceline.core.errors import SystemFaultError
from paceline.machines.probe.rates import probe_collective, probe_memory


def test_memory_is_copied_at_a_rate_for_each_size():
    probe = probe_memory(sys.executable, "cpu", 1, 0.2)
    assert probe.threads == 1 and len(probe.rows) == 2
    assert all(row.bytes_per_s > 1e7 and row.n == 10 and row.spread >= 0 for row in probe.rows)
    assert probe.rows[0].bytes < probe.rows[1].bytes


def test_all_reduce_has_a_rate_and_a_time_for_each_payload():
    probe = probe_collective(sys.executable, "cpu", 2, 1, 0.2)
    assert (probe.ranks, probe.backend) == (2, "gloo")
    for row in probe.rows:
        assert row.bytes_per_s * row.latency_s == pytest.approx(row.bytes)
        assert row.bus_bytes_per_s == pytest.approx(row.bytes_per_s)  # of two ranks
    assert probe.rows[-1].latency_s > probe.rows[0].latency_s


def test_a_device_that_is_not_there_is_a_fault_with_its_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemFaultError, match=r"bandwidth probe: .*(Error|CUDA|NVIDIA)"):
        probe_memory(sys.executable, "cuda", None, 0.1)
