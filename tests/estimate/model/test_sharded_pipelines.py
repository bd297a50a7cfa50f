"""ZeRO under a pipeline, gathers of early stacks, and clusters of thousands of devices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.fit.published import read_row
from paceline.estimate.model.case import cases_of
from paceline.estimate.model.coefficients import coefficient_values
from paceline.estimate.model.step import StepTime, step_time

GPT = {
    "source": "a", "model": "GPT 175B", "layers": "96", "hidden": "12288", "heads": "96",
    "seq_len": "2048", "gpu": "A100-SXM-80GB", "num_gpus": "1024", "gbs": "768", "mbs": "1",
    "tp": "8", "pp": "8", "vp": "6", "dtype": "bf16", "attention_impl": "flash", "zero": "2",
    "seq_parallel": "1", "recompute": "none", "step_time_s": "1000",
}  # fmt: skip
LLAMA = {
    **GPT, "model": "Llama 3 405B", "layers": "126", "hidden": "16384", "ffn": "53248",
    "heads": "128", "kv_heads": "8", "vocab": "128256", "seq_len": "8192",
    "gpu": "H100-SXM-80GB", "gbs": "2048", "pp": "16", "vp": "",
}  # fmt: skip


def _step(*rows: dict[str, str]) -> StepTime:
    cases = [read_row(row).case for row in rows]
    return step_time(cases_of(cases), coefficient_values(shipped_evidence().fit().centre))


@pytest.mark.parametrize("stage", ["2", "3"])
def test_a_pipeline_gathers_and_scatters_once_a_step(stage: str):
    time = _step({**GPT, "zero": stage}, {**GPT, "zero": "1"})
    assert time.total[0] == pytest.approx(time.total[1])
    assert time.zero[0] == 0 and 0 < time.dp[0] < 0.15 * time.total[0]


def test_pipelines_of_pytorch_go_on_exchanging_in_every_block():
    case = replace(read_row({**GPT, "zero": "3"}).case, implementation="torch")
    assert (
        step_time(cases_of([case]), coefficient_values(shipped_evidence().fit().centre)).zero[0] > 0
    )


@pytest.mark.parametrize("devices", ["8192", "16384"])
def test_a_405b_step_on_thousands_of_devices_is_near_40_percent_of_the_peak(devices: str):
    seconds = _step({**LLAMA, "num_gpus": devices}).total[0]
    flops = 6 * 405.8e9 * 2048 * 8192
    assert 0.34 < flops / (seconds * int(devices) * 989e12) < 0.50


def test_gathers_dominate_zero_3_of_early_stacks_on_slow_networks():
    early = {
        **GPT, "num_gpus": "64", "gpus_per_node": "4", "gpu": "V100-SXM2-32GB", "gbs": "64",
        "tp": "1", "pp": "1", "vp": "", "zero": "3", "inter_node_net": "100 Gb/s Ethernet",
        "layers": "24", "hidden": "8192", "dtype": "fp16", "attention_impl": "fused-softmax",
    }  # fmt: skip
    time = _step(early, {**early, "attention_impl": "flash"})
    assert time.zero[0] > 0.5 * time.total[0]
    assert np.all(time.zero > 0)
