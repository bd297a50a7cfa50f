"""The benchmark of noise in a short seeded form: every promise that is not a said limit holds."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
BENCHMARK = ROOT / "benchmarks" / "noise.py"


@pytest.fixture(scope="module")
def quick() -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARK), "--quick"]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def test_every_promise_holds_on_noise_that_nobody_chose(
    quick: subprocess.CompletedProcess[str],
):
    assert quick.returncode == 0, quick.stdout + quick.stderr
    assert "MISSED" not in quick.stdout


def test_a_promise_that_is_broken_would_be_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))
    measures, promises = map(import_module, ("_noise_measures", "_noise_promises"))
    cell = partial(measures.Cell, measures.FALSE_ALARM, "days", "5 + 5 in turns")
    promise = next(p for p in promises.PROMISES if p.cells == measures.FALSE_ALARM)
    assert promise.is_missed(cell(9, 20), 4.0)
    assert not promise.is_missed(cell(1, 20), 4.0)


def test_enough_trials_notice_about_twice_the_promised_error(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))
    measures, promises = map(import_module, ("_noise_measures", "_noise_promises"))
    promise = next(p for p in promises.PROMISES if p.cells == measures.FALSE_ALARM)
    whole = measures.WHOLE
    assert promise.detectable_rate(whole.comparisons * len(whole.repeats) * 2, 3.0) < 0.13
    assert promise.detectable_rate(whole.close_pairs, 3.0) < 0.07
    assert promise.detectable_rate(40, 3.0) > 0.2
    assert (
        next(p for p in promises.PROMISES if p.most is p.least is None).detectable_rate(100, 3.0)
        is None
    )


def test_the_rate_that_is_noticed_is_noticed_in_eight_of_ten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))
    measures, promises = map(import_module, ("_noise_measures", "_noise_promises"))
    rng = np.random.default_rng(2)
    for name, n in ((measures.FALSE_ALARM, 240), (measures.PLACED, 300)):
        promise = next(p for p in promises.PROMISES if p.cells == name)
        hits = rng.binomial(n, promise.detectable_rate(n, 3.0), 2000)
        cell = partial(measures.Cell, name, "kind", "setting")
        missed = np.mean([promise.is_missed(cell(int(each), n), 3.0) for each in hits])
        assert missed == pytest.approx(0.8, abs=0.06)


def test_the_short_form_reports_the_worst_kind_and_what_would_be_noticed(
    quick: subprocess.CompletedProcess[str],
):
    assert "worst kind" in quick.stdout and "noticed from" in quick.stdout


def test_the_kept_result_is_of_all_kinds_and_its_table_stands_in_the_page():
    result = json.loads((ROOT / "benchmarks" / "results" / "noise.json").read_text())
    assert len({cell["kind"] for cell in result["cells"]}) >= 12
    page = (ROOT / "docs" / "dev" / "evidence" / "statistics.md").read_text()
    for promise in result["promises"]:
        assert f"| {promise['promise']} | {promise['promised']} |" in page
        assert all(cell["message"] for cell in promise["missed"]), promise["promise"]
