"""What is counted at the process groups is what the formulas say, byte by byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.engines import native
from paceline.profiles.nccl.traffic_comparison import compare_traffic, traffic_warnings
from paceline.profiles.nccl_logs import read_counters
from paceline.trainer.measure.clock import HostClock, StepClock
from paceline.trainer.measure.traffic import watch_traffic
from paceline.trainer.parallel.mesh import Mesh, World
from tests.core.test_traffic import GPT, RANKS, STEPS, spec_of
from tests.trainer.example import log, train

MOE = {"num_experts": 4, "experts_per_token": 2}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp": ({"tp": 2, "recompute": "full"}, {}),
    "sp budget": (
        {"tp": 2, "sequence_parallel": True, "recompute": "budget", "recompute_budget": 0.2},
        {},
    ),
    "cp budget": ({"cp": 2, "recompute": "budget", "recompute_budget": 0.2}, {}),
    "sp": ({"tp": 2, "sequence_parallel": True}, GPT),
    "pp": ({"pp": 2, "vp": 2}, {"num_layers": 4, "tied_embeddings": True}),
    "cp": ({"cp": 2}, {}),
    "cp ring": ({"cp": 2, "cp_exchange": "ring", "recompute": "selective"}, {}),
    "zero 1": ({"zero_stage": 1}, {}),
    "zero 2": ({"zero_stage": 2}, {}),
    "zero 3": ({"zero_stage": 3}, {}),
    "dp experts": ({}, MOE),
    "tp experts": ({"tp": 2}, MOE),
    "sp experts": ({"tp": 2, "sequence_parallel": True, "recompute": "full"}, MOE),
    "zero 3 experts": ({"zero_stage": 3}, MOE),
    "zero 3 once": ({"zero_stage": 3, "gradient_sync": "last"}, {}),
}


EXPERT_CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 0": (4, {"ep": 2}),
    "zero 1": (4, {"ep": 2, "zero_stage": 1, "recompute": "full"}),
    "zero 2": (4, {"ep": 2, "zero_stage": 2}),
    "zero 3": (4, {"ep": 2, "zero_stage": 3}),
    "all": (2, {"ep": 2, "zero_stage": 3, "recompute": "selective"}),
    "tp": (4, {"ep": 2, "tp": 2, "sequence_parallel": True}),
    "pp": (4, {"ep": 2, "pp": 2}),
    "cp": (2, {"ep": 2, "cp": 2}),
}


@pytest.mark.parametrize("name", EXPERT_CASES)
def test_every_byte_of_tokens_and_experts_is_predicted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank's messages depend on the router; their mean over ranks does not."""
    monkeypatch.setenv("PACELINE_TRAFFIC", "traffic")
    ranks, layout = EXPERT_CASES[name]
    spec = spec_of(layout, MOE, ranks)
    assert train(tmp_path, {**native.settings(spec), "threads": 1}) == 0, log(tmp_path)

    paths = [tmp_path / f"traffic/rank-{rank:05d}.jsonl" for rank in range(ranks)]
    table, seen = read_counters(paths, first_step=STEPS, last_step=STEPS)
    rows, reason = compare_traffic(table, spec, seen)

    assert reason is None
    copies = spec.parallel.data_ranks // spec.layout.ep
    axes = {"ep", "expert_data"} if copies > 1 else {"ep"}
    assert {row.axis for row in rows} - {"dp", "cp+dp", "tp", "pp"} == axes
    assert [row.ratio for row in rows] == [1.0] * len(rows), rows


@pytest.mark.parametrize("name", CASES)
def test_every_byte_that_the_trainer_exchanges_is_predicted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_TRAFFIC", "traffic")
    spec = spec_of(*CASES[name])
    assert train(tmp_path, {**native.settings(spec), "threads": 1}) == 0, log(tmp_path)

    paths = [tmp_path / f"traffic/rank-{rank:05d}.jsonl" for rank in range(RANKS)]
    table, ranks = read_counters(paths, first_step=STEPS, last_step=STEPS)
    rows, reason = compare_traffic(table, spec, ranks)

    assert reason is None and ranks == {0, 1} and table.steps == 1
    # Without data parallelism the ranks that share keys share gradients as well.
    axes = {"cp+dp"} if spec.layout.cp > 1 else {name.split()[0].replace("zero", "dp")}
    assert {row.axis for row in rows} == {axis.replace("sp", "tp") for axis in axes}
    assert [row.ratio for row in rows] == [1.0] * len(rows), rows
    assert list(traffic_warnings(rows)) == []


def test_nothing_is_wrapped_unless_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from torch import distributed as dist

    monkeypatch.delenv("PACELINE_TRAFFIC", raising=False)
    usual = dict(vars(dist.ProcessGroup))
    steps, world = StepClock(HostClock()), World(0, 0, 2, torch.device("cpu"), "gloo")

    assert watch_traffic(steps, world, Mesh()) is None
    assert dict(vars(dist.ProcessGroup)) == usual

    monkeypatch.setenv("PACELINE_TRAFFIC", str(tmp_path))
    undo = watch_traffic(steps, world, Mesh())
    assert undo is not None and vars(dist.ProcessGroup)["allreduce"] is not usual["allreduce"]
    undo()
    assert dict(vars(dist.ProcessGroup)) == usual
