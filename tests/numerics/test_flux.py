"""Flux in every layout that it allows: the single process's losses, norms, gradients and weights.

Its modulation and last layer begin with 0, which would leave most gradients 0 in the first step, so
all weights are drawn at random here.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.hardware import Cluster
from paceline.core.layout import Layout
from paceline.engines import native
from paceline.recipe import Recipe, load_recipe, resolve
from tests.native.example import command
from tests.numerics.compare import TOLERANCE, largest_difference

DRIVER = Path(__file__).with_name("flux_driver.py")
LIMIT_S = 300
BATCH, STEPS = 8, 3
SMALL = {
    "hidden_size": 48, "num_heads": 4, "rope_axes": (4, 4, 4), "latent_size": 8, "text_len": 8,
    "text_width": 20, "pooled_width": 12,
}  # fmt: skip

LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "plain": {"micro_batch": 8},
        "accumulated": {},
        "recomputed": {"recompute": "full"},
        "compiled": {"compile": "blocks"},
    },
    2: {
        **{f"zero{stage}": {"zero_stage": stage} for stage in range(4)},
        "zero3 recomputed": {"zero_stage": 3, "recompute": "full"},
        "tp": {"tp": 2},
        "tp recomputed": {"tp": 2, "recompute": "full"},
        "tp compiled": {"tp": 2, "compile": "blocks"},
        "cp": {"cp": 2},
        "cp compiled": {"cp": 2, "compile": "blocks"},
    },
    4: {
        "tp4": {"tp": 4},
        "tp cp": {"tp": 2, "cp": 2},
        "tp zero1": {"tp": 2, "zero_stage": 1},
        "tp zero2": {"tp": 2, "zero_stage": 2},
        "tp zero3 recomputed": {"tp": 2, "zero_stage": 3, "recompute": "full"},
        "cp zero3": {"cp": 2, "zero_stage": 3},
        "hybrid": {"zero_stage": 3, "dp_shard": 2},
    },
}
CASES = [(ranks, name) for ranks, rows in LAYOUTS.items() for name in rows]


def settings(ranks: int, compile: str = "none", **layout: Any) -> dict[str, Any]:
    """trainer.json of a small Flux in fp64."""
    raw = load_recipe("flux1-schnell-tiny").model_dump()
    raw["model"] |= SMALL
    raw["training"] |= {
        "seq_len": 24, "batch_per_device": None, "global_batch": BATCH, "steps": STEPS,
        "dtype": "fp32", "matmul_precision": "highest", "eps": 1e-3, "grad_clip": 0.5,
        "compile": compile,
    }  # fmt: skip
    raw["layout"] = Layout(**{"micro_batch": 2, **layout}).model_dump()
    cluster = Cluster(name="here", device="cpu", devices_per_node=ranks, threads_per_device=1)
    written = native.settings(resolve(Recipe.model_validate(raw), cluster, True, None))
    written["training"]["dtype"] = "fp64"
    return written


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], Any]:
    """What every layout came to; those of one world size follow each other in the same processes."""
    folder = tmp_path_factory.mktemp("flux")
    for ranks, rows in LAYOUTS.items():
        cases = [
            {"name": f"{ranks} {name}", "fault": "", "masked": False, "sgd": False,
             "compiler": "aot_eager", "settings": settings(ranks, **row)}
            for name, row in rows.items()
        ]  # fmt: skip
        path = folder / f"cases-{ranks}.json"
        path.write_text(json.dumps(cases))
        done = subprocess.run(
            command(ranks, str(DRIVER), str(path), str(folder)),
            capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
        errors = [file.read_text() for file in folder.glob("*.error")]
        assert not errors and done.returncode == 0, (errors[:1], done.stderr[-3000:])
    return {case: torch.load(folder / f"{case[0]} {case[1]}.pt") for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1]}")
def test_a_layout_changes_nothing_but_the_work(
    case: tuple[int, str], results: dict[tuple[int, str], Any]
) -> None:
    worst, where = largest_difference(results[case], results[1, "plain"])

    assert worst < TOLERANCE["fp64"], where


def test_every_parameter_is_trained(results: dict[tuple[int, str], Any]) -> None:
    """Equal results prove nothing when nothing was trained."""
    gradients = results[1, "plain"]["gradients"][0]

    assert min(gradient.norm().item() for gradient in gradients.values()) > 1e-6
