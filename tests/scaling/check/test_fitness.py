"""A host is drained for what it shows, and nobody is judged by too little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from paceline.scaling.analysis.slow_nodes import HealthySpeed
from paceline.scaling.check.fitness import CheckReport, Past, Reading, judge
from paceline.scaling.check.preflight import check_metrics


def checked(readings: Sequence[Reading], past: Past | None = None) -> CheckReport:
    return judge(readings, past or Past(), {}, "2026-01-01T00:00:00+00:00", 3.0)


def cluster(number: int, slow: Mapping[int, float] | None = None) -> list[Reading]:
    """Hosts whose repeats and means vary by about 1%, the named ones slower by a share."""
    return [
        Reading(
            f"n{host}",
            {"kernel": "6.1"},
            {
                "gemm": [
                    1e12
                    * (1 - (slow or {}).get(host, 0.0))
                    * (1 + 0.01 * ((3 * host + 7 * b) % 5 - 2))
                    for b in range(10)
                ]
            },
        )
        for host in range(1, number + 1)
    ]


def test_healthy_hosts_are_fit_and_the_report_says_what_it_could_have_found():
    report = checked(cluster(16))
    assert report.drain == () and {host.verdict for host in report.hosts} == {"fit"}
    smallest = report.measures["gemm"].smallest_fault
    assert smallest is not None and 0.01 < smallest < 0.1
    assert "16 hosts checked in 3.0 s: 16 fit." in report.sentences[0]
    assert "is detected in 9 of 10 cases" in report.sentences[1]


def test_a_fault_twice_the_smallest_is_found_and_nobody_else_is_blamed():
    smallest = checked(cluster(16)).measures["gemm"].smallest_fault
    assert smallest is not None
    report = checked(cluster(16, {5: 2 * smallest}))
    assert report.drain == ("n5",)
    (evidence,) = report.hosts[4].evidence
    assert evidence.startswith("GEMMs at ") and "below the other nodes" in evidence
    assert "1 slow (n5)" in report.sentences[0]


@pytest.mark.parametrize("number", [1, 2, 7])
def test_few_hosts_judge_nobody(number: int):
    report = checked(cluster(number, {1: 0.5}))
    assert report.drain == () and report.measures["gemm"].smallest_fault is None
    assert "too few to judge" in report.sentences[1]


def test_a_host_of_few_is_judged_by_its_own_past():
    past = Past(earlier={"gemm": {"n1": [1.0e12, 1.01e12, 0.99e12], "n2": [1.0e12, 1.0e12]}})
    report = checked(cluster(2, {1: 0.3, 2: 0.3}), past)
    assert report.drain == ("n1",)  # two earlier checks of n2 say too little
    assert "below its own history" in report.hosts[0].evidence[0]


def test_another_check_can_be_the_measure():
    report = checked(cluster(2, {2: 0.3}), Past(references={"gemm": HealthySpeed(1e12, 0.02)}))
    assert report.drain == ("n2",) and "below the reference" in report.hosts[1].evidence[0]


def test_a_fault_of_its_own_drains_a_host_whatever_its_speed():
    report = checked([*cluster(2), Reading("n9", faults=("its clock is 9 s ahead",))])
    assert report.drain == ("n9",) and report.hosts[2].evidence == ("its clock is 9 s ahead",)


@pytest.mark.parametrize(
    ("reached", "fault", "number", "withheld"),
    [
        (True, "its clock is 9 s ahead", 2, False),
        (True, "its clock is 9 s ahead", 3, True),
        (False, "does not answer", 2, False),
        (False, "does not answer", 3, True),
    ],
)
def test_hosts_are_drained_unless_most_of_them_fail(
    reached: bool, fault: str, number: int, withheld: bool
):
    bad = [Reading(f"m{n}", faults=(fault,), reached=reached) for n in range(number)]
    report = checked([*cluster(2), *bad])
    verdict = "broken" if reached else "not reached"
    assert [host.verdict for host in report.hosts] == ["fit", "fit", *[verdict] * number]
    assert len(report.drain) == (0 if withheld else number)
    assert (report.drain_withheld is not None) == withheld
    if withheld:
        words = f"No host is listed to drain: 3 {verdict} of 5 hosts, 3 of them alike ({fault})"
        assert report.sentences[1].startswith(words)


def test_a_single_host_that_answers_and_is_broken_is_drained():
    report = checked([Reading("n1", faults=("1 GPU has uncorrected errors",))])
    assert report.drain == ("n1",) and report.hosts[0].verdict == "broken"


def facts(**changes: Any) -> dict[str, Any]:
    return {
        "kernel": "6.1",
        "torch": "2.13",
        "num_cores": 8,
        "memory_bytes": 64e9,
        "gpus": [{"name": "H100", "driver": "550"}],
        **changes,
    }


def test_a_host_that_differs_from_most_is_worth_a_look():
    readings = [Reading(f"n{n}", facts()) for n in range(3)]
    odd = Reading("n3", facts(kernel="5.4"))
    report = checked([*readings, odd])
    assert [host.verdict for host in report.hosts] == ["fit", "fit", "fit", "suspect"]
    remarks = " ".join(report.hosts[3].remarks)
    assert "kernel 5.4 here, 6.1 on 3 of 4 hosts" in remarks


def test_a_host_that_lost_a_gpu_is_drained():
    eight = [{"name": "H100", "driver": "550"}] * 8
    readings = [Reading(f"n{n}", facts(gpus=eight)) for n in range(3)]
    report = checked([*readings, Reading("n3", facts(gpus=eight[:7]))])
    assert report.drain == ("n3",)
    assert report.hosts[3].evidence == ("7 GPUs here, 8 on 3 of 4 hosts",)
    assert report.hosts[0].verdict == "fit"


def test_of_two_that_differ_neither_is_the_usual_one():
    report = checked([Reading("a", facts()), Reading("b", facts(torch="2.12"))])
    assert [host.remarks for host in report.hosts] == [
        ("torch 2.13 here, others differ",),
        ("torch 2.12 here, others differ",),
    ]


def test_memory_that_differs_by_pages_is_the_same():
    report = checked([Reading("a", facts()), Reading("b", facts(memory_bytes=64.001e9))])
    assert {host.verdict for host in report.hosts} == {"fit"}


def test_a_report_survives_its_file():
    report = checked(cluster(8, {2: 0.5}))
    assert CheckReport.model_validate_json(report.model_dump_json()) == report


def test_where_only_the_margin_judges_no_z_is_made_up_and_the_report_says_so():
    readings = [Reading("a", rates={"pair": [90.0]}), Reading("b", rates={"pair": [100.0]})]
    report = checked(readings, Past(references={"pair": HealthySpeed(100.0)}))
    assert report.drain == () and report.hosts[0].verdict == "suspect"
    (remark,) = report.hosts[0].remarks
    words = "10.0% below the reference (by the margin alone: low confidence)"
    assert remark.endswith(f"{words}: repeat before draining")
    assert "judged by the margin of 1% alone" in report.sentences[1]
    assert "too few" not in report.sentences[1]


def test_prometheus_reads_the_verdicts_and_the_rates():
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    readings = cluster(16, {3: 0.2})
    report = checked(readings)

    families = list(parser.text_string_to_metric_families(check_metrics(report)))

    read: dict[str, dict[str | None, float]] = {}
    for sample in (sample for family in families for sample in family.samples):
        read.setdefault(sample.name, {})[sample.labels.get("host")] = sample.value
    drain = {host for host, value in read["paceline_check_host_drain"].items() if value}
    assert drain == set(report.drain) != set()
    assert {host for host, ok in read["paceline_check_host_usable"].items() if not ok} == drain
    rates = {host.host: host.figures["gemm"].value for host in report.hosts}
    assert read["paceline_check_gemm"] == rates
