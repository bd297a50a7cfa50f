"""`paceline estimate` and `table validate` as a user and as a script call them."""

from __future__ import annotations

import csv
import json
import platform
import shlex
from pathlib import Path

import pytest

from paceline.core.units import step_seconds
from paceline.estimate.calibrate.calibration import Calibration, calibration_path
from paceline.estimate.fit.refit import cpu_prior
from paceline.files.documents import write_value
from paceline.machines.probe.inventory import cpu
from tests.cli.test_errors import paceline
from tests.estimate.calibrate.micro import micro
from tests.estimate.test_validation import ROWS
from tests.layouts.sweep.test_prediction import calibrated

H100 = ("estimate", "llama31-70b", "--device", "H100", "--gpus", "64")


def test_help_says_how_long_a_training_is_taken_to_be():
    text = " ".join(paceline("estimate", "--help").stdout.replace("│", " ").split())
    days = json.loads(paceline(*H100, "--json").stdout)["training_cost"]
    assert days["total_tokens"] == 1e12
    assert "default: as in the recipe, else 1T" in text


def test_what_the_whole_training_lacks_is_said():
    """A price without a length of the training would else change nothing, and say nothing."""
    priced = ("--device", "H100-SXM", "--gpus", "8", "--price", "2")
    text = paceline("estimate", "mistral-7b", *priced).stdout
    assert "not known" in text and "the recipe has no number of tokens; set --tokens" in text
    powerless = paceline("estimate", "llama31-8b", "--device", "TPU-v7", "--gpus", "8").stdout
    assert "energy unknown: no data sheet states the power of TPU-v7" in powerless


def test_a_training_to_a_target_has_no_days_for_a_number_of_tokens(tmp_path: Path):
    trial = ("estimate", "llama31-8b", "--variant", "mlperf-trial", "--device", "H100")
    trial = (*trial, "--gpus", "32")
    text = paceline(*trial, "--html", str(tmp_path / "page.html")).stdout
    assert "days" not in text and "trains to a quality target; set --mlperf" in text
    assert "trains to a quality target" in (tmp_path / "page.html").read_text()
    timed = paceline(*trial, "--mlperf", "5.1.0").stdout
    assert "minutes" in timed and "set --mlperf" not in timed
    assert "2.00T tokens" in paceline(*trial, "--tokens", "2e12").stdout


