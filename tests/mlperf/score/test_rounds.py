"""Benchmarks and rulesets of rounds 6.0 and 6.1, and where a ruleset comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.mlperf.check.compliance import check
from paceline.mlperf.check.official_checker import checker_rulesets
from paceline.mlperf.rules import BENCHMARKS, SCORED_ONLY
from paceline.mlperf.score.convergence import rulesets
from paceline.mlperf.score.run_set import score
from tests.mlperf.samples import TEN, submission

IN_EPOCHS = {"dlrm_dcnv2"}
"""Its reference counts epochs, not samples: checked, and not scored."""


@pytest.mark.parametrize("ruleset", ["6.0.0", "6.1.0"])
def test_every_benchmark_of_the_official_package_is_scored(ruleset: str):
    package = pytest.importorskip("mlperf_logging")
    folder = Path(package.__file__).parent / "rcp_checker" / f"training_{ruleset}"
    names = {path.stem.removeprefix("rcps_") for path in folder.glob("rcps_*.json")} - IN_EPOCHS
    assert names == {b for b in BENCHMARKS | SCORED_ONLY if ruleset in rulesets(b)}
    assert all(ruleset in checker_rulesets(name) for name in names)


def test_a_benchmark_of_one_round_brings_its_ruleset(tmp_path: Path):
    folder = submission(tmp_path, TEN, benchmark="gpt_oss_20b", batch=16, samples=196_608)
    scored = score(folder)
    assert (scored.ruleset, scored.ruleset_from, scored.status) == ("6.1.0", "benchmark", "ok")
    assert scored.score_minutes == pytest.approx(10.1875)
    assert scored.flops_per_sample is None and scored.model_flops_per_s_per_device is None
    assert scored.model_flops_reason == "the FLOPs of a sample of gpt_oss_20b are not counted here"
    assert (checked := check(folder)).ruleset == "6.1.0" and checked.ruleset_from == "benchmark"


def test_three_runs_are_a_result_where_the_rules_say_so(tmp_path: Path):
    runs = [3.0, 3.2, 3.5]
    folder = submission(tmp_path, runs, benchmark="deepseekv3_671b", batch=16_384, samples=770_048)
    scored = score(folder, "6.0.0")
    assert (scored.status, scored.runs_required) == ("ok", 3)
    assert scored.score_minutes == pytest.approx(3.2)


@pytest.mark.parametrize(
    ("quality", "status"), [(0.76, "ok"), (0.74, "invalid")], ids=["reached", "missed"]
)
def test_an_accuracy_must_be_as_large_as_the_target(tmp_path: Path, quality: float, status: str):
    settings = {"benchmark": "dlrmv4", "batch": 8192, "samples": 70_000_000, "quality": quality}
    folder = submission(tmp_path, TEN, **settings)
    for path in folder.iterdir():
        path.write_text(path.read_text().replace('"value": 9.0', '"value": 0.5'))
    assert score(folder).status == status


def test_logs_that_name_their_ruleset_are_scored_by_it(tmp_path: Path):
    folder = submission(tmp_path / "v5.1", TEN, prefix="+ x --ruleset 6.0.0 ")
    scored = score(folder)
    assert (scored.ruleset, scored.ruleset_from) == ("6.0.0", "logs")
