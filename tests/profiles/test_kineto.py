"""Traces by hand whose times are known to the microsecond.

Traces that are torn, wrong or huge.
"""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest

from paceline.cli.profile import parse_ranks, parse_steps
from paceline.core.errors import UserError
from paceline.profiles import kineto
from paceline.profiles.attribution import breakdowns, critical_path, top_kernels
from paceline.profiles.breakdown import CATEGORIES, Breakdown
from paceline.profiles.kernels import kind_of
from paceline.profiles.kineto import TraceFile, read_timeline
from tests.command import paceline
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


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void fbgemm_gpu::quantize_fp8_rowwise<float>(long, float const*)", "memory_bound"),
        ("void permute_2D_data_kernel<false, int>(int, fbgemm_gpu::Divisor)", "memory_bound"),
        ("void (anonymous namespace)::fill_kernel<X<int>>(flash::Params<1>)", "memory_bound"),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<4>>(P)", "gemm"),
        ("void cutlass::device_kernel<flash::enable<flash::FlashFwd<cutlass::gemm::X>>>(P)",
         "attention"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_256x128>(Params)", "gemm"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<AdamFunctor>(T)",
         "optimizer"),
        ("void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<int>(x)", "memory_bound"),
        ("triton_tem_fused_mm_3", "gemm"),
        ("Memcpy DtoD (Device -> Device)", "memory_bound"),
        ("void convert_layout<float>(x)", "other"),
    ],
)  # fmt: skip
def test_a_kernels_own_name_decides_its_kind(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_the_last_step_includes_what_other_threads_launch(tmp_path: Path) -> None:
    """A mark on the device covers the kernels that its own thread launches, so no backward pass."""
    path = write(
        tmp_path / "trace.json",
        [
            event("user_annotation", "ProfilerStep#1", 0, 100, 1),
            event("gpu_user_annotation", "ProfilerStep#1", 2, 30, 7),
            kernel("nvjet_forward", 2, 30),
            kernel("nvjet_backward", 30, 92),
        ],
    )
    (span,) = read_timeline(path).steps
    assert (span.begin_s, span.end_s) == pytest.approx((2e-6, 102e-6))


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


def test_a_list_of_events_is_a_trace_as_well(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text(json.dumps([*step(1, 0, 10), kernel("gemm", 0, 5), "no event"]))
    assert [event["name"] for event in TraceFile(path)][-1] == "gemm"
    assert len(read_timeline(path).spans) == 1


def test_events_that_lie_across_the_pieces_that_are_read_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "trace.json", [kernel(f"gemm {n}", n, n + 1) for n in range(50)])
    whole = list(TraceFile(path))
    monkeypatch.setattr(kineto, "CHUNK", 7)
    trace = TraceFile(path)
    assert list(trace) == whole
    assert trace.fields["distributedInfo"]["rank"] == 0


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_that_ends_in_the_middle_says_where(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, [kernel(f"gemm {n}", n, n + 1) for n in range(2000)])
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"is not a complete trace: after event [\d,]+ "):
        read_timeline(path)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "is empty"),
        (b"[", "ends in the middle"),
        (b"step 1 loss 2", "holds no JSON object or list"),
        (b'{"traceEvents": 3}', "is not a list"),
        (b'{"traceEvents": []}', "has no step marks"),
        (b'{"traceEvents": [' + b"[" * 100_000, "nested too deeply"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b"\x1f\x8bnothing", "compression is broken"),
        (
            b'[{"ph": "X", "cat": "kernel", "name": "g", "ts": NaN, "dur": "x"}]',
            "has no step marks",
        ),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes, what: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=what):
        read_timeline(path)


def test_the_memory_does_not_grow_with_what_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    stack = json.dumps({"ph": "X", "cat": "python_function", "name": "f" * 400, "ts": 1, "dur": 1})
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.write('{"traceEvents": [')
        for number in range(1, 3):
            file.writelines(json.dumps(event) + "," for event in step(number, number, number + 1))
        file.writelines(f"{stack},\n" for _ in range(20_000))  # 9 MB
        file.write(json.dumps(kernel("gemm", 1, 2)) + "]}")
    tracemalloc.start()
    timeline = read_timeline(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(timeline.steps) == 2
    assert peak < 6e6


def test_more_kernels_than_fit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kineto, "MAX_EVENTS", 9)
    path = write(tmp_path / "trace.json", [kernel("gemm", n, n + 1) for n in range(10)])
    with pytest.raises(UserError, match="more than 9 kernels or operations; profile fewer steps"):
        read_timeline(path)


def test_the_verb_reads_traces_from_elsewhere_and_refuses_bad_ones(tmp_path: Path) -> None:
    events = [*step(1, 0, 100), kernel("sm90_xmma_gemm_bf16", 0, 40)]
    good = write(tmp_path / "trace.json.gz", events)
    answer = paceline("probe", "profile", "--from", good)
    assert answer.returncode == 0, answer.stderr
    assert "matrix multiplications" in answer.stdout and "40.0%" in answer.stdout
    rows = paceline("probe", "profile", "--from", good, "--format", "csv").stdout.splitlines()
    assert rows[0] == "part,seconds,share,in_sum,means"
    (tmp_path / "torn.json").write_text('{"traceEvents": [{"ph"')
    refused = paceline("probe", "profile", "--from", tmp_path / "torn.json")
    assert refused.returncode == 1 and "is not a complete trace" in refused.stderr
    for tool in ("torch", "nccl"):
        missing = paceline("probe", "profile", "--from", tmp_path / "none", "--tool", tool)
        assert missing.returncode == 1 and "none: cannot be read: No such file" in missing.stderr
    refused = paceline("probe", "profile", "tiny-lama", runs=tmp_path)
    assert refused.returncode == 1 and "tiny-llama" in refused.stderr


def test_steps_and_ranks_are_lists_of_numbers() -> None:
    assert parse_steps("20-30") == (20, 30) and parse_steps("4") == (4, 4)
    assert parse_ranks("0,2-3", 4) == [0, 2, 3] and parse_ranks("all", 2) == [0, 1]
    for steps in ("", "0", "9-3", "a-b", "1-", "-1"):
        with pytest.raises(UserError, match="is not a range of steps"):
            parse_steps(steps)
    for ranks in ("", "4", "3-1", "0;1"):
        with pytest.raises(UserError, match="allowed"):
            parse_ranks(ranks, 4)
