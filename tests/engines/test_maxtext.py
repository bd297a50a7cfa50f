"""MaxText's lines of several years, and its configuration."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.core.units import GIB
from paceline.logs.facts import UserSettings
from paceline.logs.parser import parse_log
from tests.engines.promises import reader_of

CONFIGURATION = """\
Config param dcn_tensor_parallelism: 1
Config param dtype: bfloat16
Config param emb_dim: 8192
Config param eval_per_device_batch_size: 9
Config param global_batch_size_to_load: 1792
I0317 09:59:16.239871 125344476638336 pyconfig.py:413] \
Config param global_batch_size_to_train_on: 896
Config param gradient_accumulation_steps: 1
Config param ici_expert_parallelism: 1
Config param ici_fsdp_parallelism: -1
Config param ici_pipeline_parallelism: 1
Config param ici_tensor_parallelism: 1
Config param max_target_length: 8192
Config param mlp_dim: 28672
Config param model_name: llama2-70b
Config param num_decoder_layers: 80
Config param num_experts: 1
Config param num_kv_heads: 8
Config param num_query_heads: 64
Config param per_device_batch_size: 7.0
Config param quantization:\x20
Config param steps: 150
Config param vocab_size: 32000
System Information: Jax Version: 0.4.35.dev20241202
System Information: Jax Backend: PJRT C API
TFRT TPU v5
Num_devices: 128, shape (2, 1, 64, 1, 1, 1, 1, 1, 1)
"""


def line(step: int, seconds: float = 5.668) -> str:
    return (
        f"completed step: {step}, seconds: {seconds:.3f}, TFLOP/s/device: 134.909, "
        "Tokens/s/device: 8671.794, total_weights: 196608, loss: 10.879\n"
    )


check = reader_of("maxtext")


def test_the_current_line():
    log = check("".join(line(step) for step in range(4)))
    steps = log.steps()
    assert steps.index.tolist() == [0, 1, 2, 3]
    assert steps["step_time_s"].tolist() == [5.668] * 4
    assert steps["flops_per_s_per_device"] == pytest.approx([134.909e12] * 4)
    assert steps["tokens_per_s_per_device"] == pytest.approx([8671.794] * 4)
    assert steps["tokens"].tolist() == [196_608.0] * 4
    assert steps["loss"] == pytest.approx([10.879] * 4)
    assert log.resolution_s == pytest.approx(0.001)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "completed step: 15107, seconds: 2.167, TFLOP/s: 36.722, loss: 2.191",
            {"flops_per_s_per_device": 36.722e12},
        ),
        (
            "completed step: 15107, seconds: 2.167, TFLOP/s/device: 36.722, loss: 2.191",
            {"flops_per_s_per_device": 36.722e12},
        ),
        (
            "completed step: 15107, seconds: 2.167, TFLOP/s/device: 36.722, "
            "Tokens/s/device: 6529.527, loss: 2.191",
            {"tokens_per_s_per_device": 6529.527},
        ),
        (
            "completed step: 15107, seconds: 2.167, TFLOP/s/device: 36.722, "
            "Tokens/s/device: 6529.5, total_weights: 65536, loss: 2.191, lm_loss: 2.190, "
            "perplexity: 8.945",
            {"tokens": 65_536},
        ),
        ("completed step: 15107, seconds: 2.167, relative_loss: 0.1, loss: 2.191", {}),
        (
            "[Rampup Batch Size Phase], completed step: 15107, seconds: 2.167, "
            "total_weights: 65536, loss: 2.191",
            {"tokens": 65_536},
        ),
        (
            "completed step: 15107, seconds: 2.167, TFLOP/s/device: 36.7, Tokens/s/device: 6529.5, "
            "total_weights: 65536, loss: 2.191, lr: 3.000e-04, grad_norm: 1.2e+01",
            {},
        ),
    ],
)
def test_every_form_of_the_line(text: str, expected: dict[str, float]):
    steps = check(text + "\n").steps()
    assert steps.index.tolist() == [15_107]
    assert steps["step_time_s"].tolist() == [2.167]
    assert steps["loss"] == pytest.approx([2.191])
    for name, value in expected.items():
        assert steps[name] == pytest.approx([value])


def test_profiling_and_evaluation_lines_are_no_steps():
    text = (
        "completed profiler activation/deactivation step: 5, total_weights: 9, loss: 2.0\n"
        "Completed eval step: 3, seconds: 0.100, running loss=2.0\n"
        "eval metrics after step: 9, loss=9.855, total_weights=75264.0\n"
    )
    assert check(text + line(6)).steps().index.tolist() == [6]


@pytest.mark.parametrize(
    ("settings", "counted", "share"),
    [("Config param use_sft: True\n", 196_608, "(50.0% of"), ("", 145_000, "(36.9% of")],
)
def test_masked_targets_are_not_the_positions(
    tmp_path: Path, settings: str, counted: int, share: str
):
    configuration = (
        "Config param global_batch_size_to_train_on: 48\nConfig param max_target_length: 8192\n"
        f"{settings}Num_devices: 8, shape (8,)\n"
    )
    path = tmp_path / "masked.log"
    steps = "".join(line(n).replace("196608", str(counted)) for n in range(20))
    path.write_text(configuration + steps)
    # 48 x 8192 positions = 8 x 8671.794 tokens/s x 5.668 s
    document = parse_log(path, UserSettings(total_tokens=1e9)).document

    figures = {name: metric.value for name, metric in document.metrics.items()}
    assert figures["tokens_per_s"] == pytest.approx(counted / 5.668)
    assert figures["padded_tokens_per_s"] == pytest.approx(48 * 8192 / 5.668)
    assert figures["samples_per_s"] == pytest.approx(48 / 5.668)
    assert figures["days_to_train"] == pytest.approx(1e9 / (48 * 8192 / 5.668) / 86_400)
    assert [w for w in document.warnings if share in w]


def test_padding_alone_is_no_mask(tmp_path: Path):
    log = check("Num_devices: 8, shape (8,)\n" + line(0).replace("196608", "380000"))
    assert "loss_on" not in log.facts and not log.remarks


def test_the_configuration_is_kept():
    first = line(0).replace("196608", "6291456")
    log = check(CONFIGURATION + "number parameters: 68.977 billion\n" + first)
    assert log.facts == {
        "global_batch": 896,
        "gradient_accumulation": 1,
        "seq_len": 8192,
        "total_steps": 150,
        "num_layers": 80,
        "hidden_size": 8192,
        "ffn_size": 28672,
        "num_heads": 64,
        "num_kv_heads": 8,
        "vocab_size": 32_000,
        "num_devices": 128,
        "tp": 1,
        "pp": 1,
        "ep": 1,
        "micro_batch": 7,
        "dtype": "bfloat16",
        "model": "llama2-70b",
        "device": "TPU v5",
        "framework_version": "JAX 0.4.35.dev20241202",
        "num_parameters": 68_977_000_000,
    }


def test_an_axis_that_is_left_to_maxtext_is_not_known():
    log = check(CONFIGURATION.replace("ici_tensor_parallelism: 1", "ici_tensor_parallelism: -1"))
    assert "tp" not in log.facts


def test_a_batch_of_a_part_of_a_device_is_no_micro_batch():
    log = check(CONFIGURATION.replace("batch_size: 7.0", "batch_size: 0.5") + line(0))
    assert "micro_batch" not in log.facts


def test_axes_multiply_inside_and_across_slices():
    text = CONFIGURATION.replace("dcn_tensor_parallelism: 1", "dcn_tensor_parallelism: 2")
    log = check(text.replace("ici_tensor_parallelism: 1", "ici_tensor_parallelism: 4"))
    assert log.facts["tp"] == 8
    assert "micro_batch" not in log.facts, "a device has a part of a replica's batch"


def test_the_width_of_an_expert_is_not_that_of_the_layer():
    log = check(CONFIGURATION.replace("num_experts: 1", "num_experts: 8"))
    assert "ffn_size" not in log.facts


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [("fp8", "fp8"), ("te_mxfp8", "mxfp8"), ("nanoo_fp8", "fp8"), ("int8", None)],
)
def test_quantization_is_the_number_format(quantization: str, dtype: str | None):
    log = check(CONFIGURATION.replace("quantization: ", f"quantization: {quantization}"))
    assert log.facts.get("dtype") == dtype


def test_planned_memory_goes_before_memory_in_use():
    in_use = "Memstats: After params initialized:\n" + "".join(
        f"\tUsing (GB) {gib} / 95.74 (46.615835%) on TPU_{rank}(process=0,(0,0,0,0))\n"
        for rank, gib in enumerate((44.63, 44.75))
    )
    log = check(in_use + line(0))
    assert log.memory_bytes == {"allocated": pytest.approx(44.75 * GIB)}
    assert "the log prints no peak" in log.remarks[0]
    planned = "Total memory size: 100.4 GB, Output size: 44.5 GB, Temp size: 55.9 GB\n"
    log = check(planned + in_use + line(0))
    assert log.memory_bytes == {"allocated": pytest.approx(100.4 * GIB)}
    assert "not a measurement" in log.remarks[0]


def test_a_number_at_the_very_end_is_not_used():
    log = check((line(0) + line(1))[:-3])
    assert log.incomplete_reason is None
    assert np.isnan(log.steps()["loss"]).tolist() == [False, True]
