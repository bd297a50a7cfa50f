"""What a campaign tells: tables, causes, and what is missing."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from paceline.cli.campaign import exit_code
from paceline.cli.campaign_progress import remaining_text
from paceline.scaling.analysis.analysis import AnalysisContext
from paceline.scaling.campaigns.record import Campaign, TrialResult
from paceline.scaling.campaigns.result import (
    COLUMNS,
    CampaignResult,
    campaign_analysis,
    campaign_result,
    lambda_csv,
    left_over_notes,
    trials_csv,
)
from paceline.scaling.campaigns.rounds import Remaining
from paceline.scaling.tables import measured_table, read_rows
from tests.scaling.campaigns.test_plan import campaign_request, planned, quick

__all__ = ["quick"]


def trial(hosts: str, value: float | None, **fields: object) -> TrialResult:
    names = tuple(hosts.split())
    values = {
        "round": 1,
        "purpose": "plan",
        "nodes": len(names),
        "devices_per_node": 2,
        "hosts": names,
        "run": f"run-{names[0]}",
        "status": "ok" if value else "failed",
        "samples_per_s": value,
        "global_batch": 8,
    }
    return TrialResult.model_validate({**values, **fields})


TRIALS = [
    trial("a", 100.0),
    trial("b", 100.0),
    trial("c", None, reason="c: does not answer"),
    trial("a", 60.0, devices_per_node=1),
    trial("a b", 190.0, round=2),
]


@pytest.fixture
def campaign() -> Campaign:
    return planned(campaign_request("a,b,c", "1,2", devices_per_node=(1, 2)))


def result(campaign: Campaign, trials: list[TrialResult], **fields: object) -> CampaignResult:
    values = {
        "excluded_hosts": {"c": "does not answer"},
        "unplaced_hosts": {3: ("b",)},
        "missing": 0,
        "interrupted": False,
        "resume": None,
    }
    analysis = campaign_analysis(campaign, trials, AnalysisContext())
    return campaign_result(campaign, trials, analysis, **{**values, **fields})  # type: ignore[arg-type]


def test_the_contracts_fields_stand_beside_those_of_the_campaign(campaign: Campaign):
    document = result(campaign, TRIALS).model_dump(mode="json")
    assert {
        "base",
        "scaling",
        "sizes",
        "flagged",
        "nodes",
        "smallest_fault_found",
        "sentences",
        "campaign",
        "runs",
        "excluded_hosts",
        "missing",
        "resume",
    } <= document.keys()
    assert document["base"]["value"] == 100 and document["scaling"] == "weak"
    assert [(size["nodes"], size["n"]) for size in document["sizes"]] == [(1, 2), (2, 1)]
    assert document["sizes"][1]["efficiency"] == pytest.approx(0.95)


def test_a_part_of_a_node_is_held_against_its_share_of_the_node(campaign: Campaign):
    (part,) = result(campaign, TRIALS).below_one_node
    assert (part.devices, part.n) == (1, 1)
    assert part.efficiency == pytest.approx(1.2)


def test_causes_lost_hosts_and_left_over_ones_are_sentences(campaign: Campaign):
    text = " ".join(result(campaign, TRIALS).sentences)
    assert "No value for c: c: does not answer." in text
    assert "Excluded from later rounds: c." in text
    assert "Left without partners in 1 round as a result: b." in text
    assert "left over in one round and measured in another: c." in text


def test_the_short_table_is_lambdas():
    beside = trial("a c", 150.0, round=3, purpose="second pass")
    assert lambda_csv([*TRIALS[1:], beside], 2).splitlines() == [
        "Hostnames,Throughput (samples/sec),Status",
        "b,100.0000,Success",
        "c,-1,Fail",
        '"a, b",190.0000,Success',
    ]


def test_a_sub_cluster_below_the_least_of_its_nodes_fails_in_the_short_table():
    rows = lambda_csv(TRIALS[1:], 2, min_per_node=97.5).splitlines()
    assert rows[1:] == ["b,100.0000,Success", "c,-1,Fail", '"a, b",190.0000,Fail']


def test_both_tables_can_be_analysed_again(tmp_path: Path):
    whole = [trial for trial in TRIALS if trial.devices_per_node == 2]
    for name, text in (("short", lambda_csv(TRIALS, 2)), ("long", trials_csv(whole, "weak"))):
        (tmp_path / name).write_text(text)
        table = measured_table(read_rows(tmp_path / name), name)
        assert [(group.hosts, group.samples_per_s) for group in table.measured] == [
            (trial.hosts, trial.samples_per_s) for trial in whole
        ]


def test_the_long_table_has_everything():
    rows = list(csv.DictReader(io.StringIO(trials_csv(TRIALS, "strong"))))
    assert tuple(rows[0]) == COLUMNS
    assert rows[2]["reason"] == "c: does not answer" and rows[4]["hosts"] == "a, b"
    assert {row["scaling"] for row in rows} == {"strong"}


def test_the_exit_code_tells_whether_the_question_was_answered(campaign: Campaign):
    assert exit_code(result(campaign, TRIALS), fail=False) == 0
    assert exit_code(result(campaign, TRIALS), fail=True) == 3
    assert exit_code(result(campaign, TRIALS, excluded_hosts={}), fail=True) == 0
    assert exit_code(result(campaign, TRIALS, missing=1), fail=False) == 4
    assert exit_code(result(campaign, TRIALS, interrupted=True), fail=False) == 4
    no_pairs = [*TRIALS[:4], trial("a b", None, round=2, reason="broken")]
    assert exit_code(result(campaign, no_pairs), fail=False) == 4
    followed = [*no_pairs, trial("a b", 150.0, round=3, purpose="second pass")]
    assert result(campaign, followed).sizes_without_value == (2,)
    parts_alone = [trial("a", 60.0, devices_per_node=1), TRIALS[4]]
    assert result(campaign, parts_alone).sizes_without_value == (1,)


@pytest.mark.parametrize(
    ("left", "text"),
    [
        (Remaining(0, 0, 0.0), "none left"),
        (Remaining(3, 1, None), "3 left in 1 round"),
        (Remaining(12, 5, 75.0), "12 left in 5 rounds, about 75 s"),
        (Remaining(12, 5, 600.0), "12 left in 5 rounds, about 10 min"),
        (Remaining(12, 5, 9000.0), "12 left in 5 rounds, about 2.5 h"),
    ],
)
def test_what_is_left_is_told_in_fitting_units(left: Remaining, text: str):
    assert remaining_text(left) == text


def test_hosts_that_a_planned_round_left_over_are_named():
    five = planned(campaign_request("a,b,c,d,e", "1,2"))
    assert list(left_over_notes(five.plan)) == [
        "Groups of 2 do not cover all hosts; left over in one round and measured in another: e."
    ]
    assert list(left_over_notes(planned(campaign_request("a,b", "1,2")).plan)) == []
