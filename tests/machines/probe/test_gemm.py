"""The reachable rate is measured by a real product, kept while it holds, never kept disturbed."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import pytest

from paceline.core.errors import SystemFaultError
from paceline.machines.probe import gemm
from paceline.machines.probe.gemm import GemmProbe, GemmRow, probe_gemm

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
    assert best.statistic == "best of n" and best.cpu_share is not None and best.cpu_share > 0
    assert len([row for row in probe.rows if row.dtype == "fp32"]) >= 3
    assert probe.best("fp16") is None and "emulates" in probe.skipped["fp16"]
    assert probe.threads == 1 and probe.torch


def make_row(**fields: object) -> GemmRow:
    values: dict[str, object] = {
        "dtype": "fp32",
        "m": 1,
        "n": 1,
        "k": 1,
        "flops_per_s": 1e9,
        "statistic": "best of n",
        "repeats": 5,
        "spread": 0.01,
        "cpu_share": 0.99,
    }
    return GemmRow.model_validate({**values, **fields})


def keep(folder: Path, monkeypatch: pytest.MonkeyPatch, *rows: GemmRow) -> list[Path]:
    """Files that a probe with such rows leaves in the cache."""
    answer = GemmProbe(
        device_name="d",
        torch="t",
        threads=1,
        matmul_precision="highest",
        rows=rows or (make_row(),),
    )
    monkeypatch.setattr(gemm, "_measure", lambda python, question: answer)
    measure()
    return list(folder.rglob("gemm-*.json"))


def test_a_quiet_probe_is_kept_and_read_again(own_cache: Path, monkeypatch: pytest.MonkeyPatch):
    assert len(keep(own_cache, monkeypatch)) == 2  # one file a dtype
    monkeypatch.setattr(gemm, "_measure", lambda python, question: pytest.fail("measured again"))
    assert measure().device_name == "d"


@pytest.mark.parametrize(
    "rows",
    [
        (make_row(spread=0.6),),
        (make_row(cpu_share=0.5),),  # steady, but with half of its cores
        (
            make_row(),
            make_row(flops_per_s=1e8, cpu_share=0.5),
        ),  # would have been faster than the best
    ],
)
def test_a_disturbed_probe_is_not_kept(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, rows: tuple[GemmRow, ...]
):
    assert len(keep(own_cache, monkeypatch, *rows)) == 1  # the dtype that was left out, and why


def test_a_gpu_has_no_share_of_cores_and_is_kept(own_cache: Path, monkeypatch: pytest.MonkeyPatch):
    assert len(keep(own_cache, monkeypatch, make_row(cpu_share=None))) == 2


@pytest.mark.parametrize("what", ["host", "machine-id"])
def test_machines_that_share_a_home_do_not_share_a_rate(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
):
    before = set(keep(own_cache, monkeypatch))
    if what == "host":
        monkeypatch.setattr(platform, "node", lambda: "another")
    else:
        (tmp_path / "machine-id").write_text("another\n")
        monkeypatch.setattr(gemm, "MACHINE_ID", tmp_path / "machine-id")
    assert len(set(keep(own_cache, monkeypatch)) - before) == 2


def test_a_machine_without_an_id_is_measured_too(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(gemm, "MACHINE_ID", tmp_path / "none")
    assert len(keep(own_cache, monkeypatch)) == 2


def test_fresh_measures_again(own_cache: Path, monkeypatch: pytest.MonkeyPatch):
    keep(own_cache, monkeypatch)
    changed = measure(fresh=True)
    assert changed.device_name == "d"


def test_a_torn_cache_file_is_measured_again(own_cache: Path, monkeypatch: pytest.MonkeyPatch):
    path = keep(own_cache, monkeypatch)[0]
    path.write_text(path.read_text()[:50])
    assert measure().device_name == "d" and json.loads(path.read_text())


def test_dtypes_are_kept_apart(own_cache: Path, monkeypatch: pytest.MonkeyPatch):
    keep(own_cache, monkeypatch)
    monkeypatch.setattr(gemm, "_measure", lambda python, question: pytest.fail("measured again"))
    alone = probe_gemm(sys.executable, IDENTITY, "cpu", ("fp32",), 1, "highest")
    assert [row.dtype for row in alone.rows] == ["fp32"]


def test_an_interpreter_without_torch_is_one_clear_error():
    with pytest.raises(SystemFaultError, match="gemm probe"):
        measure(python="/bin/false")
