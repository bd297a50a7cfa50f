"""`paceline estimate` and `validate` as a user and as a script call them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.cli.test_errors import paceline
from tests.test_validating import ROWS

H100 = ("estimate", "llama31-70b", "--device", "H100", "--gpus", "64")


def test_json_holds_the_contract():
    done = paceline(*H100, "--price", "2", "--json")
    found = json.loads(done.stdout)
    assert {"step_time_s", "low_s", "high_s", "parts", "evidence", "bill"} <= set(found)
    assert found["low_s"] < found["step_time_s"] < found["high_s"]
    assert sum(found["parts"].values()) == pytest.approx(found["step_time_s"])


def test_text_tells_time_interval_cost_and_what_it_rests_on():
    text = paceline(*H100, "--price", "2.5", "--mtbf", "50000").stdout
    for words in (
        "80 % interval",
        "MFU",
        "of the step: gemm",
        "goodput",
        "cost",
        "%: fits",
        "rests on: ",
    ):
        assert words in text


def test_offers_stand_side_by_side():
    offer = "device=B200,gpus=32,price=4"
    found = json.loads(paceline(*H100, "--compare", offer, "--json").stdout)
    assert [one["devices"] for one in found["offers"]] == [64, 32]
    ratio = found["offers"][1]["step_time_ratio"]
    assert ratio["low"] < ratio["value"] < ratio["high"]
    rows = list(
        csv.DictReader(paceline(*H100, "--compare", offer, "--format", "csv").stdout.splitlines())
    )
    assert [row["device"] for row in rows] == ["H100-SXM", "B200"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layout", "tp4"), "is not AXIS=N"),
        (("--layout", "tp=3"), "does not divide"),
        (("--compare", "speed=9"), "cannot be read"),
        (("--compare", "gpus=0"), "cannot be read"),
        (("--compare", "per_node=0"), "cannot be read"),
        (("--compare", "price=-1"), "cannot be read"),
        (("--compare", "price=nan"), "cannot be read"),
        (("--tokens", "inf"), "must be a finite number"),
        (("--mtbf", "inf"), "must be a finite number"),
        (("--stack", "jax"), "must be fused, torch or softmax"),
        (("--evidence", "/none.json"), "holds no coefficients"),
    ],
)
def test_bad_input_is_one_error_with_exit_code_1(arguments: tuple[str, ...], message: str):
    done = paceline(*H100, *arguments)
    assert done.returncode in (1, 2) and message in done.stderr and "Traceback" not in done.stderr


def test_validate_lists_scores_and_what_it_left_out(tmp_path: Path):
    path = tmp_path / "t.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(ROWS)
    found = json.loads(paceline("validate", str(path), "--json").stdout)
    assert set(found["overall"]) >= {"n", "mape", "median", "within_10", "within_20", "coverage_80"}
    assert set(found["rows"][0]) == {
        "id", "source", "kind", "measured_s", "predicted_s", "low_s", "high_s", "error",
    }  # fmt: skip
    assert len(found["rows"]) + len(found["unmodelled"]) == len(ROWS)
    text = paceline("validate", str(path), "--where", "source=a")
    assert "median |ln|" in text.stdout and "predicted by" in text.stderr
    rows = list(
        csv.DictReader(paceline("validate", str(path), "--format", "csv").stdout.splitlines())
    )
    assert [row["id"] for row in rows] == ["a-1", "a-2", "b-1"]


def test_tune_ranks_and_says_what_it_left_out():
    arguments = ("tune", "llama31-70b", "--device", "H100", "--gpus", "64", "--top", "5")
    found = json.loads(paceline(*arguments, "--estimate-only", "--json").stdout)
    assert {"n_layouts", "n_infeasible", "n_pruned", "layouts"} <= set(found)
    assert len(found["layouts"]) == 5
    assert {"layout", "step_time_s", "low_s", "high_s", "memory_bytes", "fits"} <= set(
        found["layouts"][0]
    )
    text = paceline(*arguments, "--estimate-only")
    assert "P(OOM)" in text.stdout and "layouts estimated" in text.stderr
    refused = paceline(*arguments)
    assert refused.returncode == 1 and "--estimate-only" in refused.stderr


def test_a_page_shows_the_way_from_the_peak(tmp_path: Path):
    page = tmp_path / "offers.html"
    done = paceline(
        *H100, "--compare", "device=B200", "--inter", "8x400 Gb/s RoCE", "--html", str(page)
    )
    assert "peak to estimate: peak 100.0 %" in done.stdout and "network: stated" in done.stdout
    text = page.read_text()
    assert text.count("large products") >= 2 and "nothing ran" in text
