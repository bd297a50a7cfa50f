"""nanochat's lines, older and newer, and what it prints before them."""

from __future__ import annotations

import pytest

from paceline.core.units import MIB
from paceline.engines import log_format
from tests.engines.promises import parsed, reader_of
from tests.engines.recent_samples import NANOCHAT_HEAD


# After scripts/base_train.py of karpathy/nanochat, 2025-10 to 2026.
def line(step: int, ms: float = 480.12, rate: str = "1,091,993", loss: str = "5.123456") -> str:
    return (
        f"step {step:05d}/21400 (0.47%) | loss: {loss} | lrm: 1.00 | dt: {ms:.2f}ms | "
        f"tok/sec: {rate} | bf16_mfu: 47.10 | epoch: 1 pq: 3 rg: 12 | total time: 0.80m | "
        "eta: 2.5m\n"
    )


check = reader_of("nanochat")


def test_a_line_is_read_to_its_figures():
    log = check(line(100))
    steps = log.steps()
    assert steps.index.tolist() == [100] and log.facts["total_steps"] == 21_400
    assert steps["step_time_s"] == pytest.approx([0.48012])
    assert steps["loss"] == pytest.approx([5.123456]) and steps["mfu"] == pytest.approx([0.471])
    assert steps["tokens"] == pytest.approx([524_288], rel=1e-4)
    assert log.resolution_s == pytest.approx(1e-5)
    assert log.remarks == ["the losses are moving averages"]


def test_the_line_of_2025_has_a_gradient_norm():
    text = line(7).replace("| lrm:", "| grad norm: 0.1234 | lrm:").replace("bf16_mfu", "mfu")
    assert log_format("nanochat").step_line.search(text.encode())
    steps = check(text).steps()
    assert steps["grad_norm"] == pytest.approx([0.1234]) and steps["mfu"] == pytest.approx([0.471])


def test_a_line_without_a_total_drawn_again_in_place():
    text = (
        "\rstep 00010 (1.0%) | loss: 5.123456 | lrm: 1.00 | dt: 300ms | tok/sec: 1,747,626 | "
        "mfu: 40.1% | epoch: 1 | remaining: 290s    "
    )
    assert log_format("nanochat").step_line.search(text.encode())
    steps = check(text).steps()
    assert steps["step_time_s"] == pytest.approx([0.3]) and steps["mfu"] == pytest.approx([0.401])


def test_the_lines_before_the_first_step_are_kept():
    log = check(NANOCHAT_HEAD.decode() + line(0))
    assert log.facts == {
        "device": "NVIDIA H100 80GB HBM3",
        "dtype": "bfloat16",
        "micro_batch": 32,
        "seq_len": 2048,
        "num_devices": 8,
        "global_batch": 256,
        "gradient_accumulation": 1,
        "total_steps": 21_400,
    }
    assert "the log's MFU is relative to a peak of 9.89e+14 FLOP/s" in log.remarks


def test_the_model_and_its_size_are_kept():
    text = (
        'Model config:\n{\n  "sequence_len": 2048,\n  "vocab_size": 65536,\n  "n_layer": 20,\n'
        '  "n_head": 10,\n  "n_kv_head": 10,\n  "n_embd": 1280\n}\n'
        f"Parameter counts:\n{'total':24s}: 560,988,160\n"
        "✓ FP8 training enabled (tensorwise scaling)\n"
    )
    facts = check(NANOCHAT_HEAD.decode() + text + line(0)).facts
    assert facts["num_parameters"] == 560_988_160 and facts["num_layers"] == 20
    assert facts["hidden_size"] == 1280 and facts["dtype"] == "fp8"


def test_its_last_words_are_kept():
    log = check(line(1) + "Peak memory usage: 75422.02MiB\nTotal training time: 77.00m\n")
    assert log.memory_bytes["allocated"] == pytest.approx(75422.02 * MIB)
    assert log.end_line == "Total training time: 77.00m"


def test_a_log_without_its_head_has_the_printed_rate(tmp_path):
    document = parsed(tmp_path / "a.log", "".join(line(n) for n in range(40)))
    assert document["tokens_per_s"] == pytest.approx(1_091_993, rel=1e-4)
