"""Questions about logs, hardware and one's own programs: typed as a stranger would."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path

import pytest

from paceline.core.metrics import ENERGY_PER_TOKEN, METRICS
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


def test_a_scenario_without_a_key_shows_how_to_write_one():
    options = ("--gpu", "H100", "--gpus", 64, "--compare", "fp8")
    done = paceline("estimate", "llama31-8b", *options)
    assert done.returncode == 1 and "e.g. dtype=fp8" in done.stderr


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("nvidia", "did you mean nvidia-dgxc or nvidia-llama31 or nvidia-nemo?"),
        ("nvida-llama31", "did you mean 'nvidia-llama31'?"),
    ],
)
def test_a_part_of_a_reference_lists_the_names_that_begin_with_it(
    here: Path, name: str, advice: str
):
    done = paceline("compare", "train.log", "--against", name, *LOG_OPTIONS, cwd=here)
    assert done.returncode == 1 and advice in done.stderr


def test_a_recipe_stands_for_its_published_rows(here: Path):
    options = ("--model", "llama31-70b", "--gpu", "H100", "--against", "llama31-70b")
    text = answer("compare", "train.log", *options, "--gpus", 512, cwd=here, code=3)
    assert "published: " in text


def test_which_of_my_nodes_are_bad(here: Path):
    options = ("--hosts", "no-such-node[001-016]", "--fast", "--drain-file", "bad.txt")
    text = answer("check", *options, cwd=here, code=4)
    assert "0 fit, 16 not reached (no-such-node[001-016])" in text
    assert "No host is listed to drain" in text and not (here / "bad.txt").exists()


def test_what_is_the_all_reduce_bandwidth(here: Path):
    options = (
        "--devices",
        2,
        "--ops",
        "all_reduce",
        "--max-bytes",
        2**20,
        "--seconds",
        0.5,
        "--json",
    )
    result = json.loads(answer("probe", "network", *options, cwd=here))
    rows = [row for row in result["collectives"] if row["operation"] == "all_reduce"]
    # An all-reduce over n devices moves 2 (n - 1) / n of the payload: all of it for 2.
    assert rows and all(row["bus_bytes_per_s"] == row["bytes_per_s"] > 0 for row in rows)


def test_does_my_disk_feed_the_training(here: Path):
    options = ("--size", "16MiB", "--seconds", 0.1, "--assume-devices", "H100:8")
    text = answer("probe", "storage", ".", "--recipe", "llama31-8b", *options, cwd=here)
    assert " gives " in text and "samples/s" in text and "the demand is unknown" not in text


def test_a_cpu_without_a_calibration_says_how_to_get_the_demand(here: Path):
    options = ("--size", "16MiB", "--seconds", 0.1, "--recipe", "tiny-llama")
    text = " ".join(answer("probe", "storage", ".", *options, cwd=here).split())
    assert "the demand is unknown, because this CPU is not calibrated in" in text
    assert "run `paceline probe calibrate" in text and "--assume-devices, e.g. H100:8" in text


def test_send_metrics_to_prometheus(here: Path):
    answer("runs", "import", "train.log", *LOG_OPTIONS, cwd=here)
    answer("runs", "export", "last", "--to", "openmetrics", "--out", "run.prom", cwd=here)
    line = next(
        line
        for line in (here / "run.prom").read_text().splitlines()
        if line.startswith("paceline_run_step_time_s{")
    )
    assert 'recipe="llama31-8b"' in line
    assert float(line.rpartition(" ")[2]) == pytest.approx(5.7, abs=0.05)


def test_a_login_node_needs_no_torch_and_no_network(here: Path):
    """Logs, estimates and comparisons work without torch, and nothing is sent anywhere."""
    (here / "blocked").mkdir()
    (here / "blocked" / "torch.py").write_text("raise ImportError('no torch here')\n")
    (here / "blocked" / "sitecustomize.py").write_text(
        "import sys\n"
        "def refuse(event, arguments):\n"
        "    if event in ('socket.connect', 'socket.getaddrinfo'):\n"
        "        raise SystemExit(f'{event}: {arguments}')\n"
        "sys.addaudithook(refuse)\n"
    )
    for command in (
        ("parse", "train.log", *LOG_OPTIONS),
        ("estimate", "llama31-8b", "--gpu", "H100", "--gpus", 16),
        ("compare", "train.log", "train.log"),
        ("explain", "train.log", *LOG_OPTIONS),
    ):
        done = paceline(*command, cwd=here, runs=here, env={"PYTHONPATH": str(here / "blocked")})
        assert done.returncode in (0, 4), done.stderr
        assert not done.stderr.startswith(("socket", "Traceback"))


def test_delete_old_runs(here: Path):
    answer("runs", "import", "train.log", "--tag", "old", cwd=here)
    answer("runs", "rm", "old", "--yes", cwd=here)
    assert not [*(here / "runs").glob("*/run.json")]


def test_who_is_the_straggler():
    run = "2026-01-15-tiny-llama-dp2-2xcpu-86277afc"
    text = answer("runs", "watch", run, "--once", "--runs-dir", DOCS.parent / "tests/forms/runs")
    assert "the others wait for rank 1, which is 27% busier" in text


def test_why_did_my_job_hang(here: Path):
    program = (sys.executable, "-c", "import time; time.sleep(600)")
    options = ("--no-probe", "--set", "hang_limit_s=2", "--tag", "hung")
    text = answer("run", *options, "--", *program, cwd=here, code=2)
    assert "no rank showed activity for" in text
    assert "failed" in answer("runs", "show", "hung", cwd=here)


def test_what_do_the_terms_mean():
    rows = (DOCS / "concepts" / "glossary.md").read_text("utf-8").splitlines()
    terms = {row.split("|")[1].strip(): row for row in rows if row.startswith("| ")}
    assert {"spread", "straggler", "naive", "borderline", "goodput"} <= terms.keys()
    assert "slow rank or node" in terms["straggler"] and "variation" in terms["spread"]


def test_every_metric_is_explained():
    page = (DOCS / "reference" / "metrics.md").read_text("utf-8")
    assert [name for name in (*METRICS, ENERGY_PER_TOKEN) if f"`{name}`" not in page] == []


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
        ("how-to/check-nodes.md", "all-reduce"),
    ],
)
def test_a_page_says_it_too(page: str, words: str):
    assert words in (DOCS / page).read_text("utf-8")
