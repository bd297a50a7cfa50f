"""Every layout gives the single process's losses, gradients and weights."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.native.example import command
from tests.numerics.cases import FAULTS, Case, all_cases, reference

DRIVER = Path(__file__).with_name("driver.py")
LIMIT_S = 240
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5, "bf16": 2e-2}
"""Largest relative L2 difference of one parameter (bf16: gradients carry 8 bits)."""
CASES = all_cases()
SOUND = [case for case in CASES if not case.fault and case != reference(case)]

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What every case came to, from one start of the trainer's code per world size."""
    folder = tmp_path_factory.mktemp("numerics")
    for ranks in sorted({case.ranks for case in CASES}):
        rows = [
            {"name": case.name, "fault": case.fault, "settings": case.settings()}
            for case in CASES
            if case.ranks == ranks
        ]
        path = folder / f"cases-{ranks}.json"
        path.write_text(json.dumps(rows))
        done = subprocess.run(
            command(ranks, str(DRIVER), str(path), str(folder)),
            capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
    return {case.name: torch.load(folder / f"{case.name}.pt") for case in CASES}


def difference(found: Tensor, wanted: Tensor, floor: float) -> float:
    """Relative L2 distance; a parameter smaller than `floor` is held against that."""
    distance = torch.linalg.vector_norm((found - wanted).double()).item()
    return distance / max(torch.linalg.vector_norm(wanted.double()).item(), floor)


def largest_difference(found: dict[str, Any], wanted: dict[str, Any]) -> tuple[float, str]:
    """The largest difference over losses, norms, and every parameter's gradient and weight."""
    # A key's bias has a gradient that is nothing but rounding: floors keep it from being compared.
    floors = {"gradients": 1e-4 * wanted["figures"][0, 1].item(), "weights": 1e-3}
    rows = [(difference(found["figures"], wanted["figures"], 0.0), "losses and norms")]
    for kind, floor in floors.items():
        assert found[kind].keys() == wanted[kind].keys()
        rows += [
            (difference(found[kind][name], wanted[kind][name], floor), f"{kind} of {name}")
            for name in wanted[kind]
        ]
    return max(rows)


@pytest.mark.parametrize("case", SOUND, ids=lambda case: case.name)
def test_a_layout_changes_nothing_but_the_work(case: Case, results: Results) -> None:
    worst, where = largest_difference(results[case.name], results[reference(case).name])

    assert worst < TOLERANCE[case.dtype], where


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_one_rank_is_noticed(fault: str, results: Results) -> None:
    (case,) = [case for case in CASES if case.fault == fault]

    worst, where = largest_difference(results[case.name], results[reference(case).name])

    assert worst > 10 * TOLERANCE["fp32"], where


def test_training_moves_every_weight(results: Results) -> None:
    """Equal results prove nothing when nothing was trained."""
    case = Case("llama", "fp64", ranks=1)
    trained = results[case.name]

    assert trained["figures"][-1, 0] < trained["figures"][0, 0]
    for name, gradient in trained["gradients"].items():
        assert torch.linalg.vector_norm(gradient) > 1e-4, name
