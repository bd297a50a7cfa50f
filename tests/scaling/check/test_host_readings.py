"""Lines of many processes become one reading a host, and a silent host is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.core.hardware import Cluster
from paceline.machines import JobEnd
from paceline.scaling.check.fitness import host_readings, read_lines


def cluster(launcher: str = "ssh", ranks: int = 1, nodes: int = 2) -> Cluster:
    hosts = tuple(f"n{number}" for number in range(nodes))
    return Cluster.model_validate(
        {
            "name": "c",
            "device": "cpu",
            "nodes": nodes,
            "devices_per_node": ranks,
            "launcher": launcher,
            "hosts": hosts,
        }
    )


def line(event: str, node: int, **values: Any) -> dict[str, Any]:
    return {"event": event, "node": node, "rank": node, "local_rank": 0, **values}


def whole(node: int, host: str) -> list[dict[str, Any]]:
    return [
        line("facts", node, host=host, gpus=[]),
        line("rate", node, what="gemm", value=2.0, rates=[1.0, 2.0, 3.0]),
        line("end", node),
    ]


def test_torn_lines_and_foreign_ones_are_passed_over(tmp_path: Path):
    (tmp_path / "check").mkdir()
    text = json.dumps(line("end", 0)) + '\n[1]\n{"a": 1}\n{"event": "rate", "no'
    (tmp_path / "check" / "rank-00000.jsonl").write_text(text)
    assert read_lines(tmp_path) == [line("end", 0)]
    assert read_lines(tmp_path / "nothing") == []


def test_each_host_has_its_blocks_as_repeats():
    first, second = host_readings(cluster(), [*whole(0, "a"), *whole(1, "b")], None)
    assert (first.host, second.host) == ("n0", "n1")  # ssh's names, not the hosts' own
    assert first.rates == {"gemm": [1.0, 2.0, 3.0]} and first.faults == ()


def test_the_slowest_device_counts_and_the_best_partner():
    lines = [
        *(line("rate", 0, what="gemm", value=v, rates=[v]) for v in (5.0, 3.0)),
        *(line("collective", 0, bus_bytes_per_s=v) for v in (8.0, 7.0)),
        *(line("pair", 0, partner=1, bus_bytes_per_s=v) for v in (2.0, 2.5)),
        *(line("pair", 0, partner=2, bus_bytes_per_s=v) for v in (1.0, 1.0)),
        *[line("end", 0)] * 2,
    ]
    reading = host_readings(cluster(ranks=2, nodes=1), lines, None)[0]
    assert reading.rates == {"gemm": [3.0], "collective": [7.0], "pair": [4.5]}


def test_slurm_orders_its_hosts_itself():
    lines = [*whole(0, "n1"), *whole(1, "n0")]
    assert [r.host for r in host_readings(cluster("slurm"), lines, None)] == ["n1", "n0"]
    silent = host_readings(cluster("slurm"), whole(0, "n1"), None)
    assert [r.host for r in silent] == ["n1", "n0"] and silent[1].faults


@pytest.mark.parametrize(
    ("verdict", "why"),
    [
        (None, "1 of 1 process did not finish the check"),
        (
            JobEnd("failed", "the link is cut", ("n1",)),
            "did not finish the check: the link is cut",
        ),
    ],
)
def test_a_host_that_ended_early_is_at_fault_with_the_launchers_reason(
    verdict: JobEnd | None, why: str
):
    first, second = host_readings(cluster(), whole(0, "a"), verdict)
    assert first.faults == () and second.faults[0].endswith(why)


def test_what_the_loss_of_another_host_broke_off_is_no_fault():
    verdict = JobEnd("failed", "n0: the connection was lost", ("n0",))
    lost, broken_off = host_readings(cluster(), [], verdict)
    assert lost.faults and not broken_off.faults
    assert broken_off.remarks[0].endswith("did not finish the check: n0: the connection was lost")


def test_a_part_that_failed_is_a_fault_of_the_host_or_of_the_pair():
    lines = [
        *whole(0, "a"),
        line("fault", 0, part="memory", reason="no room"),
        line("fault", 0, part="pair with node 1", reason="timed out"),
    ]
    first = host_readings(cluster(), lines, None)[0]
    assert first.faults == ("memory failed: no room",)
    assert first.remarks == ("pair with n1 failed: timed out",)
