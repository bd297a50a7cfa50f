"""What a run's own lines say of its workload decides whether its figures stand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.core.training import Data
from paceline.files.documents import write_value
from paceline.files.run_folder import RUN_FILE
from paceline.runs.outcome import MIN_TIMED_STEPS, evaluate
from tests.example import make_spec, noisy
from tests.files.rank_files import step_times, write_ranks
from tests.files.test_run_folder import make_record


def make_folder(tmp_path: Path, n: int, spec: Any, **start: Any) -> Path:
    """The folder of a finished run of two ranks with n steps."""
    folder = tmp_path / "run"
    write_value(folder / RUN_FILE, make_record("ok", name="run", spec=spec))
    tokens = {"tokens": 40} if spec.data.packing == "padded" else {}
    steps = [{**step, **tokens} for step in step_times(noisy(n))]
    write_ranks(folder, spec, steps, changes={1: start})
    return folder


def test_a_run_of_another_model_is_judged_invalid(tmp_path: Path):
    spec = make_spec()
    result = evaluate(make_folder(tmp_path, 40, spec, num_parameters=12_345)).result

    assert result.status == "failed" and result.verdict.kind == "invalid"
    assert result.reason is not None
    assert f"trained 12,345 parameters, but the recipe's model has {spec.num_parameters:,}" in (
        result.reason
    )


def test_a_run_of_its_own_model_stands(tmp_path: Path):
    result = evaluate(make_folder(tmp_path, 40, make_spec())).result

    assert result.status == "ok" and result.num_parameters == make_spec().num_parameters


@pytest.mark.parametrize("packing", ["padded", "packed"])
def test_few_timed_steps_of_fine_tuning_are_warned_of(tmp_path: Path, packing: str):
    data = Data(source="stdlib", packing=packing)  # type: ignore[arg-type]
    few = evaluate(make_folder(tmp_path / "few", MIN_TIMED_STEPS - 5, make_spec(data=data))).result
    enough = evaluate(
        make_folder(tmp_path / "ok", MIN_TIMED_STEPS + 15, make_spec(data=data))
    ).result

    warned = [any(f"at least {MIN_TIMED_STEPS}" in w for w in r.warnings) for r in (few, enough)]
    assert warned == [packing == "padded", False]


def test_tokens_that_the_ranks_counted_are_the_runs(tmp_path: Path):
    data = Data(source="jsonl", path="a", packing="padded", real_tokens_per_sample=3)
    result = evaluate(make_folder(tmp_path, 40, make_spec(data=data))).result

    assert result.metrics["real_token_fraction"].value == pytest.approx(80 / (8 * 32))
