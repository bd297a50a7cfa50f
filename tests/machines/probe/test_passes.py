"""Attention of a recipe's shape and the start of an operation, as the verbs print them."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.core.errors import UserError
from paceline.machines.probe.rates import attention_shapes


def test_attention_of_a_recipe_is_told_with_its_rate():
    arguments = ["attention", "--device", "cpu", "--seconds", "0.1", "--json"]
    document = json.loads(CliRunner().invoke(app, ["probe", *arguments]).stdout)
    single, batched = document["rows"]
    assert document["probe"] == "attention" and single["shape"] == [1, 256, 8, 4, 32]
    assert batched["shape"][0] == 8 and batched["n"] >= 3
    forward = 0.5 * 4 * 256**2 * 8 * 32
    assert single["flops_per_s"] == pytest.approx(
        3.5 * forward / (single["forward_s"] + single["backward_s"])
    )
    assert document["best"]["flops_per_s"] == max(single["flops_per_s"], batched["flops_per_s"])


def test_the_start_of_an_operation_takes_a_time():
    document = json.loads(
        CliRunner()
        .invoke(app, ["probe", "latency", "--device", "cpu", "--seconds", "0.1", "--json"])
        .stdout
    )
    assert document["probe"] == "latency" and document["best"]["latency_s"] > 0
    assert document["best"]["n"] >= 10


def test_only_decoders_have_causal_attention():
    with pytest.raises(UserError, match="has no causal attention"):
        attention_shapes("flux1-schnell-tiny")
    assert CliRunner().invoke(app, ["probe", "attention", "--dtype", "fp8"]).exit_code != 0
