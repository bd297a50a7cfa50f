"""Folders of MLPerf logs are scored as the official tool scores them, and bad ones are named."""

from __future__ import annotations

import csv
import gzip
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import UserError
from paceline.mlperf.check.compliance import check
from paceline.mlperf.check.official_checker import checker_rulesets
from paceline.mlperf.report import score_document
from paceline.mlperf.rules import BENCHMARKS, SCORED_ONLY
from paceline.mlperf.score.convergence import rulesets
from paceline.mlperf.score.run_set import copy_telemetry, scaling_file_warning, score
from paceline.mlperf.score.score import Score
from paceline.report.document import Figure
from tests.mlperf.samples import EPOCH_MS, TEN, line, submission, trial
from tests.mlperf.submissions import ten_runs


@pytest.fixture
def published(reference_data: Path) -> list[tuple[Path, dict[str, str]]]:
    """Every folder of real logs with its row of published results."""
    root = reference_data / "mlperf"
    with (root / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = ("round", "submitter", "system", "benchmark")
    folders = [(root.joinpath("logs", *(row[name] for name in names)), row) for row in rows]
    return [(folder, row) for folder, row in folders if folder.is_dir()]


def figures(scored: Score) -> dict[str, Figure]:
    return {figure.label: figure for figure in score_document(scored).figures}


def complete(published: list[tuple[Path, dict[str, str]]], whole: bool) -> Iterator[Any]:
    for folder, row in published:
        if (len(list(folder.glob("result_*"))) == int(row["runs"])) == whole:
            yield folder, row


def test_the_complete_sets_score_as_published(published: list[tuple[Path, dict[str, str]]]):
    sets = list(complete(published, True))
    assert len(sets) == 10
    for folder, row in sets:
        scored = score(folder)
        assert (scored.status, scored.reason) == ("ok", None)
        assert scored.ruleset == f"{row['round'][1:]}.0" and scored.ruleset_from == "path"
        assert scored.score_minutes == pytest.approx(float(row["score_minutes"]), abs=1e-3)
        assert scored.olympic_mean_minutes == pytest.approx(
            float(row["olympic_mean_minutes"]), abs=1e-3
        )
        assert scored.scaling_factor == pytest.approx(float(row["rcp_scaling_factor"]), abs=1e-6)
        assert scored.mean_initialization_minutes == pytest.approx(
            float(row["mean_init_minutes"]), abs=1e-3
        )
        assert sum(run.status == "success" for run in scored.runs) == int(row["succeeded"])
        if row["median_throughput_samples_s"]:
            printed = float(row["median_throughput_samples_s"])
            assert scored.median_samples_per_s == pytest.approx(printed, rel=1e-3)
        if scored.num_devices:
            assert scored.num_devices == int(row["gpus"])


def test_two_of_the_complete_sets_drop_a_run_that_failed(
    published: list[tuple[Path, dict[str, str]]],
):
    scored = [score(folder) for folder, _ in complete(published, True)]
    dropped = [run for result in scored for run in result.runs if run.status != "success"]
    assert [(run.status, run.part, run.minutes) for run in dropped] == 2 * [
        ("aborted", "slowest", None)
    ]


def test_runs_of_incomplete_sets_lie_within_their_published_range(
    published: list[tuple[Path, dict[str, str]]],
):
    checked = 0
    for folder, row in complete(published, False):
        scored = score(folder)
        assert (scored.status, scored.score_minutes, scored.olympic_mean_minutes) == (
            "incomplete",
            None,
            None,
        )
        low, high = float(row["min_minutes"]), float(row["max_minutes"])
        for run in scored.runs:
            if run.status == "success" and run.minutes is not None:
                assert low - 1e-3 <= run.minutes <= high + 1e-3, folder
                checked += 1
    assert checked > 30


def test_a_score_is_the_mean_of_the_middle_runs_times_the_scaling_factor(tmp_path: Path):
    scored = score(submission(tmp_path, TEN, samples=3072))

    assert scored.olympic_mean_minutes == pytest.approx(10.1875)
    assert scored.scaling_factor == pytest.approx(3178.6666667 / 3072)
    assert scored.score_minutes == pytest.approx(10.1875 * 3178.6666667 / 3072)
    assert (scored.status, scored.official, scored.ruleset_from) == ("ok", False, "default")
    assert scored.label == "unofficial, not verified by MLCommons Association"
    assert [run.part for run in scored.runs].count("counted") == 8


def test_rates_are_of_the_counted_runs_and_flops_of_the_recipe(tmp_path: Path):
    scored = score(submission(tmp_path, [10.0] * 10, samples=3600), num_devices=4)

    assert scored.overall_samples_per_s == pytest.approx(3600 / 600)
    assert scored.median_samples_per_s == 4.0
    assert scored.flops_per_sample == pytest.approx(2517.7e12, rel=1e-3)
    assert scored.model_flops_per_s_per_device == pytest.approx(6 * 2517.7e12 / 4, rel=1e-3)
    assert scored.model_flops_reason is None


def test_model_flops_that_are_not_known_have_a_reason(tmp_path: Path):
    flux = submission(tmp_path, TEN, benchmark="flux1", batch=1024, samples=8_650_752)
    for path in flux.iterdir():
        path.write_text(path.read_text().replace(":::DLPAL", "DLPAL"))
    bare, known = score(flux), score(flux, num_devices=16)
    assert bare.model_flops_per_s_per_device is None
    assert figures(bare)["Model FLOP/s"].details == ("unknown number of accelerators; set --gpus",)
    assert known.model_flops_per_s_per_device and known.model_flops_reason is None


def test_devices_come_from_the_logs_or_from_the_system_description(tmp_path: Path):
    folder = submission(tmp_path / "results/box/llama2_70b_lora", TEN)
    assert score(folder).num_devices == 16

    for path in folder.iterdir():
        path.write_text(path.read_text().replace(":::DLPAL", "DLPAL"))
    assert score(folder).num_devices is None

    (tmp_path / "systems").mkdir()
    described = '{"number_of_nodes": "3", "accelerators_per_node": "8"}'
    (tmp_path / "systems/box.json").write_text(described)
    assert score(folder).num_devices == 24


def test_hosts_and_description_go_before_a_configuration_that_was_reused(tmp_path: Path):
    folder = submission(tmp_path / "results/box/llama2_70b_lora", [5.0] * 10, samples=3600)
    for path in folder.iterdir():
        text = path.read_text().replace("1 2 host[1-2] cluster config_2x8", "1 4 h[2-5] c box_1x8")
        path.write_text(text)
    (tmp_path / "systems").mkdir()
    (tmp_path / "systems/box.json").write_text(
        '{"number_of_nodes": "4", "accelerators_per_node": "8",'
        ' "accelerator_model_name": "NVIDIA H100"}'
    )
    scored = score(folder)
    assert scored.num_devices == 32
    assert "1 x 8 by the configuration's name" in "; ".join(scored.warnings)
    assert not any("can reach" in warning for warning in scored.warnings)
    few = score(folder, num_devices=2)
    assert any("dense peak in fp8, is more than a device can reach" in w for w in few.warnings)


@pytest.mark.parametrize("failed", [{"minutes": None}, {"status": "aborted"}, {"quality": 2.0}])
def test_one_failed_run_is_dropped_and_two_leave_no_score(tmp_path: Path, failed: dict[str, Any]):
    folder = submission(tmp_path, TEN)
    (folder / "result_0.txt").write_text(trial(0, **failed))
    assert score(folder).score_minutes == pytest.approx((10.5 + 11 + 5 * 10 + 13) / 8)

    (folder / "result_1.txt").write_text(trial(1, **failed))
    scored = score(folder)
    assert (scored.status, scored.score_minutes) == ("invalid", None)
    assert "2 of 10 runs did not converge" in str(scored.reason)
    assert {run.part for run in scored.runs} == {"outside"} and scored.overall_samples_per_s is None


def test_a_log_without_a_line_of_mlperf_is_a_run_that_failed(tmp_path: Path):
    folder = submission(tmp_path, TEN)
    (folder / "result_5.txt").write_text("")

    scored = score(folder)

    assert (scored.runs[5].status, scored.runs[5].part) == ("aborted", "slowest")


def test_of_twelve_runs_the_median_window_is_scored(tmp_path: Path):
    scored = score(submission(tmp_path, [30.0, *TEN, 30.0]))

    assert len(scored.windows) == 3
    means = sorted(w.olympic_mean_minutes or 0 for w in scored.windows)
    assert scored.olympic_mean_minutes == means[1]


def test_missing_runs_are_named_and_leave_no_means(tmp_path: Path):
    folder = submission(tmp_path, TEN)
    (folder / "result_4.txt").unlink()

    scored = score(folder)

    assert (scored.status, scored.score_minutes, scored.olympic_mean_minutes) == (
        "incomplete",
        None,
        None,
    )
    assert "9 of the 10 runs" in str(scored.reason) and "missing: number 4" in str(scored.reason)
    assert scored.runs[0].minutes == 10.0


def test_a_run_that_is_there_twice_counts_once(tmp_path: Path):
    folder = submission(tmp_path, TEN)
    shutil.copy(folder / "result_3.txt", folder / "result_10.txt")
    (folder / "result_7.txt.gz").write_bytes(gzip.compress((folder / "result_7.txt").read_bytes()))

    scored = score(folder)

    doubled = [run for run in scored.runs if run.status == "duplicate"]
    assert {run.reason for run in doubled} == {
        "same run as result_3.txt",
        "same run as result_7.txt",
    }
    assert scored.score_minutes == pytest.approx(10.1875)


def test_two_benchmarks_in_a_folder_are_refused(tmp_path: Path):
    folder = submission(tmp_path, TEN)
    (folder / "result_2.txt").write_text(trial(2, benchmark="flux1"))

    with pytest.raises(UserError, match=r"2 benchmarks \(flux1: result_2.txt; llama2_70b_lora"):
        score(folder)


@pytest.mark.parametrize(
    ("settings", "ruleset", "message"),
    [
        ({}, "9.9.0", "--ruleset 9.9.0: is not known; allowed: 4.1.0"),
        ({"benchmark": "flux1"}, "5.0.0", "has no flux1; allowed: 5.1.0"),
    ],
)
def test_a_wrong_ruleset_is_refused(
    tmp_path: Path, settings: dict[str, str], ruleset: str, message: str
):
    with pytest.raises(UserError, match=message):
        score(submission(tmp_path, TEN, **settings), ruleset)


def test_a_benchmark_without_rules_here_is_refused(tmp_path: Path):
    (tmp_path / "result_0.txt").write_text(trial().replace("llama2_70b_lora", "retinanet"))

    with pytest.raises(UserError, match="'retinanet' is unknown; allowed: llama2_70b_lora"):
        score(tmp_path)


def test_the_ruleset_is_that_of_the_round_in_the_path(tmp_path: Path):
    def of(place: str) -> Score:
        return score(submission(tmp_path / place, TEN))

    assert of("training_results_v6.0/org").ruleset == "6.0.0"
    assert (of("plain").ruleset, of("plain").ruleset_from) == ("5.1.0", "default")
    assert any("v2.7" in warning for warning in of("v2.7").warnings)


def test_too_fast_convergence_leaves_no_score(tmp_path: Path):
    scored = score(submission(tmp_path, TEN, samples=2900))

    assert (scored.status, scored.score_minutes) == ("invalid", None)
    assert scored.rcp is not None and scored.rcp.status == "failed"


def test_a_batch_without_reference_leaves_no_score(tmp_path: Path):
    scored = score(submission(tmp_path, TEN, batch=4096))

    assert scored.status == "no-reference" and "no reference for" in str(scored.reason)


def test_runs_of_different_batches_leave_no_score(tmp_path: Path):
    folder = submission(tmp_path, TEN)
    (folder / "result_2.txt").write_text(trial(2, batch=16))

    assert "different global batches: 8, 16" in str(score(folder).reason)


def test_what_a_review_would_ask_about_is_warned_of(tmp_path: Path):
    folder = submission(tmp_path, TEN, org="SUBMISSION_ORG_PLACEHOLDER", seed=7)
    damaged = trial(0).encode() + b":::MLLOG {\n"
    (folder / "result_0.txt").write_bytes(damaged)
    packed = gzip.compress(trial(1).encode() + b"tail" * 5000)
    (folder / "result_1.txt").write_bytes(packed[:-12])

    scored = score(folder)

    text = "\n".join(scored.warnings)
    assert scored.organization == "Example"
    for part in (
        "submission_org is still a placeholder",
        "seeds used by several runs: 7",
        "incomplete :::MLLOG lines",
        "result_1.txt: the compressed file is damaged",
    ):
        assert part in text, text


def test_long_initialization_and_different_systems_are_warned_of(tmp_path: Path):
    folder = submission(tmp_path, TEN)
    late = line("init_start", None, 1_760_000_000_000 - 31 * 60_000) + "\n"
    (folder / "result_0.txt").write_text(late + trial(0).replace("2xBox", "4xBox"))

    text = "\n".join(score(folder).warnings)

    assert "more than 30 minutes: result_0.txt" in text
    assert "different values of submission_platform: 2xBox, 4xBox" in text


def telemetry(path: Path, number: int, watts: float, until_s: float = 2000.0) -> None:
    """A host's file around run `number`, at constant power from before its initialization."""
    path.parent.mkdir(exist_ok=True)
    begin = EPOCH_MS / 1000 + number * 7200
    lines = [
        {
            "event": "telemetry",
            "host": "a",
            "interval_s": 5.0,
            "unknown": {"cpu": "not read"},
            "sources": {"gpu": "nvidia-smi power.draw"},
        }
    ]
    lines += [
        {"event": "sample", "time_unix": begin + t, "gpus": [{"index": 0, "power_w": watts}]}
        for t in range(0, int(until_s), 5)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))


