"""Questions about logs, hardware and one's own programs: typed as a stranger would."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from tests.command import paceline
from tests.logs.example import megatron_log
from tests.mlperf.samples import submission

LOG_OPTIONS = ("--model", "llama31-8b", "--gpu", "H100-SXM")
DOCS = Path(__file__).parents[2] / "docs"
NOISE_S = (0.01, -0.02, 0.03, -0.01, 0.0)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with the log of a training that takes 5.7 s per step."""
    times = [5.7 + NOISE_S[n % len(NOISE_S)] for n in range(30)]
    (tmp_path / "train.log").write_text(megatron_log(times))
    return tmp_path


def answer(*arguments: object, cwd: Path | None = None, code: int = 0) -> str:
    done = paceline(*arguments, cwd=cwd, runs=cwd / "runs" if cwd else None)
    assert done.returncode == code, done.stderr
    return done.stdout


@pytest.mark.parametrize("step_time", ["12.5", "12.5s", "12500 ms"])
def test_why_is_my_mfu_low(step_time: str):
    options = ("--gpu", "H100", "--gpus", 16, "--measured-step-time", step_time)
    text = answer("estimate", "llama31-8b", *options)
    rows = text[text.index("MFU waterfall") :].splitlines()
    causes = [row[:24].strip().split("  ")[0] for row in rows]
    assert {"peak", "GEMM efficiency", "estimated", "measured"} <= set(causes)


def test_why_is_my_log_slow(here: Path):
    log = DOCS / "examples" / "train.log"
    text = answer("explain", log, *LOG_OPTIONS, cwd=here)
    assert "train.log · compared with the estimate" in text
    assert "of the mean step" in text


def test_how_does_torchrun_start_on_four_slurm_nodes(here: Path):
    command = ("torchrun", "--nnodes", "{nodes}", "--nproc-per-node", "{devices_per_node}", "t.py")
    options = ("--launcher", "slurm", "--nodes", 4, "--cluster", "dgx-h100", "--dry-run")
    text = answer("run", *options, "--", *command, cwd=here)
    assert "#SBATCH --nodes=4" in text and "#SBATCH --gres=gpu:8" in text


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("train.py", "`paceline run -- python train.py`"),
        ("job.sh", "`paceline run -- bash job.sh`"),
    ],
)
def test_a_program_in_place_of_a_recipe_says_how_to_measure_it(here: Path, name: str, advice: str):
    (here / name).write_text("print('step')\n")
    done = paceline("run", name, cwd=here)
    assert done.returncode == 1 and advice in done.stderr


def test_which_gpu_is_cheaper_per_token():
    other = ("--price", 1.5, "--compare", "device=H100,price=2.5")
    text = answer("estimate", "llama31-8b", "--gpu", "A100", "--gpus", 64, *other)
    assert "per million tokens" in text
    assert "64 x H100-SXM compared with 64 x A100-SXM-80GB: tokens/s x" in text


def test_is_another_vendor_faster():
    options = ("--gpu", "H100", "--gpus", 64, "--compare", "device=MI300X")
    text = answer("estimate", "llama31-70b", *options)
    assert "64 x MI300X compared with 64 x H100-SXM" in text and "80% intervals" in text


def test_what_would_fp8_give():
    options = ("--gpu", "H100", "--gpus", 64, "--compare")
    text = answer("estimate", "llama31-8b", *options, "dtype=fp8")
    assert "64 x H100-SXM, fp8 compared with 64 x H100-SXM, bf16: tokens/s x1." in text
    result = json.loads(answer("estimate", "llama31-8b", *options, "dtype=fp8", "--json"))
    bf16, fp8 = result["scenarios"]
    assert (bf16["dtype"], fp8["dtype"]) == ("bf16", "fp8")
    assert fp8["step_time_s"] < bf16["step_time_s"]


@pytest.mark.parametrize(
    ("scenario", "shown"),
    [
        ("tp=4", "64 x H100-SXM, dp 8 tp 4 cp 2 "),
        ("seq-len=4k", "64 x H100-SXM, seq 4,096 compared with 64 x H100-SXM, seq 8,192"),
        ("gpu=B200,gpus=32,dtype=fp8", "32 x B200 compared with 64 x H100-SXM"),
        ("layout.micro_batch=2", "micro-batch 2 compared with"),
        ("variant=fp8", "64 x H100-SXM, fp8 compared with"),
    ],
)
def test_scenarios_take_the_names_of_options(scenario: str, shown: str):
    options = ("--gpu", "H100", "--gpus", 64, "--compare", scenario)
    assert shown in answer("estimate", "llama31-8b", *options)


