"""Traces that are torn, wrong or huge."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest

from paceline.cli.profile import parse_ranks, parse_steps
from paceline.core.errors import UserError
from paceline.profiles import kineto
from paceline.profiles.kineto import TraceFile, read_timeline
from tests.command import paceline
from tests.profiles.traces import kernel, step, write


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
    assert trace.fields["traceName"] == "trace.json"


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
