"""Numbers that no quantity has, and numbers that are written in other ways than expected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.engines.log_reading.table_format import _pattern
from paceline.mlperf.compare.published_scores import read_score
from paceline.scaling.network.benchmark_output import MAX_ENTRIES, read_benchmark
from tests.attacks.reproductions import refused
from tests.command import paceline
from tests.engines.generic_inputs import check_generic
from tests.mlperf.samples import TEN, submission
from tests.scaling.network.test_benchmark_output import HEADER, ranks

ESTIMATE = ["estimate", "llama31-8b", "--device", "H100", "--gpus", "16"]


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan", "1e999"])
@pytest.mark.parametrize("name", ["hang_limit_s", "lr", "grad_clip", "weight_decay"])
def test_no_setting_of_a_run_is_infinite(tmp_path: Path, name: str, value: str):
    done = paceline("run", "tiny-llama", "--set", f"{name}={value}", runs=tmp_path)
    refused(done, 1, name)
    assert not list(tmp_path.glob("20*"))


@pytest.mark.parametrize("setting", ["steps=true", "lr=true", "layout.tp=true", "devices=true"])
def test_true_is_no_number(tmp_path: Path, setting: str):
    done = paceline("run", "tiny-llama", "--dry-run", "--set", setting, runs=tmp_path)
    refused(done, 1, "must be a number, not true or false")


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["parse", "no.log", "--tokens", "inf"], "must be a finite number"),
        (["runs", "import", "no.log", "--tokens", "inf"], "must be a finite number"),
        (["runs", "import", "no.log", "--gpus", "99999999999999999999"], "is too large"),
        ([*ESTIMATE, "--set", "total_tokens=.inf"], "inf is not a finite number"),
        (
            [*ESTIMATE, "--checkpoint-time", "1e308", "--mtbf", "1", "--json"],
            "must be a finite number",
        ),
        ([*ESTIMATE, "--inter", "-100GB/s"], "states a negative rate"),
        ([*ESTIMATE, "--inter", "1,2,3 GB/s"], "link '1,2,3 GB/s'"),
        ([*ESTIMATE, "--inter", "infGB/s"], "inf"),
        ([*ESTIMATE, "--inter", "nanGB/s"], "nan"),
        ([*ESTIMATE, "--inter", "1e400GB/s"], "1e400"),
        ([*ESTIMATE, "--inter", "8.5x400 Gb/s"], "no valid number of ports"),
        ([*ESTIMATE, "--inter", "1e3x400 Gb/s"], "no valid number of ports"),
        ([*ESTIMATE, "--inter", "-8x400 Gb/s"], "no valid number of ports"),
        ([*ESTIMATE, "--inter", "0x400 Gb/s"], "no valid number of ports"),
        ([*ESTIMATE, "--inter", "9" * 30 + "x400 Gb/s"], "no valid number of ports"),
    ],
    ids=" ".join,
)
def test_numbers_that_no_quantity_has_are_refused(tmp_path: Path, words: list[str], refusal: str):
    refused(paceline(*words, runs=tmp_path), 1, refusal)


def test_no_table_counts_beyond_whole_numbers(tmp_path: Path):
    table = tmp_path / "table.csv"
    table.write_text(f"id,num_devices,step_time_s\na,{'9' * 24},1.5\n")
    refused(paceline("table", "audit", table, runs=tmp_path), 1, "is too large")


@pytest.mark.parametrize(
    ("written", "plain"),
    [
        ("1e2GB/s", "100 GB/s"),
        ("4e2 Gb/s", "400 Gb/s"),
        ("1,200 GB/s", "1200 GB/s"),
        ("100 GiB/s", "107.3741824 GB/s"),
        ("800 Gibit/s", "858.9934592 Gb/s"),
        ("8×400 Gb/s", "8x400 Gb/s"),
    ],
)
def test_a_rate_means_the_same_however_it_is_written(tmp_path: Path, written: str, plain: str):
    documents = [
        json.loads(paceline(*ESTIMATE, "--inter", rate, "--json", runs=tmp_path).stdout)
        for rate in (written, plain)
    ]
    times = [document["step_time_s"] for document in documents]
    assert times[0] == times[1]


@pytest.mark.parametrize("time_ms", ["1e300", "9" * 20, "-1e300", "1e999"])
def test_a_time_beyond_all_years_is_no_run_of_mlperf(tmp_path: Path, time_ms: str):
    folder = submission(tmp_path / "runs", TEN)
    log = folder / "result_9.txt"
    lines = log.read_text().splitlines(keepends=True)
    before = lines[-1].partition('"time_ms": ')[2].partition(",")[0]
    log.write_text("".join([*lines[:-1], lines[-1].replace(before, time_ms)]))
    score = read_score(folder, None, None)
    assert score.runs[9].minutes is None
    assert score.score_minutes is None or score.score_minutes < 20


def test_clock_times_beyond_a_floats_range_are_no_clock():
    rows = "".join(f"{n},{41.1 * n:.3f},2.0\n" for n in range(8))
    log = f"update,_runtime,tok/s/gpu\n{rows}8,1e308,2.0\n9,1e308,2.0\n10,1e308,2.0\n"
    check_generic(log.encode())


@pytest.mark.parametrize("pattern", ["a{99999999999} {step}", "(" * 20_000 + "a" + ")" * 20_000])
def test_a_pattern_beyond_what_can_be_compiled_is_refused(pattern: str):
    with pytest.raises(ValueError, match="is not a regular expression"):
        _pattern(pattern)


def test_a_network_benchmark_without_end_is_refused(tmp_path: Path):
    path = tmp_path / "output.txt"
    path.write_text(HEADER + ranks(1, MAX_ENTRIES + 2))
    with pytest.raises(UserError, match="more than 20,000 ranks and results"):
        read_benchmark(path, None, None)