def test_which_layout_is_best_on_64_h100():
    options = ("--gpu", "H100", "--gpus", 64, "--estimate-only", "--top", 3)
    rows = answer("tune", "llama31-70b", *options).splitlines()
    assert rows[2].split()[:2] == ["layout", "micro-batch"]
    assert [row.split()[-1] for row in rows[3:6]] == ["fits"] * 3
    apart = rows.index("Faster, but may run out of memory")
    assert rows[apart + 2].split()[-1] == "borderline"


def test_what_do_failures_and_checkpoints_cost():
    options = ("--gpu", "H100", "--gpus", 1024, "--tokens", "15T", "--price", "$2.5")
    failures = ("--mtbf", "50k", "--restart-time", "15m", "--checkpoint-time", "1m")
    text = answer("estimate", "llama31-70b", *options, *failures)
    assert "goodput 9" in text and "Young's interval" in text


def test_is_my_log_as_fast_as_the_published_figure(here: Path):
    """Step time and MFU of one row, the MFU in the FLOPs convention in which it was published."""
    (here / "seventy.log").write_text(megatron_log([14.72 + noise for noise in NOISE_S] * 6))
    settings = ("--model", "llama31-70b", "--gpu", "H100-SXM", "--gpus", 64, "--dtype", "bf16")
    options = ("--against", "nvidia-llama31", *settings, "--seq-len", "8k")
    result = json.loads(answer("compare", "seventy.log", *options, "--json", cwd=here, code=4))
    assert result["baseline"]["name"] == "llama31-70b-bf16-64"
    assert "14.72 s vs 14.72 s" in result["observed"] and result["differing_keys"] == []
    assert (
        "MFU is counted in full-attention, the FLOPs convention of llama31-70b-bf16-64"
        in (result["notes"])
    )
    mfu = next(metric for metric in result["metrics"] if metric["metric"] == "mfu")
    assert mfu["baseline"]["value"] == 0.541
    assert mfu["candidate"]["value"] == pytest.approx(0.541, abs=1e-3)


def test_a_log_of_other_work_is_not_comparable_with_a_published_figure(here: Path):
    options = ("--against", "nvidia-llama31", *LOG_OPTIONS)
    text = answer("compare", "train.log", *options, cwd=here, code=3)
    assert "not comparable" in text and "num_devices" in text


def test_gate_a_nightly_job(here: Path):
    (here / "slow.log").write_text(megatron_log([6.3] * 30))
    text = answer("compare", "train.log", "slow.log", "--format", "junit", cwd=here, code=4)
    assert text.startswith("<?xml") and 'errors="1"' in text


def test_step_times_for_pandas(here: Path):
    text = answer("parse", "train.log", "--per-step", "--format", "csv", cwd=here)
    rows = [*csv.DictReader(io.StringIO(text))]
    assert len(rows) == 30 and float(rows[3]["step_time_s"]) == pytest.approx(5.7, abs=0.05)


def test_what_can_i_set():
    fields = json.loads(answer("recipes", "--fields", "--json"))
    text = json.dumps(fields)
    assert "layout.tp" in text and "Tensor-parallel size." in text


def test_does_a_published_table_add_up():
    text = answer("table", "audit", "nvidia-llama31-70b-bf16")
    assert "6 rows, 24 cells checked" in text


def test_the_score_of_mlperf_logs(tmp_path: Path):
    submission(tmp_path / "logs", [float(10 + trial) for trial in range(10)])
    text = answer("mlperf", "score", "logs", cwd=tmp_path)
    assert "unofficial" in text.lower() and "14.5" in text


def test_nothing_is_known_of_a_recipe_that_does_not_exist(tmp_path: Path):
    done = paceline("runs", "history", "nosuch", cwd=tmp_path, runs=tmp_path / "runs")
    assert done.returncode == 1 and "run nosuch" not in done.stderr
    assert "`paceline recipes` lists the recipes" in done.stderr


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("get-started/install.md", "sends no telemetry, and it needs no root"),
        ("get-started/install.md", "# without torch"),
        ("how-to/share-a-run.md", "`paceline runs rm RUN` deletes a run"),
        ("how-to/export-runs.md", "# Export runs to TensorBoard, W&B, MLflow and Prometheus"),
        ("how-to/watch-a-run.md", "If a job hangs"),
        ("reference/metrics.md", "`spread`"),
        ("reference/metrics.md", "## Straggler"),
        ("how-to/scaling-test.md", "naive"),
        ("how-to/check-nodes.md", "all-reduce"),
    ],
)
def test_questions_without_a_command_are_answered_by_a_page(page: str, words: str):
    assert words in (DOCS / page).read_text("utf-8")
