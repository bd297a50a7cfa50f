"""`paceline table convert` on the command line."""

from __future__ import annotations

import json
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli.convert import convert
from tests.cli.test_errors import paceline

app = typer.Typer()
app.command("convert")(convert)
LLAMA = ["--model", "llama31-70b"]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def document(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0
    return json.loads(result.stdout)


def test_json_holds_unrounded_fractions_of_both_sides():
    content = document("54.1%", "--from", "full-attention", *LLAMA)
    assert content["published"]["mfu"] == 0.541
    assert content["converted"]["mfu"] == pytest.approx(0.541 * content["ratio"])
    assert (
        content["converted"]["flops_per_s_per_device"] is None
        and "same, unknown peak" in content["notes"][0]
    )


def test_nominal_parameters_and_recomputation_enter():
    arguments = [
        "47.0TFLOP/s",
        "--from",
        "six-n+recompute",
        "--to",
        "narayanan+recompute",
        "--model",
        "gpt-1b3",
        "--recompute",
        "full",
        "--nominal-parameters",
        "1.3e9",
    ]
    assert document(*arguments)["converted"]["flops_per_s_per_device"] == pytest.approx(
        53.75e12, rel=1e-3
    )


@pytest.mark.parametrize(
    ("figure", "to", "result"),
    [("29s", "six-n+recompute", "47.005"), ("29s", "six-n", "35.254"), ("23s", "six-n", "44.451")],
)
def test_the_rows_of_a_study_come_out_under_a_name_each(figure: str, to: str, result: str):
    """Of BigScience's 1.3B study, whose recipe recomputes: with, as model FLOP/s, and without."""
    shown = run(figure, "--to", to, "--model", "gpt-1b3", "--global-batch", "512", "--gpus", "8")
    assert shown.stdout.startswith(f"{figure} per step -> {result} TFLOP/s ({to})")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["54.1", "--from", "causal", *LLAMA], "54.1: has no unit"),
        (["200%", "--from", "causal", *LLAMA], "the peak"),
        (["54.1%", *LLAMA], "--from: is required"),
        (["54.1%", "--from", "casual", *LLAMA], "did you mean 'causal'"),
        (["54.1%", "--from", "causal", "--model", "lama"], "recipe 'lama': is unknown"),
        (["14.72s", *LLAMA], "add --global-batch and --gpus"),
        (
            ["14.72s", "--from", "causal", *LLAMA, "--global-batch", "8", "--gpus", "8"],
            "leave it out",
        ),
        (["54.1%", "--from", "causal", *LLAMA, "--recompute", "half"], "none, selective, full"),
        (
            ["54.1%", "--from", "causal", *LLAMA, "--device", "H100", "--peak", "1979e12"],
            "sparse peak",
        ),
        (["54.1%", "--from", "causal", *LLAMA, "--dtype", "int4"], "is not in the catalog"),
        (["54.1%", "--from", "six-n", "--model", "opt-13b-sft"], "LoRA's frozen weights"),
    ],
)
def test_what_cannot_be_converted_is_refused_with_the_reason(arguments: list[str], complaint: str):
    done = paceline("table", "convert", *arguments)
    assert done.returncode == 1 and done.stdout == ""
    assert complaint in done.stderr and len(done.stderr.splitlines()) == 1
