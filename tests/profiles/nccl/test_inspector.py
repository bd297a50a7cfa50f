"""Records of NCCL's inspector: the form is that of its documentation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.profiles.nccl.inspector import InspectorLog


def record(rank: int, name: str = "ReduceScatter", **more: Any) -> dict[str, Any]:
    """The example of the inspector's own page."""
    return {
        "header": {"id": "0x9e7a479f95a66c", "rank": rank, "n_ranks": 32, "nnodes": 4},
        "metadata": {
            "inspector_output_format_version": "v4.0",
            "dump_timestamp_us": 1749490229087081,
            "hostname": "example-hostname",
            "pid": 468528 + rank,
        },
        "coll_perf": {
            "coll": name,
            "coll_sn": 129,
            "coll_msg_size_bytes": 65536,
            "coll_exec_time_us": 110,
            "coll_timing_source": "kernel_gpu",
            "coll_algobw_gbs": 19.065018,
            "coll_busbw_gbs": 18.469236,
            **more,
        },
    }


def read(path: Path, *lines: str) -> InspectorLog:
    path.write_text("\n".join(lines))
    log = InspectorLog()
    log.read(path)
    return log


def test_bus_bandwidth_is_what_the_inspector_prints(tmp_path: Path) -> None:
    lines = [json.dumps(record(rank)) for rank in (30, 31)]
    table = read(tmp_path / "a.jsonl", *lines).communication()

    (row,) = table.rows
    assert (row.collective, row.size, row.members, row.calls) == ("reduce_scatter", 32, 2, 1)
    assert row.num_bytes == 32 * 65536 and row.seconds == pytest.approx(110e-6)
    assert row.bus_bytes_per_s == pytest.approx(18.469236e9, rel=1e-6)


def test_algorithms_are_told_and_torn_lines_counted(tmp_path: Path) -> None:
    whole = json.dumps(record(0, "AllReduce", coll_algo="Ring", coll_proto="Simple"))
    wrong = json.dumps(record(0, "Unheard"))
    table = read(tmp_path / "a.jsonl", whole, whole[:-40], wrong).communication()

    assert table.torn_lines == 2
    (choice,) = table.algorithms
    assert (choice.algorithm, choice.protocol, choice.calls) == ("Ring", "Simple", 1)
    assert choice.num_bytes == 65536