def test_the_energy_of_a_run_is_that_of_its_timed_part(tmp_path: Path):
    runs = ten_runs(tmp_path)
    for number in range(10):
        telemetry(runs / f"telemetry/result_{number}-a.jsonl", number, 700.0)
    scored = score(runs)

    for run, minutes in zip(scored.runs, TEN, strict=True):
        assert run.energy and run.energy.energy_j == pytest.approx(700 * minutes * 60)
        assert run.energy.power_w == pytest.approx(700)
    assert scored.mean_energy_j == pytest.approx(700 * 10.1875 * 60)
    energy = figures(scored)["Energy"]
    assert (energy.value, energy.interval) == ("118.9 Wh", "at 700.0 W")
    assert "mean of 8 runs" in energy.details[0]
    assert energy.details[1] == "of gpu (nvidia-smi power.draw)"


def test_hosts_are_added_and_a_dark_one_leaves_no_sum(tmp_path: Path):
    runs = ten_runs(tmp_path)
    telemetry(runs / "telemetry/result_1-a.jsonl", 1, 700.0)
    telemetry(runs / "telemetry/result_1-b.jsonl", 1, 500.0)
    telemetry(runs / "telemetry/result_2-a.jsonl", 2, 700.0, until_s=300)
    (runs / "telemetry/result_3-a.jsonl").write_text("nothing whole")
    scored = score(runs).runs

    assert scored[1].energy and scored[1].energy.energy_j == pytest.approx(1200 * 10.5 * 60)
    assert scored[2].energy and scored[2].energy.energy_j is None
    assert "was not sampled over the whole window" in str(scored[2].energy.reason)
    assert scored[3].energy and scored[3].energy.reason == "no telemetry was recorded"
    assert scored[0].energy is None  # result_1's files are not those of result_10 either
    unknown = score(runs)
    assert unknown.mean_energy_j is None
    assert figures(unknown)["Energy"].value == "not known"


