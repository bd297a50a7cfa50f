"""Traces by hand whose times are known to the microsecond."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.profiles.attribution import breakdowns, critical_path, top_kernels
from paceline.profiles.breakdown import CATEGORIES, Breakdown
from paceline.profiles.kineto import read_timeline
from tests.profiles.traces import collective, event, kernel, step, write

GEMM = "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_TNT"
NORM = "void at::native::vectorized_elementwise_kernel<4, at::native::SiluFunctor>"
FLASH = "flash_fwd_kernel"
ADAM = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdam>"


def covered_s(step: Breakdown) -> float:
    """All of the step that belongs to a category."""
    return sum(step.parts[name] for name in CATEGORIES)


def gpu_step() -> list[object]:
    """A step of 1000 us in which every kind of time is there once."""
    return [
        *step(20, 0, 1000),
        kernel(GEMM, 0, 300),
        kernel(FLASH, 300, 400),
        collective("AllReduce", "7", 400, 450),  # exposed
        kernel(NORM, 450, 500),
        collective("ReduceScatter", "5", 480, 580),  # hidden for 20, exposed for 80
        kernel("my_own_kernel", 580, 600),
        event("user_annotation", "enumerate(DataLoader)#_SingleProcess.__next__", 600, 700, 1),
        kernel(ADAM, 720, 800),
        kernel("void at::native::lpnorm_cleanup", 800, 820),
        event("gpu_user_annotation", "Optimizer.step#AdamW.step", 720, 820, 7),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 900, 1000),
        event("cpu_op", "aten::mm", 10, 900, 1),
    ]


def test_every_moment_of_a_gpus_step_belongs_to_one_category(tmp_path: Path) -> None:
    timeline = read_timeline(write(tmp_path / "trace.json.gz", gpu_step()))
    (found,) = breakdowns(timeline)
    assert found.step == 20
    microseconds = {name: round(s * 1e6, 3) for name, s in found.parts.items()}
    assert microseconds == {
        "gemm": 300,
        "attention": 100,
        "memory_bound": 150,
        "optimizer": 100,
        "communication_exposed": 130,
        "bubble": 0,
        "data_wait": 100,
        "host_gap": 100,
        "other": 20,
        "communication_overlapped": 20,
    }
    assert {axis: round(time.exposed_s * 1e6) for axis, time in found.communication.items()} == {
        "tp": 50,
        "dp": 80,
    }
    assert covered_s(found) == pytest.approx(found.step_time_s, rel=1e-9)


def test_waiting_for_another_stage_is_the_bubble(tmp_path: Path) -> None:
    messages = [(0, 10), (100, 112), (200, 210), (300, 510), (600, 611), (700, 710)]
    work = [collective("SendRecv", "9", begin, end) for begin, end in messages]
    gemm = kernel(GEMM, 10, 100)
    timeline = read_timeline(write(tmp_path / "t.json", [*step(3, 0, 1000), gemm, *work]))
    (found,) = breakdowns(timeline)
    assert found.bubble * 1e6 == pytest.approx(2 + 200 + 1, abs=0.01)
    assert found.communication["pp"].exposed_s * 1e6 == pytest.approx(60, abs=0.01)
    assert covered_s(found) == pytest.approx(found.step_time_s, rel=1e-9)


def test_kernels_and_the_critical_path_are_told_by_time(tmp_path: Path) -> None:
    timeline = read_timeline(write(tmp_path / "trace.json", gpu_step()))
    longest = top_kernels([timeline])[0]
    assert (longest.name, longest.label, longest.n) == (GEMM, "gemm", 1)
    assert longest.share == pytest.approx(0.3)
    path = critical_path([timeline])
    assert sum(each.seconds for each in path) * 1e6 == pytest.approx(1000)
    idle = next(each for each in path if each.label == "host_gap")
    assert idle.seconds * 1e6 == pytest.approx(200)


def test_a_group_of_the_native_trainer_has_the_axis_that_it_says(tmp_path: Path) -> None:
    events = [*step(1, 0, 100), collective("AllReduce", "0", 0, 50)]
    for axes, axis in (({}, "world"), ({"0": "tp"}, "tp")):
        timeline = read_timeline(write(tmp_path / "t.json", events, paceline={"axes": axes}))
        assert [name for name, _ in timeline.axes()] == [axis]


def test_operations_of_a_cpu_count_without_what_they_call(tmp_path: Path) -> None:
    events = [
        event("user_annotation", "ProfilerStep#5", 0, 1000, 1),
        event("cpu_op", "aten::linear", 100, 300, 1),
        event("cpu_op", "aten::t", 100, 120, 1),
        event("cpu_op", "aten::addmm", 120, 280, 1),
        event("cpu_op", "BlockedAttention", 300, 500, 1),
        event("cpu_op", "aten::baddbmm", 320, 480, 1),
        event("cpu_op", "aten::add", 500, 550, 1),
        event("user_annotation", "Optimizer.step#AdamW.step", 600, 700, 1),
        event("cpu_op", "aten::mul", 610, 690, 1),
        event("user_annotation", "paceline:communication:tp:allreduce", 540, 600, 1),
        event("user_annotation", "gloo:all_reduce", 545, 595, 9),
    ]
    (found,) = breakdowns(read_timeline(write(tmp_path / "rank-1.json", events, rank=1)))
    assert found.rank == 1
    assert {name: round(s * 1e6) for name, s in found.parts.items() if s} == {
        "gemm": 180,
        "attention": 200,
        "memory_bound": 50,
        "optimizer": 100,
        "communication_exposed": 45,
        "host_gap": 425,
        "communication_overlapped": 5,
    }
    assert list(found.communication) == ["tp"]
