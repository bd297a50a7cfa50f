"""Rates of pairs name the host that is slow with all, and the link that is slow alone."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.files.nominal_links import bus_bound, nominal_fabric
from paceline.report.html import render_document
from paceline.scaling.network.readings import (
    CollectiveTiming,
    PairRow,
    bus_factor,
    collective_rows,
    pair_rows,
)
from paceline.scaling.network.report import NetworkReport, network_document, network_report

IDENTITY = {"device": "H100-SXM", "nodes": 9, "devices_per_node": 8}


def line(rank: int, times_s: list[float], operation: str = "all_reduce", wrong: int = 0) -> dict:
    return {
        "event": "collective",
        "operation": operation,
        "bytes": 1000,
        "ranks": 2,
        "times_s": times_s,
        "wrong": wrong,
        "rank": rank,
        "node": rank,
    }


def test_the_definitions_are_those_of_nccl_tests():
    assert bus_factor("all_reduce", 8) == pytest.approx(1.75)
    for operation in ("all_gather", "reduce_scatter", "all_to_all"):
        assert bus_factor(operation, 8) == pytest.approx(0.875)
    assert {bus_factor(each, 8) for each in ("broadcast", "reduce", "send_recv")} == {1.0}


def test_time_is_the_mean_of_the_ranks_and_the_slowest_is_beside_it():
    lines = [line(0, [1.0, 2.0, 9.0]), line(1, [4.0, 4.0, 4.0], wrong=3)]
    (row,) = collective_rows(lines)
    assert (row.latency_s, row.slowest_s, row.n, row.wrong) == (3.0, 4.0, 3, 3)
    assert row.bytes_per_s == pytest.approx(1000 / 3) == row.bus_bytes_per_s
    assert collective_rows(lines[:1]) == ()  # one rank did not come so far


def test_a_pair_is_the_sum_of_all_its_devices():
    lines = [
        {"event": "pair", "node": 0, "partner": 1, "latency_s": t, "bytes_per_s": r, "n": 8}
        for t, r in ((1e-6, 5.0), (3e-6, 7.0))
    ]
    (row,) = pair_rows(lines, ["a", "b"], 2)
    assert (row.source, row.target, row.latency_s, row.bytes_per_s) == ("a", "b", 3e-6, 12.0)
    assert pair_rows(lines, ["a", "b"], 3) == ()


def pairs(slow: dict[tuple[str, str], float], hosts: int = 9) -> tuple[PairRow, ...]:
    """All directions at 50 GB/s, half a percent apart, but those named, by host or direction."""
    rows: list[PairRow] = []
    for number, (a, b) in enumerate(permutations([f"n{i}" for i in range(hosts)], 2)):
        share = slow.get((a, b), 1.0) * slow.get((a, "all"), 1.0) * slow.get((b, "all"), 1.0)
        rate = 50e9 * share * (1 + 0.005 * ((number * 7) % 5 - 2))
        rows.append(PairRow(source=a, target=b, latency_s=2e-6, bytes_per_s=rate, devices=8, n=8))
    return tuple(rows)


def report(rows: tuple[PairRow, ...], *collectives: CollectiveTiming) -> NetworkReport:
    return network_report(collectives, rows, IDENTITY, "2026-01-01T00:00:00+00:00", 3.0, ["n1: x"])


def test_a_host_that_is_slow_with_all_is_named_and_its_links_are_not():
    network = report(pairs({("n4", "all"): 0.6}))
    assert [host.host for host in network.hosts if host.slow] == ["n4"]
    assert network.slow_links == ()
    assert any(text.startswith("n4 is slow with all") for text in network.sentences)


def test_a_link_that_is_slow_in_one_direction_is_named_and_no_host_is():
    network = report(pairs({("n2", "n7"): 0.5}))
    assert [(link.source, link.target) for link in network.slow_links] == [("n2", "n7")]
    assert network.slow_links[0].loss == pytest.approx(0.5, abs=0.02)
    assert not any(host.slow for host in network.hosts)


def test_healthy_hosts_and_few_ones_are_not_blamed():
    for network in (report(pairs({})), report(pairs({("n0", "all"): 0.5}, hosts=3))):
        assert not any(host.slow for host in network.hosts) and network.slow_links == ()
    assert "compared with each other if there are at least 8" in " ".join(
        report(pairs({}, hosts=3)).sentences
    )


def test_wrong_results_come_first_on_the_page_and_hostile_names_are_escaped():
    (wrong,) = collective_rows([line(0, [1e-3] * 7, wrong=1), line(1, [1e-3] * 7)])
    rows = tuple(
        row.model_copy(update={"source": "<script>alert(1)</script>"}) for row in pairs({})[:1]
    )
    network = report(rows, wrong)
    assert network.sentences[0].startswith("WRONG RESULTS of all-reduce")
    page = render_document(network_document(network, Path("network")))
    assert "<script>alert(1)" not in page and "WRONG RESULTS" in page
    assert NetworkReport.model_validate_json(network.model_dump_json()) == network


def test_a_latency_that_nobody_measured_is_none_and_not_zero():
    only_to_n1 = tuple(row for row in pairs({}, hosts=3) if row.source == "n0")
    hosts = {host.host: host.latency_s for host in report(only_to_n1).hosts}
    assert hosts == {"n0": 2e-6, "n1": None, "n2": None}
    assert "-" in render_document(network_document(report(only_to_n1), Path("network")))


def test_what_the_stated_links_carry_stands_beside_what_is_reached():
    fabric = nominal_fabric("NVLink4", "InfiniBand-NDR", 8)
    (row,) = collective_rows([line(0, [1e-3] * 7), line(1, [1e-3] * 7)])
    row = row.model_copy(update={"bus_bytes_per_s": 320e9, "ranks": 72})
    rows, identity = pairs({}), {**IDENTITY, "nodes": 1}
    network = network_report((row,), rows, IDENTITY, "2026", 3.0, (), fabric)
    all_reduce, directions = network.fabric
    # A ring crosses each host once, so that all eight ports carry it.
    assert (all_reduce.expected_bytes_per_s, all_reduce.share) == (400e9, 0.8)
    assert directions.expected_bytes_per_s == 400e9
    assert directions.share == pytest.approx(50 / 400, rel=0.01)
    assert "80.0% of the nominal rate of InfiniBand-NDR" in " ".join(network.sentences)
    (inside,) = network_report((row,), (), identity, "2026", 3.0, (), fabric).fabric
    assert inside.link == "NVLink4" and inside.share == pytest.approx(320 / 450)


@pytest.mark.parametrize(
    ("operation", "network", "expected"),
    [
        ("all_reduce", "InfiniBand-HDR", 8 * 25e9),
        ("all_gather", "InfiniBand-XDR", 450e9),  # the link inside a host carries less
        ("broadcast", "Ethernet-100", 12.5e9),
        ("all_to_all", "8x400 Gb/s", 50e9 * 15 / 8),  # 8 of 15 parts leave a host
        ("send_recv", "8x400 Gb/s", 50e9),
        ("send_recv", "2x400 Gb/s", 50e9),
        ("send_recv", "Ethernet-100", 12.5e9),  # one device has the host's port for itself
    ],
)
def test_an_operation_is_bound_by_what_of_it_crosses_a_host(
    operation: str, network: str, expected: float
):
    bound = bus_bound(operation, 16, nominal_fabric("NVLink4", network, 8))
    assert bound is not None and bound[1] == pytest.approx(expected)


def test_links_that_nobody_states_are_expected_of_nothing():
    (row,) = collective_rows([line(0, [1e-3] * 7), line(1, [1e-3] * 7)])
    network = network_report((row,), (), IDENTITY, "2026", 3.0, (), nominal_fabric(None, None, 8))
    (share,) = network.fabric
    assert share.expected_bytes_per_s is None and share.share is None
    assert "is unknown: no link between hosts is specified" in network.sentences[-1]
    assert nominal_fabric(None, "8x400 Gb/s", 8).inter == ("8x400 Gb/s", 50e9)
    with pytest.raises(UserError, match="is not a link between hosts"):
        nominal_fabric(None, "NVLink4", 8)