def test_without_telemetry_nothing_is_said_of_energy(tmp_path: Path):
    scored = score(ten_runs(tmp_path))

    assert scored.mean_energy_j is None and scored.status == "ok"
    assert "Energy" not in figures(scored)


def test_a_runs_telemetry_goes_beside_the_log_of_its_series(tmp_path: Path):
    (tmp_path / "run/telemetry").mkdir(parents=True)
    (tmp_path / "run/telemetry/host7.jsonl").write_text("x")
    (tmp_path / "series").mkdir()

    copy_telemetry(tmp_path / "run", tmp_path / "series", "result_4")
    copy_telemetry(tmp_path / "no-run", tmp_path / "series", "result_5")

    assert [p.name for p in (tmp_path / "series/telemetry").iterdir()] == ["result_4-host7.jsonl"]


def test_a_host_that_left_nothing_is_named_and_there_is_no_sum_without_it(tmp_path: Path):
    runs = ten_runs(tmp_path)
    (tmp_path / "run").mkdir()
    for number in range(10):
        telemetry(tmp_path / "run/telemetry/00000-a.jsonl", number, 700.0)
        copy_telemetry(tmp_path / "run", runs, f"result_{number}", ("a", "b", "c"))

    scored = score(runs)

    assert scored.mean_energy_j is None
    (reason,) = {run.energy.reason for run in scored.runs if run.energy}
    assert reason is not None and "gpu: b,c: no telemetry received" in reason
    assert figures(scored)["Energy"].details[0].startswith("gpu: b,c")


