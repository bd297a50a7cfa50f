"""Counted bytes against the layout's, for counters and for logs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.core.layout import Layout
from paceline.core.traffic import step_traffic
from paceline.core.training import Training
from paceline.profiles.nccl.debug_log import DebugLog
from paceline.profiles.nccl.traffic_comparison import axis_groups, compare_traffic, traffic_warnings
from paceline.profiles.nccl_logs import read_counters
from tests.example import SHAPE, make_spec
from tests.profiles.nccl.debug_lines import call, setup

START = {"event": "start", "schema": 1, "rank": 0, "world_size": 2, "axes": {"dp": [0, 1]}}
MESSAGE = {"axis": "dp", "collective": "all_reduce", "ranks": 2, "bytes": 64, "calls": 3}


def written(folder: Path, *lines: object) -> Path:
    path = folder / "rank-00000.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_groups_are_named_by_the_axes_of_the_layout() -> None:
    groups = axis_groups(Layout(tp=2, pp=2, cp=2), dp=2)
    assert groups[0, 1] == "tp" and groups[0, 2] == "cp" and groups[0, 8] == "pp"
    assert groups[0, 2, 4, 6] == "dp" and groups[9, 11, 13, 15] == "dp"
    assert axis_groups(Layout(cp=2), dp=1) == {(0, 1): "cp+dp"}
    hybrid = axis_groups(Layout(zero_stage=3, dp_shard=2), dp=4)
    assert hybrid[0, 1] == "dp_shard" and hybrid[0, 2] == "dp_replicate"


def test_an_nccl_log_is_compared_with_the_layout(tmp_path: Path) -> None:
    """Bytes are exactly those of the formulas, apart from a tenth more of one axis."""
    layout = Layout(micro_batch=2, tp=2)
    training = Training(seq_len=32, global_batch=8, steps=2, dtype="bf16")
    spec = make_spec(ranks=8, model=SHAPE, layout=layout, training=training)
    lines = setup()
    names = {"all_reduce": "AllReduce", "all_gather": "AllGather"}
    for term in step_traffic(spec.parallel):
        ranks, pointer = (2, "0xb") if term.axis == "tp" else (4, "0xc")
        parts = ranks if term.collective == "all_gather" else 1
        more = 1.1 if term.purpose == "gradients" else 1
        count = int(term.num_bytes // 4 // parts * more)
        lines += [
            call(rank, names[term.collective], count, f"{pointer}{rank}", ranks)
            for rank in range(8)
        ] * 2
    path = tmp_path / "nccl.log"
    path.write_text("\n".join(lines))
    log = DebugLog()
    log.read(path)

    rows, reason = compare_traffic(log.communication(axis_groups(layout, 4), steps=2), spec)
    assert reason is None
    ratios = {(row.axis, row.collective): round(row.ratio or 0, 3) for row in rows}
    assert ratios == {("tp", "all_reduce"): 1, ("tp", "all_gather"): 1, ("dp", "all_reduce"): 1.1}
    (said,) = traffic_warnings(rows)
    assert said.startswith("dp all_reduce moves") and "1.10 times what the layout requires" in said


def test_nothing_is_compared_without_steps_axes_or_formulas(tmp_path: Path) -> None:
    table, _ = read_counters([written(tmp_path, START)])
    assert compare_traffic(table, make_spec())[1] == (
        "the number of steps in the figures is unknown"
    )
    step = {"event": "traffic", "step": 1, "messages": [MESSAGE]}
    table, _ = read_counters([written(tmp_path, START, step)])
    reason = compare_traffic(table, make_spec(layout=Layout(zero_stage=3, pp=2), ranks=4))[1]
    assert reason and "in a pipeline" in reason


def test_counters_are_summed_over_steps_and_a_torn_line_is_told(tmp_path: Path) -> None:
    steps = [{"event": "traffic", "step": n, "messages": [MESSAGE]} for n in (1, 2, 3)]
    path = written(tmp_path, START, *steps)
    path.write_text(path.read_text() + '{"event": "traf')
    table, ranks = read_counters([path], first_step=2)

    assert ranks == {0} and table.steps == 2 and table.torn_lines == 1
    (row,) = table.rows
    assert (row.axis, row.calls, row.num_bytes, row.stride) == ("dp", 6, 6 * 64, 1)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rank-00000.jsonl:1"):
        read_counters([written(tmp_path, {"event": "step"})])