def test_scenarios_are_compared_with_the_first():
    offer = "device=B200,gpus=32,price=4"
    output = json.loads(paceline(*H100, "--price", "2.5", "--compare", offer, "--json").stdout)
    first, other = output["scenarios"]
    assert (first["devices"], other["devices"]) == (64, 32)
    for name in ("step_time", "tokens_per_s", "cost"):
        ratio = other[f"{name}_ratio"]
        assert ratio["low"] < ratio["value"] < ratio["high"]
    rate = other["tokens_per_s_ratio"]
    assert rate["value"] == pytest.approx(other["tokens_per_s"] / first["tokens_per_s"])
    step, cost = other["step_time_ratio"], other["cost_ratio"]
    assert rate["high"] / rate["value"] == pytest.approx(step["value"] / step["low"])
    assert cost["value"] * rate["value"] == pytest.approx(32 * 4 / (64 * 2.5))
    rows = list(
        csv.DictReader(paceline(*H100, "--compare", offer, "--format", "csv").stdout.splitlines())
    )
    assert [row["device"] for row in rows] == ["H100-SXM", "B200"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layout", "tp4"), "is not AXIS=N"),
        (("--layout", "tp=3"), "does not divide"),
        (("--layout", "tp=3"), "change --gpus, --layout, or the batch with --set; `paceline tune "),
        (("--compare", "gpus=40"), "change --gpus, --layout, or"),
        (("--inter", "NVLink4"), "is a link inside a node"),
        (("--intra", "InfiniBand-NDR"), "is a network between nodes"),
        (("--inter", "NVLink 4"), "or a rate; use --intra 'NVLink 4'"),
        (("--compare", "inter=NVLink4"), "--compare inter=NVLink4: inter NVLink4 is a link inside"),
        (("--compare", "inter=NVLink4"), "or a bandwidth; use intra=NVLink4"),
        (("--intra", "0 GB/s"), "or a rate above 0: 450 GB/s"),
        (
            ("--compare", "speed=9"),
            "'speed=9' is not a KEY=VALUE pair of a scenario, e.g. dtype=fp8; allowed: device",
        ),
        (("--compare", "gpus=0"), "gpus is '0'; allowed: whole numbers from 1 to 9,007,199,254"),
        (("--compare", "per_node=0"), "per_node is '0'; allowed: whole numbers"),
        (("--compare", "price=-1"), "price is '-1'; allowed: 2.5, $2.5 or $1M"),
        (("--compare", "price=nan"), "price is 'nan'"),
        (("--tokens", "inf"), "must be a finite number"),
        (("--measured-step-time", "inf"), "must be a finite number"),
        (("--measured-step-time", "0"), "measured-step-time"),
        (("--checkpoint-interval", "600"), "has an effect only with failures; add --mtbf"),
        (
            ("--checkpoint-time", "60"),
            "--checkpoint-time: has an effect only with failures; add --mtbf",
        ),
        (("--restart-time", "60"), "--restart-time: has an effect only with failures; add --mtbf"),
        (
            ("--checkpoint-time", "30"),
            "--checkpoint-time: has an effect only with failures; add --mtbf",
        ),
        (("--restart-time", "600"), "--restart-time: has an effect only with failures; add --mtbf"),
        (("--layout", "tp=2,pp=2,tp=4"), "sets tp twice; allowed: each axis once; leave one out"),
        (("--mtbf", "9", "--checkpoint-interval", "inf"), "must be a finite number"),
        (("--measured-run", "no-such-run"), "contains no runs"),
        (
            ("--measured-run", "last", "--measured-step-time", "1"),
            "cannot be combined with --measured-step-time",
        ),
        (("--measured-run", "last", "--compare", "gpus=8"), "cannot be combined with --compare"),
        (("--mtbf", "inf"), "must be a finite number"),
        (("--software", "jax"), "must be one of any, "),
        (("--software", ""), "must be one of any, "),
        (("--dispatcher", "deepep"), "has no effect: the model of llama31-70b has no experts"),
        (("--calibration", "/none.json"), "does not contain coefficients"),
    ],
)
def test_bad_input_is_one_error_with_exit_code_1(arguments: tuple[str, ...], message: str):
    done = paceline(*H100, *arguments)
    assert done.returncode in (1, 2) and message in done.stderr and "Traceback" not in done.stderr


def test_without_a_run_the_devices_must_be_said():
    for options, missing in (
        (("--gpus", "8"), "needs --device; allowed: a name listed by `paceline recipes devices`"),
        (("--device", "H100"), "needs --gpus; allowed: a number"),
    ):
        done = paceline("estimate", "llama31-8b", *options)
        assert done.returncode == 1 and missing in done.stderr and not done.stdout


def test_the_command_that_finds_layouts_is_whole():
    example = str(Path(__file__).parents[2] / "docs/examples/h100-pods.yaml")
    misfit = ("estimate", "llama31-8b", "--layout", "tp=8", "--set", "steps=30")
    here = ("--device", "H100", "--gpus", "12", "--per-node", "4", "--inter", "8x400 Gb/s RoCE")
    clustered = ("--cluster", example, "--gpus", "64", "--set", "layout.pp=5")
    for place, whole in ((here, here), (clustered, clustered[:4])):
        done = paceline(*misfit, *place)
        command = shlex.split(done.stderr.partition("`")[2].partition("` finds the layouts")[0])
        kept = (*whole, "--set", "steps=30")
        assert command == ["paceline", "tune", "llama31-8b", "--estimate-only", *kept]
        assert paceline(*command[1:], "--top", "1").returncode == 0


def test_a_clusters_file_says_the_devices_and_takes_the_costs_of_options():
    example = Path(__file__).parents[2] / "docs/examples/h100-pods.yaml"
    asked = ("estimate", "llama31-405b", "--cluster", str(example), "--tokens", "3.8e12")
    output = json.loads(paceline(*asked, "--price", "2", "--json").stdout)
    assert output["devices"] == 8192
    assert output["training_cost"]["cost"] == pytest.approx(
        2 * output["training_cost"]["device_hours"]
    )
    refused = paceline(*asked, "--inter", "100 GB/s")
    assert refused.returncode == 1 and "--inter: has no effect with --cluster" in refused.stderr


