"""What is counted at the process groups is what the formulas say, byte by byte."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from paceline.core.traffic import AxisTraffic, step_traffic
from paceline.engines import native
from paceline.trainer.measure.clock import HostClock, StepClock
from paceline.trainer.measure.traffic import watch_traffic
from paceline.trainer.parallel.mesh import Mesh, World
from tests.core.test_traffic import GPT, RANKS, place, spec_of
from tests.trainer.example import log, train

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dp": ({}, {}),
    "tp": ({"tp": 2, "recompute": "full"}, {}),
    "sp": ({"tp": 2, "sequence_parallel": True}, GPT),
    "pp": ({"pp": 2, "vp": 2}, {"num_layers": 4, "tied_embeddings": True}),
    "cp": ({"cp": 2}, {}),
    "cp ring": ({"cp": 2, "cp_exchange": "ring", "recompute": "selective"}, {}),
    "zero 1": ({"zero_stage": 1}, {}),
    "zero 2": ({"zero_stage": 2}, {}),
    "zero 3": ({"zero_stage": 3}, {}),
}


def total(terms: list[AxisTraffic]) -> Counter[tuple[str, str]]:
    sums: Counter[tuple[str, str]] = Counter()
    for term in terms:
        sums[term.axis, term.collective] += term.num_bytes
    return sums


@pytest.mark.parametrize("name", CASES)
def test_every_byte_that_the_trainer_exchanges_is_predicted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_TRAFFIC", "traffic")
    spec = spec_of(*CASES[name])
    assert train(tmp_path, {**native.settings(spec), "threads": 1}) == 0, log(tmp_path)

    for rank in range(RANKS):
        lines = (tmp_path / f"traffic/rank-{rank:05d}.jsonl").read_text().splitlines()
        start, *steps = map(json.loads, lines)
        counted: Counter[tuple[str, str]] = Counter()
        for message in steps[-1]["messages"]:
            # Without data parallelism the ranks that share keys share gradients as well.
            axis = message["axis"]
            if axis == "cp+dp":
                axis = "dp" if message["collective"] == "all_reduce" else "cp"
            counted[axis, message["collective"]] += message["bytes"] * message["calls"]
        stage = rank if spec.layout.pp > 1 else 0

        assert start["rank"] == rank and [step["step"] for step in steps] == [1, 2]
        assert counted == total(step_traffic(place(spec, stage)))


def test_nothing_is_wrapped_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torch import distributed as dist

    monkeypatch.delenv("PACELINE_TRAFFIC", raising=False)
    method = dist.ProcessGroup.allreduce
    world = World(0, 0, 2, torch.device("cpu"), "gloo")

    assert watch_traffic(StepClock(HostClock()), world, Mesh()) is None
    assert dist.ProcessGroup.allreduce is method
