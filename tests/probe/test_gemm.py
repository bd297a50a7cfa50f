"""The reachable rate is measured by a real product, kept while it holds, and never kept disturbed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from paceline.errors import SystemFaultError
from paceline.probe import gemm
from paceline.probe.gemm import GemmProbe, GemmRow, probe_gemm

IDENTITY = {"device": "test"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(gemm, "SECONDS_PER_DTYPE", 0.2)
    return tmp_path


def measure(python: str = sys.executable, fresh: bool = False) -> GemmProbe:
    return probe_gemm(python, IDENTITY, "cpu", ("fp32", "fp16"), 1, "highest", fresh)


def test_a_real_probe_reports_rate_spread_and_repeats():
    probe = measure()
    best = probe.best("fp32")
    assert best is not None and best.flops_per_s > 1e8 and best.repeats >= 3
    assert probe.best("fp16") is None and "emulates" in probe.skipped["fp16"]
    assert probe.threads == 1 and probe.torch


def keep(folder: Path, spread: float, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files that a probe with such a spread leaves in the cache."""
    row = GemmRow(dtype="fp32", m=1, n=1, k=1, flops_per_s=1e9, repeats=5, spread=spread)
    answer = GemmProbe(
        device_name="d", torch="t", threads=1, matmul_precision="highest", rows=(row,)
    )
    monkeypatch.setattr(gemm, "_measure", lambda python, question: answer)
    measure()
    return list(folder.rglob("gemm-*.json"))


def test_a_quiet_probe_is_kept_and_read_again(own_cache: Path, monkeypatch: pytest.MonkeyPatch):
    assert len(keep(own_cache, 0.01, monkeypatch)) == 2  # one file a dtype
    monkeypatch.setattr(gemm, "_measure", lambda python, question: pytest.fail("measured again"))
    assert measure().device_name == "d"


def test_a_disturbed_probe_is_not_kept(own_cache: Path, monkeypatch: pytest.MonkeyPatch):
    assert len(keep(own_cache, 0.6, monkeypatch)) == 1  # the dtype that was left out, and why


def test_fresh_measures_again(own_cache: Path, monkeypatch: pytest.MonkeyPatch):
    keep(own_cache, 0.01, monkeypatch)
    changed = measure(fresh=True)
    assert changed.device_name == "d"


def test_a_torn_cache_file_is_measured_again(own_cache: Path, monkeypatch: pytest.MonkeyPatch):
    path = keep(own_cache, 0.01, monkeypatch)[0]
    path.write_text(path.read_text()[:50])
    assert measure().device_name == "d" and json.loads(path.read_text())


def test_dtypes_are_kept_apart(own_cache: Path, monkeypatch: pytest.MonkeyPatch):
    keep(own_cache, 0.01, monkeypatch)
    monkeypatch.setattr(gemm, "_measure", lambda python, question: pytest.fail("measured again"))
    alone = probe_gemm(sys.executable, IDENTITY, "cpu", ("fp32",), 1, "highest")
    assert [row.dtype for row in alone.rows] == ["fp32"]


def test_an_interpreter_without_torch_is_one_clear_error():
    with pytest.raises(SystemFaultError, match="gemm probe"):
        measure(python="/bin/false")