def test_the_users_own_interval_counts_and_youngs_is_told():
    failing = (*H100, "--mtbf", "50000", "--checkpoint-time", "60")
    best, own = (
        json.loads(paceline(*failing, *more, "--json").stdout)["training_cost"]
        for more in ((), ("--checkpoint-interval", "900"))
    )
    saving = own["checkpoints"]
    assert saving["interval_s"] == 900 and own["goodput"] == saving["goodput"]
    assert (
        saving["young_interval_s"]
        == best["checkpoints"]["interval_s"]
        == pytest.approx((2 * 60 * 50_000 * 3600 / 64) ** 0.5)
    )
    assert (
        own["goodput"] < saving["young_goodput"] == best["goodput"] and own["days"] > best["days"]
    )
    (row,) = csv.DictReader(
        paceline(*failing, "--checkpoint-interval", "900", "--format", "csv").stdout.splitlines()
    )
    assert float(row["checkpoint_interval_s"]) == 900 and float(row["goodput"]) == own["goodput"]


def test_a_stated_step_leads_the_waterfall_on_to_what_was_measured(tmp_path: Path):
    page = tmp_path / "e.html"
    done = paceline(
        *H100,
        "--measured-step-time",
        "18",
        "--html",
        str(page),
        "--compare",
        "device=B200",
        "--json",
    )
    first, other = json.loads(done.stdout)["scenarios"]
    measured, levels = first["measured"], first["waterfall"]
    assert measured["step_time_s"] == 18 and measured["source"] == "as stated"
    assert measured["ratio"] == pytest.approx(18 / first["step_time_s"])
    assert measured["in_interval"] is (first["low_s"] <= 18 <= first["high_s"])
    ideal = first["flops_per_s_per_device"] * first["step_time_s"] / levels[0]["flops_per_s"]
    assert ideal + sum(level["lost_s"] for level in levels) == pytest.approx(18)
    assert other["measured"] is None and other["waterfall"][-1]["name"] == "estimated"
    assert "unexplained" in page.read_text()


def test_a_run_is_estimated_as_it_was_and_its_page_shows_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A real run of milliseconds per step, compared with assumed rates of this CPU."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    recipe, runs = micro(tmp_path), tmp_path / "runs"
    axes = ("--set", "steps=30", "--set", "layout.micro_batch=4")
    assert paceline("run", recipe, "--devices", "2", *axes, runs=runs).returncode == 0
    without = paceline("estimate", recipe, "--measured-run", "last", runs=runs)
    assert (
        without.returncode == 1 and "run `paceline probe calibrate --dtype fp32`" in without.stderr
    )
    (own,) = calibrations()
    write_value(tmp_path / "own.json", own)
    file = ("--calibration", str(tmp_path / "own.json"))
    by_file = paceline("estimate", recipe, "--measured-run", "last", *file, "--json", runs=runs)
    wrong = paceline(*H100, *file)
    assert wrong.returncode == 1 and "and does not apply to H100" in wrong.stderr
    card = own.model_copy(update={"kind": "cuda", "device": "a card"})
    narrow = own.model_copy(update={"dtype": "bf16"})
    for other, words in (
        (card, "was measured on a card and does not apply to cpu"),
        (narrow, "was measured in bf16, but"),
    ):
        write_value(tmp_path / "other.json", other)
        measured = ("estimate", recipe, "--measured-run", "last")
        done = paceline(*measured, "--calibration", str(tmp_path / "other.json"), runs=runs)
        assert done.returncode == 1 and f"other.json: {words}" in done.stderr
    ranked = paceline("tune", recipe, "--device", "cpu", "--gpus", "2", "--estimate-only", *file)
    assert ranked.returncode == 0 and "layouts estimated" in ranked.stdout
    plain = paceline("runs", "show", "last", "--format", "html", runs=runs)
    assert "No expected step time: this CPU is not calibrated in fp32" in plain.stdout
    for kept in calibrations():
        write_value(calibration_path(kept.device, kept.dtype), kept)
    output = json.loads(
        paceline("estimate", recipe, "--measured-run", "last", "--json", runs=runs).stdout
    )
    shown = json.loads(paceline("runs", "show", "last", "--json", runs=runs).stdout)
    assert output["measured"]["step_time_s"] == shown["metrics"]["step_time_s"]["value"]
    same = ("step_time_s", "provenance", "waterfall")
    assert [json.loads(by_file.stdout)[key] for key in same] == [output[key] for key in same]
    assert (output["devices"], output["layout"], output["implementation"]) == (2, "dp 2", "torch")
    assert output["waterfall"][-1]["name"] == "measured"
    refused = paceline(
        "estimate", recipe, "--measured-run", "last", "--layout", "micro_batch=8", runs=runs
    )
    assert refused.returncode == 1 and "layout.micro_batch is 4, not 8" in refused.stderr
    assert paceline("runs", "report", "last", runs=runs).returncode == 0
    (page,) = runs.glob("*/report.html")
    text = page.read_text()
    assert "MFU waterfall to the measured step" in text and "times the estimate of" in text