def test_another_factor_is_told_with_what_it_would_make(tmp_path: Path):
    folder = submission(tmp_path, TEN)
    (folder / "scaling.json").write_text('{"scaling_factor": 1.05}')
    scored = score(folder)
    assert scored.score_minutes == pytest.approx(10.1875)
    assert (
        "scaling.json has the factor 1.050000, but the convergence test gives 1.000000, which "
        "is used; with the file's factor the score would be 10.6969 minutes"
    ) in scored.warnings


def test_the_factor_of_the_test_is_not_mentioned(tmp_path: Path):
    (tmp_path / "scaling.json").write_text('{"scaling_factor": 1.0092330000001}')
    assert scaling_file_warning(tmp_path, 1.009233, 14.0) is None
    assert scaling_file_warning(tmp_path, None, None) is None
    assert scaling_file_warning(tmp_path / "nowhere", 1.0, 14.0) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"scaling_factor": null}', "[" * 100_000])
def test_a_file_that_states_none_is_told(tmp_path: Path, text: str):
    (tmp_path / "scaling.json").write_text(text)
    assert "no valid scaling_factor" in str(scaling_file_warning(tmp_path, 1.0, 14.0))


@pytest.mark.parametrize("value", ["-1", "0", "Infinity", "NaN"])
def test_what_is_no_factor_is_told(tmp_path: Path, value: str):
    (tmp_path / "scaling.json").write_text(f'{{"scaling_factor": {value}}}')
    assert "has the invalid factor" in str(scaling_file_warning(tmp_path, 1.0, 14.0))


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
    assert scored.flops_per_sample and scored.model_flops_per_s_per_device
    assert (checked := check(folder)).ruleset == "6.1.0" and checked.ruleset_from == "benchmark"


def test_three_runs_are_a_result_where_the_rules_say_so(tmp_path: Path):
    runs = [3.0, 3.2, 3.5]
    folder = submission(tmp_path, runs, benchmark="deepseekv3_671b", batch=16_384, samples=770_048)
    scored = score(folder, "6.0.0")
    assert (scored.status, scored.runs_required) == ("ok", 3)
    assert scored.flops_per_sample is None and scored.model_flops_per_s_per_device is None
    assert scored.model_flops_reason == "FLOPs per sample of deepseekv3_671b are unknown"
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
