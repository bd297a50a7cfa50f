"""Questions before renting GPUs: typed as a stranger would, answered first of all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command import paceline


def answer(*words: object) -> str:
    done = paceline(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_how_fast_should_llama_8b_train_on_16_h100():
    lines = answer("estimate", "llama31-8b", "--gpu", "H100", "--gpus", 16).splitlines()
    assert "of 79.65 GiB per GPU" in lines[1]
    assert lines[2].strip().startswith("Fits on the same GPUs with --layout ")
    labels = [line.split("  ")[1] for line in lines[4:10]]
    assert labels == ["Memory", "Throughput", "Step time", "MFU", "Whole training", "Cost"]
    assert "tokens/s/GPU" in lines[5] and "(causal)" in lines[7] and "(full-attention)" in lines[7]


def test_the_layout_that_fits_can_be_typed():
    text = answer("estimate", "llama31-8b", "--gpu", "H100", "--gpus", 16)
    layout = text.partition("--layout ")[2].partition(":")[0]
    typed = ("--gpu", "H100", "--gpus", 16, "--layout", layout)
    assert answer("estimate", "llama31-8b", *typed).splitlines()[1].strip().startswith("fits: ")


def test_does_70b_fit_on_8_h100_with_tp_8():
    text = answer("estimate", "llama31-70b", "--gpu", "H100", "--gpus", 8, "--tp", 8)
    assert "does not fit: " in text and "of the recipe does not fit 8 GPUs; 1 is used" in text
    assert "No layout fits on 8 x H100-SXM; 32 GPUs are enough with --layout " in text


def test_how_many_h100_for_15t_tokens_in_30_days():
    training = ("--gpu", "H100", "--tokens", "15T", "--days", "30 days")
    text = answer("estimate", "llama31-70b", *training)
    assert "train 15.0T tokens in " in text and "; 30 days need about " in text
    result = json.loads(answer("estimate", "llama31-70b", *training, "--json"))
    assert (
        result["training_cost"]["days"] <= 30 and result["training_cost"]["total_tokens"] == 15e12
    )


def test_how_many_tokens_for_a_million():
    priced = ("--gpu", "H100", "--gpus", 64, "--price", "$2.5", "--budget", "$1M")
    text = answer("estimate", "llama31-8b", *priced)
    assert "$1,000,000 pays for 14.8T tokens in " in text
    assert "per million tokens" in text


def test_a_list_of_sizes_is_a_table():
    sizes = ("--gpu", "H100", "--gpus", "64,128,256", "--price", 2)
    rows = answer("estimate", "llama31-70b", *sizes).splitlines()[2:6]
    assert rows[0].split()[:2] == ["GPUs", "layout"] and "tokens/s/GPU" in rows[0]
    assert [row.split()[0] for row in rows[1:]] == ["64", "128", "256"]
    result = json.loads(answer("estimate", "llama31-70b", *sizes, "--json"))
    assert [each["devices"] for each in result["sizes"]] == [64, 128, 256]


def test_what_a_report_prints_can_be_typed():
    printed = "dp 8 tp 2 zero 1 micro-batch 1"
    text = answer("estimate", "llama31-8b", "--gpu", "H100", "--layout", printed)
    assert f"llama31-8b on 16 x H100-SXM · bf16 · {printed} · " in text
    same = ("--dp", 8, "--tp", 2, "--zero", 1, "--mbs", 1)
    assert answer("estimate", "llama31-8b", "--gpu", "H100", *same) == text


@pytest.mark.parametrize(
    ("words", "option", "shown"),
    [
        (("--seq-len", "4k", "--gbs", "1k"), "seq_len", 4096),
        (("--gpus", "1,024"), "devices", 1024),
        (("--dtype", "fp8"), "dtype", "fp8"),
        (("--tokens", "2.5T"), None, 2.5e12),
    ],
)
def test_settings_are_typed_as_people_say_them(words: tuple[str, ...], option: str, shown: object):
    gpus = () if "--gpus" in words else ("--gpus", 64)
    text = answer("estimate", "llama31-8b", "--gpu", "H100", *gpus, *words, "--json")
    result = json.loads(text)
    assert (result[option] if option else result["training_cost"]["total_tokens"]) == shown


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--gpus", 64, "--budget", "$1M"), "needs a price"),
        (("--gpus", 64, "--days", 30), "--days: cannot be combined with --gpus"),
        (("--gpus", 16, "--tp", 4, "--dp", 8), "is 32 GPUs, not 16"),
        (("--gpus", 64, "--layout", "tq=2"), "tq is not part of a layout"),
        (("--gpus", 64, "--tokens", "15X"), "'15X' is not a quantity; allowed: 15T"),
        (("--gpus", "64,128", "--compare", "device=B200"), "cannot be combined with --compare"),
    ],
)
def test_what_cannot_be_answered_says_why(words: tuple[object, ...], error: str):
    done = paceline("estimate", "llama31-8b", "--gpu", "H100", *words)
    assert done.returncode == 1 and error in " ".join(done.stderr.replace("│", " ").split())


def test_what_mfu_is_400_tflops_of_megatron():
    options = ("--model", "llama31-70b", "--device", "H100")
    done = paceline("table", "convert", "400TFLOP/s", "--from", "megatron", *options)
    assert "40.42% MFU (causal)" in done.stdout and done.stdout.count("causal:") == 1
    assert "megatron is read as causal (Megatron-LM from core 0.12" in done.stderr


def test_what_mfu_is_10500_tokens_per_gpu():
    options = ("--model", "llama31-8b", "--device", "H100")
    assert "54.62% MFU (causal)" in answer("table", "convert", "10,500 tokens/s/GPU", *options)


@pytest.mark.parametrize(
    ("figure", "words", "error"),
    [
        ("10,500", (), "has no unit; allowed: 54.1%, 1249TFLOP/s, 10,500 tokens/s/GPU"),
        ("10500 tokens/s", (), "could be of one GPU or of all: write tokens/s/GPU"),
        ("10500 tokens/s/GPU", (), "4.8 times the peak of 989.5 TFLOP/s: impossible"),
        ("1249 TFLOP/s", ("--from", "nemo"), "an MFU above 100% is impossible; is it of a lower"),
        ("400 TFLOP/s", (), "allowed: a framework (megatron, "),
    ],
)
def test_an_impossible_figure_says_why(figure: str, words: tuple[str, ...], error: str):
    done = paceline(
        "table", "convert", figure, "--model", "llama31-70b", "--device", "H100", *words
    )
    assert done.returncode == 1 and error in done.stderr


def test_run_and_sweep_understand_the_same_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PACELINE_RUNS", str(tmp_path))
    same = ("--tp", 2, "--seq-len", "1k", "--gbs", 8, "--steps", 20)
    text = answer("run", "tiny-llama", "--gpus", 2, *same, "--dry-run")
    assert "OMP_NUM_THREADS" in text
    answer("sweep", "tiny-llama", "--tp", "1,2", "--seq-len", "1k", "--steps", 20, "--dry-run")