def calibrations() -> list[Calibration]:
    """This processor as if it had been calibrated, for one process and for two."""
    own = {"device": cpu()["model"], "host": platform.node(), "evidence": cpu_prior("fp32")}
    threads = {ranks: max(1, cpu()["usable_cores"] // ranks) for ranks in (1, 2)}
    placements = tuple(calibrated(ranks, n).placements[0] for ranks, n in threads.items())
    return [calibrated(2, 1).model_copy(update={**own, "placements": placements})]


def test_validate_lists_scores_and_what_it_left_out(tmp_path: Path):
    path = tmp_path / "t.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(ROWS)
    output = json.loads(paceline("table", "validate", str(path), "--json").stdout)
    assert set(output["overall"]) >= {
        "n",
        "mape",
        "median",
        "within_10",
        "within_20",
        "coverage_80",
    }
    assert set(output["rows"][0]) == {
        "id",
        "source",
        "kind",
        "measured_s",
        "predicted_s",
        "low_s",
        "high_s",
        "error",
    }
    assert len(output["rows"]) + len(output["unsupported_rows"]) == len(ROWS)
    write_value(tmp_path / "own.json", calibrated(2, 1))
    wrong = paceline("table", "validate", str(path), "--calibration", str(tmp_path / "own.json"))
    assert wrong.returncode == 1 and "and does not apply to a GPU" in wrong.stderr
    text = paceline("table", "validate", str(path), "--where", "source=a")
    assert "median |ln|" in text.stdout and "predicted by" in text.stdout
    rows = list(
        csv.DictReader(
            paceline("table", "validate", str(path), "--format", "csv").stdout.splitlines()
        )
    )
    assert [row["id"] for row in rows] == ["a-1", "a-2", "b-1"]


def test_a_fit_to_a_table_has_an_error_of_its_own_and_makes_a_calibration(tmp_path: Path):
    path, fitted = tmp_path / "t.csv", tmp_path / "own.json"
    slow = [
        {**ROWS[0], "id": f"s-{n}", "gbs": str(512 * n), "step_time_s": str(5 * n)}
        for n in (1, 2, 3)
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(slow[0]))
        writer.writeheader()
        writer.writerows(slow)
    validate = ("table", "validate", str(path))
    output = json.loads(paceline(*validate, "--fit", str(fitted), "--json").stdout)
    assert output["left_out"]["n"] == 3
    assert output["left_out"]["mape"] < 0.6 * output["overall"]["mape"]
    again = json.loads(paceline(*validate, "--calibration", str(fitted), "--json").stdout)
    assert again["overall"]["mape"] < output["left_out"]["mape"]
    assert "adjusted to 3 step times of t.csv" in again["evidence"]
    unwritable = paceline(*validate, "--fit", str(tmp_path))
    assert unwritable.returncode == 2 and "cannot be written" in unwritable.stderr


def test_an_estimate_like_a_published_table_is_nearer_to_it_and_narrower(tmp_path: Path):
    estimate = ("estimate", "llama31-70b", "--gpu", "H100", "--gpus", "256", "--json")
    plain = json.loads(paceline(*estimate).stdout)
    like = json.loads(paceline(*estimate, "--like", "nvidia-llama31").stdout)
    assert like["provenance"]["title"].endswith("adjusted to 14 step times of nvidia-llama31")
    assert like["high_s"] / like["low_s"] < plain["high_s"] / plain["low_s"]
    # The row of this recipe with 256 devices took 14.8 s.
    assert abs(like["step_time_s"] - 14.8) < 0.3
    unknown = paceline(*estimate, "--like", "nosuch", runs=tmp_path)
    assert unknown.returncode == 1
    assert "neither a published row, table or source, nor a run" in unknown.stderr
    no_step = paceline(*estimate, "--like", "mlperf-rcp")
    assert no_step.returncode == 1 and "has no row that can be modelled" in no_step.stderr


def test_tune_ranks_and_says_what_it_left_out():
    arguments = ("tune", "llama31-70b", "--device", "H100", "--gpus", "64", "--top", "5")
    output = json.loads(paceline(*arguments, "--estimate-only", "--json").stdout)
    assert {"n_layouts", "n_infeasible", "n_pruned", "layouts"} <= set(output)
    assert len(output["layouts"]) == 5
    assert {"layout", "step_time_s", "low_s", "high_s", "memory_bytes", "fits"} <= set(
        output["layouts"][0]
    )
    assert all(row["memory"] in ("fits", "borderline") for row in output["layouts"])
    text = paceline(*arguments, "--estimate-only")
    assert "P(OOM)" in text.stdout and "layouts estimated" in text.stdout
    own = output["recipe_layout"]
    step_s = step_seconds(own["step_time_s"])
    told = f"{own['label']}: {step_s} s, memory: {own['memory']}"
    assert f"The recipe's own layout: {told}" in text.stdout
    refused = paceline(*arguments[:-2])
    assert refused.returncode == 1 and "--estimate-only" in refused.stderr


def test_a_ranking_says_when_no_layout_fits():
    arguments = ("tune", "llama31-70b", "--device", "H100-SXM", "--gpus", "8", "--top", "2")
    done = paceline(*arguments, "--estimate-only")
    assert done.returncode == 0 and "memory GiB" in done.stdout
    assert "no layout fits: the smallest needs " in done.stdout
    own = "tp 4 x pp 4 x cp 2 = 32 does not divide 8 devices"
    assert f"own layout: cannot run: {own}" in done.stdout
    nowhere = paceline(*arguments[:2], "--estimate-only", "--gpus", "8")
    assert nowhere.returncode == 1
    needed = "needs --device; allowed: a name listed by `paceline recipes devices`, e.g. H100"
    assert f"error: paceline tune: {needed}; or --cluster FILE\n" in nowhere.stderr


def test_what_would_help_most_is_told_in_every_form(tmp_path: Path):
    page = tmp_path / "helps.html"
    done = paceline(*H100, "--sensitivity", "--json", "--html", str(page))
    best, *others = json.loads(done.stdout)["elasticities"]
    assert best["figure"] == "GEMM throughput" and best["elasticity"] > 0.5
    assert best["value"] == 989.5e12 and best["unit"] == "FLOP/s" and len(others) == 5
    text = page.read_text()
    assert "Sensitivity to hardware" in text and "communication latency" in text
    (row,) = csv.DictReader(paceline(*H100, "--sensitivity", "--format", "csv").stdout.splitlines())
    assert float(row["elasticity_gemm_throughput"]) == pytest.approx(best["elasticity"])
    run = paceline("estimate", "tiny-llama", "--measured-run", "last", "--sensitivity")
    assert run.returncode == 1 and "cannot be combined with --sensitivity" in run.stderr


def test_images_are_counted_in_samples(tmp_path: Path):
    page = tmp_path / "scenarios.html"
    flux = ("estimate", "flux1-schnell", "--gpus", "8", "--device", "B200")
    done = paceline(*flux, "--compare", "device=H100", "--sensitivity", "--html", str(page))
    assert "H100-SXM compared with 8 x B200: samples/s x0." in done.stdout
    (line,) = (line for line in done.stdout.splitlines() if "Throughput" in line)
    assert line.index("samples/s") < line.index("tokens/s")
    assert "Relative to first: samples/s divided by" in page.read_text()


def test_a_page_shows_the_way_from_the_peak(tmp_path: Path):
    page = tmp_path / "scenarios.html"
    done = paceline(
        *H100, "--compare", "device=B200", "--inter", "8x400 Gb/s RoCE", "--html", str(page),
        "--sensitivity",
    )  # fmt: skip
    assert "GEMM throughput" in done.stdout and "network: stated" in done.stdout
    text = page.read_text()
    assert text.count("GEMM efficiency") >= 4 and "estimate" in text
