"""Memory by part: exact sums of what ranks hold, and the peak that torch's tracker saw."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.core.layout import Layout
from paceline.core.recompute import block_levels
from paceline.core.shape import num_parameters
from paceline.trainer.measure.memory import (
    Gradients,
    MemoryWatch,
    ResidentSampler,
    state_bytes,
    tables,
    tensor_bytes,
)
from paceline.trainer.replica.weight_slices import SLICE_ALIGNMENT
from tests.example import SHAPE
from tests.trainer.example import lines, log, run_ranks, settings, steps, train, train_alone
from tests.waiting import wait_until

DRIVER = Path(__file__).parents[1] / "memory_driver.py"
LIMIT_S = 240
PARTS = ("weights", "gradients", "optimizer", "buffers", "gathered", "activations", "other")
FP32, ADAM, COUNTER = 4, 8, 4
"""Bytes of a weight, of its two moments, and of a tensor's step counter."""
P = num_parameters(SHAPE)
LARGEST_TENSOR = max(SHAPE.vocab_size, SHAPE.ffn_size) * SHAPE.hidden_size * FP32
ROPE = 2 * 32 * SHAPE.hidden_size // SHAPE.num_heads * FP32
"""cos and sin for 32 positions."""

CPU = torch.device("cpu")
BUDGETS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.95, 1.0)
DEEP = SHAPE.model_copy(update={"num_layers": 6})

Told = dict[str, dict[str, Any]]


