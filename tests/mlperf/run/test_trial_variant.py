"""Machines that the default trial does not fit: the recipe has another layout."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import UserError
from paceline.files.recipe import load_recipe
from paceline.machines.placement import HostPlacement, Request
from paceline.machines.probe.inventory import inventory
from paceline.mlperf.rules import BENCHMARKS, TRIAL_VARIANT
from paceline.mlperf.run.request import trial_variant
from paceline.runs import plan as run_plan

PUBLISHED = {
    "llama31_8b": ("gb300_n18_ngc25.04_nemo", "8e-4"),
    "llama2_70b_lora": ("gb300_n18_ngc25.04_nemo", "5e-4"),
    "flux1": ("theia_ngpu72_ngc25.09_nemo", "1.85e-4"),
}
"""Results of 72 GB300 in round 5.1, by benchmark: system and learning rate."""


@pytest.fixture(autouse=True)
def one_look_at_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = inventory()
    monkeypatch.setattr(run_plan, "inventory", lambda: machine)


def request(recipe: str, cluster: str, nodes: int | None = None, *overrides: str) -> Request:
    where = HostPlacement(nodes=nodes)
    return Request(recipe, cluster=cluster, where=where, overrides=overrides)


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        ("llama31-8b", {"dp": 36, "cp": 2, "batch": 36}),
        ("llama2-70b-lora", {"dp": 9, "cp": 8, "batch": 9}),
        ("flux1-schnell", {"dp": 72, "cp": 1, "batch": 2304}),
    ],
)
def test_a_rack_of_72_takes_the_published_layout_and_says_so(recipe: str, layout: dict[str, int]):
    chosen = trial_variant(request(recipe, "lambda-gb300-nvl72"))
    spec = chosen.plan.spec
    assert chosen.name == "mlperf-trial-72" and spec.world_size == 72
    assert {"dp": spec.dp, "cp": spec.layout.cp, "batch": spec.training.global_batch} == layout
    assert (spec.layout.tp, spec.layout.pp) == (1, 1)
    assert chosen.notice and "not a multiple of dp 72" in chosen.notice


@pytest.mark.parametrize("benchmark", PUBLISHED)
def test_the_variant_has_the_settings_of_the_published_result(reference_data: Path, benchmark: str):
    system, printed_lr = PUBLISHED[benchmark]
    with (reference_data / "mlperf" / "results.csv").open(newline="") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    (row,) = [r for r in rows if (r["system"], r["benchmark"]) == (system, benchmark)]
    training = load_recipe(BENCHMARKS[benchmark].recipe, "mlperf-trial-72").training
    assert int(row["gpus"]) == 72 and training.global_batch == int(row["global_batch_size"])
    assert training.lr == float(row["base_lr"]) == float(printed_lr)
    assert training.lr_schedule.warmup == int(float(row["warmup_steps"] or 0))


def test_one_node_of_eight_h100_runs_the_8b_in_a_layout_that_fits():
    chosen = trial_variant(request("llama31-8b", "dgx-h100", 1))
    layout = chosen.plan.spec.layout
    assert (chosen.name, layout.cp, layout.zero_stage) == ("mlperf-trial-80gb", 2, 2)
    assert chosen.notice and "needs at least 114.34 GiB" in chosen.notice
    assert chosen.plan.spec.training.global_batch == 32


def test_where_the_plain_trial_runs_it_is_taken_without_a_word():
    chosen = trial_variant(request("llama31-8b", "lambda-1cc-b200"))
    assert (chosen.name, chosen.notice) == (TRIAL_VARIANT, None)


def test_a_layout_of_the_users_own_is_never_exchanged():
    with pytest.raises(UserError, match="not a multiple of dp 72"):
        trial_variant(request("llama31-8b", "lambda-gb300-nvl72", None, "layout.zero_stage=2"))


def test_where_none_runs_the_refusal_says_what_was_tried_and_why_that_cannot():
    message = (
        r"not a multiple of dp 56 .* these variants do not fit either: "
        r"mlperf-trial-72 \(global_batch 36 is not .*\), "
        r"mlperf-trial-80gb \(global_batch 32 is not a multiple of dp 28 .*\); change the layout"
    )
    with pytest.raises(UserError, match=message):
        trial_variant(request("llama31-8b", "dgx-h100", 7))


def test_a_missing_config_is_the_whole_answer(tmp_path: Path):
    settings = {"config": tmp_path / "config_x.sh", "container": "x.sqsh", "data": "/data"}
    overrides = [f"engine_settings.{name}={value}" for name, value in settings.items()]
    with pytest.raises(UserError, match=r"^engine_settings.config: \S+config_x.sh is not a file;"):
        trial_variant(
            request("llama31-8b", "lambda-gb300-nvl72", None, "engine=mlperf", *overrides)
        )


def test_what_no_variant_could_mend_is_told_without_them():
    with pytest.raises(UserError, match="cluster 'nowhere': is not in the catalog") as refused:
        trial_variant(request("llama31-8b", "nowhere"))
    assert "nor can" not in str(refused.value)