def drive(folder: Path, ranks: int, cases: dict[str, dict[str, Any]]) -> list[Told]:
    """Each rank's records of every case, all in one start."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    words = ("cases.json", str(folder))
    code, output = run_ranks(ranks, DRIVER, *words, folder=folder, limit_s=LIMIT_S)
    assert code == 0, output[-3000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def case(ranks: int, **changes: Any) -> dict[str, Any]:
    return settings(ranks, 3, source="synthetic", **changes)


def by_budget(share: float, **changes: Any) -> dict[str, Any]:
    """A case that recomputes by a budget, told what each block does as the engine tells it."""
    raw = case(1, recompute="budget", recompute_budget=share, **changes)
    layout = Layout(recompute="budget", recompute_budget=share)
    raw["recompute_levels"] = block_levels(DEEP, layout)
    return raw


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """One process: plain, with full recomputation, with two micro-batches."""
    deep: dict[str, Any] = {"num_layers": 6}
    cases = {
        "plain": case(1),
        "deep": case(1, **deep),
        "recomputed": case(1, recompute="full", **deep),
        "accumulated": case(1, micro_batch=2),
        **{f"budget {share}": by_budget(share, **deep) for share in BUDGETS},
    }
    return drive(tmp_path_factory.mktemp("alone"), 1, cases)[0]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    """Two ranks: every ZeRO stage, two micro-batches under DDP, the schedule with split passes."""
    stages = {f"zero{stage}": case(2, zero_stage=stage) for stage in range(4)}
    more = {
        "accumulated": case(2, micro_batch=2),
        "zero3-recomputed": case(2, zero_stage=3, recompute="full"),
    }
    return drive(tmp_path_factory.mktemp("pair"), 2, {**stages, **more})


def faults(record: dict[str, Any], wanted: dict[str, int]) -> list[str]:
    """What is wrong with a record whose states must have the bytes `wanted`."""
    parts, peak, total = record["parts_bytes"], record["at_peak_bytes"], record["peak_bytes"]
    found = [f"{p}: {parts[p]} is not {size}" for p, size in wanted.items() if parts[p] != size]
    if sum(peak.values()) != total["tracked"]:
        found.append("the parts at the peak do not add up to it")
    found += [f"{part} is negative" for part, size in peak.items() if size < 0]
    for part in ("weights", "optimizer", "buffers"):
        if peak[part] != parts[part]:
            found.append(f"{part} changed within the step")
    # The peak is between the live bytes and all parts with two copies of the gradients.
    most = sum(parts[part] for part in PARTS) + parts["gradients"] + LARGEST_TENSOR
    if not parts["weights"] + parts["optimizer"] <= total["tracked"] <= most:
        found.append("the peak is not a sum of these parts")
    return found


def whole(told: dict[str, Any]) -> dict[str, int]:
    """The bytes of an unsharded fp32 training with Adam."""
    return {
        "weights": FP32 * P,
        "gradients": FP32 * P,
        "buffers": ROPE,
        "optimizer": ADAM * P + COUNTER * told["tensors"],
    }


def test_one_process_holds_four_bytes_a_weight_four_a_gradient_and_eight_of_adam(alone: Told):
    for name in ("plain", "accumulated"):
        assert faults(alone[name]["record"], whole(alone[name])) == []
        assert alone[name]["record"]["parts_bytes"]["gathered"] == 0


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_is_miscounted_is_found(alone: Told, part: str):
    told = alone["accumulated"]
    wrong = json.loads(json.dumps(told["record"]))
    wrong["parts_bytes"][part] = 2 * wrong["parts_bytes"][part] + 1
    wrong["at_peak_bytes"][part] = 2 * wrong["at_peak_bytes"][part] + 1

    assert faults(wrong, whole(told))


def test_the_second_step_is_the_one_that_is_watched_and_nothing_changes_by_it(alone: Told):
    assert all(told["watched"] == [2] for told in alone.values())
    assert alone["plain"]["losses"] == pytest.approx(alone["accumulated"]["losses"], rel=1e-5)


def test_full_recomputation_lowers_the_activations(alone: Told):
    kept = alone["deep"]["record"]["parts_bytes"]["activations"]
    again = alone["recomputed"]["record"]["parts_bytes"]["activations"]

    assert again < kept / 2


def test_a_larger_budget_needs_more_memory_between_full_recomputation_and_none(alone: Told):
    kinds = ["recomputed", *(f"budget {share}" for share in BUDGETS), "deep"]
    peaks = [alone[kind]["record"]["peak_bytes"]["tracked"] for kind in kinds]
    kept = [alone[kind]["record"]["parts_bytes"]["activations"] for kind in kinds]

    assert peaks == sorted(peaks) and kept == sorted(kept)
    assert (peaks[1], peaks[-2]) == (peaks[0], peaks[-1])
    # Each budget between 0 and 1 is a step of its own.
    assert len(set(peaks[1:-1])) == len(BUDGETS)
    for kind in kinds:
        assert alone[kind]["losses"] == pytest.approx(alone["deep"]["losses"], rel=1e-6), kind


def test_smaller_micro_batches_lower_the_activations_and_meet_the_whole_gradient(alone: Told):
    plain, half = (alone[n]["record"]["at_peak_bytes"] for n in ("plain", "accumulated"))

    assert half["activations"] < 0.7 * plain["activations"]
    assert half["gradients"] == FP32 * P


def test_each_zero_stage_shards_what_it_should(pair: list[Told]):
    sharded = {0: (), 1: ("optimizer",), 2: ("weights", "gradients", "optimizer")}
    sharded[3] = sharded[2]
    for stage, names in sharded.items():
        both = [rank[f"zero{stage}"] for rank in pair]
        for part, size in whole(both[0]).items():
            told = [rank["record"]["parts_bytes"][part] for rank in both]
            if part not in names:
                assert told == [size, size], (stage, part)
            elif part == "optimizer":  # a sharded tensor has its step counter on both ranks
                tensors = both[0]["tensors"]
                counters = (tensors, tensors + 1) if stage == 1 else (2 * tensors,)
                assert (sum(told) - ADAM * P) / COUNTER in counters, stage
                assert max(told) < (0.52 if stage == 1 else 0.7) * size
            else:
                assert sum(told) == size and max(told) < 0.6 * size, (stage, part)


def test_gathered_weights_are_a_part_of_their_own(pair: list[Told]):
    gathered = {s: pair[0][f"zero{s}"]["record"]["parts_bytes"]["gathered"] for s in range(4)}

    assert gathered[0] == 0
    assert gathered[1] < FP32 * 2 * SLICE_ALIGNMENT, "what fills up the flat bucket of weights"
    assert 0 < gathered[3] < gathered[2] <= FP32 * P


def test_ddp_holds_buckets_beside_the_gradients_that_are_summed_up(pair: list[Told]):
    once, twice = (pair[0][n]["record"]["at_peak_bytes"] for n in ("zero0", "accumulated"))

    assert once["gradients"] == FP32 * P, "the buckets alone"
    assert twice["gradients"] == 2 * FP32 * P, "buckets, and the sum over micro-batches"


def test_every_layouts_parts_add_up_on_both_ranks(pair: list[Told]):
    for rank in pair:
        for name, told in rank.items():
            assert faults(told["record"], {"buffers": ROPE}) == [], name


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training as the launcher starts it."""
    folder = tmp_path_factory.mktemp("trained")
    assert train_alone(folder, settings(1, 8, source="synthetic")) == 0, log(folder)
    return folder


def test_the_memory_line_stands_before_the_step_that_it_is_about(trained: Path):
    told = lines(trained)
    at = next(i for i, line in enumerate(told) if line["event"] == "memory")

    assert told[at]["step"] == told[at + 1]["step"] == 2
    assert [line.get("tracked", False) for line in steps(trained)] == [False, True] + [False] * 6
    assert told[at]["kind"] == "tracked" and told[at]["why"] is None


def test_resident_and_tracked_peaks_are_told_apart(trained: Path):
    told = next(line for line in lines(trained) if line["event"] == "memory")
    peak, context = told["peak_bytes"], told["parts_bytes"]["context"]

    assert peak["allocated"] is peak["reserved"] is peak["device_used"] is None
    assert context + peak["tracked"] < peak["resident"]
    assert 2**26 < context < peak["resident"] and told["watcher_bytes"] >= 0


def test_it_can_be_switched_off(tmp_path: Path):
    assert train(tmp_path, settings(1, 3, source="synthetic", memory_parts=False)) == 0

    assert [line["event"] for line in lines(tmp_path)] == ["start", "step", "step", "step", "end"]
    assert not any(line.get("tracked") for line in steps(tmp_path))


class Tied(nn.Module):
    """Two names for one weight, a buffer, and a table that is not a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("mask", torch.zeros(16))
        self.table = (torch.zeros(4), torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_tied_weights_count_once_and_tables_count_as_buffers():
    model = Tied()
    model(torch.ones(1, 8)).sum().backward()
    state = state_bytes([model], [], Gradients([model]))

    assert (state.weights, state.gradients, state.optimizer) == (256, 256, 0)
    assert state.buffers == tensor_bytes(tables([model])) == 4 * (16 + 4 + 4)


def test_gradients_are_known_after_they_are_gone():
    model = Tied()
    model(torch.ones(1, 8)).sum().backward()
    whole = Gradients([model])
    assert whole.lasting() == 256

    model.zero_grad()
    assert whole.num_bytes == 256 and whole.lasting() == 0


def test_frozen_weights_are_weights_without_gradients():
    model, watch = nn.Sequential(*(nn.Linear(8, 8, False) for _ in "ab")), MemoryWatch(CPU)
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam(model[1].parameters())
    seen: list[bool] = []
    for _ in range(2):
        with watch.step([model], [optimizer]) as tracked:
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        seen.append(tracked)

    told = watch.record()
    assert seen == [False, True] and told["kind"] == "tracked"
    assert told["parts_bytes"]["weights"] == told["at_peak_bytes"]["weights"] == 512
    assert told["parts_bytes"]["gradients"] == told["at_peak_bytes"]["gradients"] == 256


def watched(watch: MemoryWatch) -> tuple[list[bool], dict[str, Any]]:
    """Which of three steps were watched, and their record."""
    model, seen = Tied(), list[bool]()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        with watch.step([model], [optimizer]) as tracked:
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        seen.append(tracked)
    return seen, watch.record()


def test_a_layout_that_cannot_be_tracked_says_why_and_keeps_its_sums():
    seen, told = watched(MemoryWatch(torch.device("cpu"), untracked_reason="compiled"))

    assert seen == [False, True, False]
    assert told["kind"] is told["tracker"] is told["at_peak_bytes"] is None
    assert told["why"] == "compiled" and told["parts_bytes"]["activations"] is None
    assert told["parts_bytes"]["weights"] == 256 and told["peak_bytes"]["resident"] > 2**20


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("found", [None, ModuleType("memory_tracker")], ids=["missing", "another"])
def test_another_version_s_tracker_costs_the_parts_and_not_the_training(
    monkeypatch: pytest.MonkeyPatch, found: ModuleType | None, limited: bool
):
    monkeypatch.setitem(sys.modules, "paceline.trainer.measure.memory_tracker", found)

    seen, told = watched(MemoryWatch(torch.device("cpu"), limited=limited))

    assert seen == [False, True, False]
    assert told["tracker"] is None and "memory tracker has changed" in told["why"]
    assert told["parts_bytes"]["weights"] == 256


def test_a_step_without_an_update_is_tried_again():
    """As fp16 does, whose first steps may overflow: their gradients are never whole."""
    model, watch = Tied(), MemoryWatch(torch.device("cpu"))
    optimizer = torch.optim.Adam(model.parameters())
    updates, seen = [True, False, True, True], []
    for update in updates:
        with watch.step([model], [optimizer]) as tracked:
            model(torch.ones(1, 8)).sum().backward()
            if update:
                optimizer.step()
            optimizer.zero_grad()
        seen.append(tracked)

    assert seen == [False, True, True, False]
    assert watch.record()["parts_bytes"]["gradients"] == 256


def test_the_sampler_sees_memory_that_is_gone_again():
    size = 2**27
    with ResidentSampler() as idle:
        pass
    assert idle.peak_bytes
    with ResidentSampler() as busy:
        block = np.ones(size, dtype=np.uint8)
        most = idle.peak_bytes + 0.9 * size
        wait_until(lambda: (busy.peak_bytes or 0) >= most, "the sampler's thread", LIMIT_S, 0.001)
        del block


def test_a_sampler_that_cannot_start_leaves_the_usual_stack_size(monkeypatch: pytest.MonkeyPatch):
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    usual = threading.stack_size()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError), ResidentSampler():
        pass

    assert threading.stack_size() == usual
