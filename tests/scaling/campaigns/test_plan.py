"""Sizes of sub-clusters, as they are written."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cli.campaign import CampaignOptions, run_campaign
from paceline.cli.output import TableFormat
from paceline.core.errors import UserError
from paceline.core.node_groups import ScalingKind
from paceline.files.recipe import load_recipe
from paceline.files.run_folder import Trial, this_controller
from paceline.machines.placement import Request
from paceline.machines.probe import inventory
from paceline.machines.slurm.record import SlurmJournal
from paceline.scaling.campaigns.plan import (
    CampaignRequest,
    batch_on,
    begin,
    equivalent_campaigns,
    new_campaign,
    parse_sizes,
    read_topology,
    scaling_kind,
    with_folder,
)
from paceline.scaling.campaigns.record import Campaign, known_trials, read_campaign
from tests.machines.slurm.fake_slurm import put
from tests.runs.series_example import make_finished
from tests.scaling.campaigns.test_campaign import campaign_request, made
from tests.scaling.fleet import Fleet


@pytest.mark.parametrize(
    ("text", "hosts", "sizes"),
    [
        ("1,2,4", 8, (1, 2, 4)),
        ("4, 1,2,4", 8, (1, 2, 4)),
        ("N", 5, (5,)),
        ("1,N", 5, (1, 5)),
        ("1,2,4,...,64", 64, (1, 2, 4, 8, 16, 32, 64)),
        ("1,2,4,...,N", 6, (1, 2, 4, 6)),
        ("1,2,4,...,N", 3, (1, 2, 3)),
        ("1,2,4,...,N", 1, (1,)),
        ("2,4,...", 9, (2, 4, 8)),
        ("4,6,...,12", 12, (4, 6, 8, 10, 12)),
        (None, 1, (1,)),
        (None, 12, (1, 2, 4, 8, 12)),
    ],
)
def test_sizes_are_read(text: str | None, hosts: int, sizes: tuple[int, ...]):
    assert parse_sizes(text, hosts) == sizes


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "lists no size"),
        ("0", "'0' is not a number of nodes"),
        ("-1", "'-1' is not a number of nodes"),
        ("two", "'two' is not a number of nodes"),
        ("1.5", "'1.5' is not a number of nodes"),
        ("²", "'²' is not a number of nodes"),
        ("99999999", "is not a number of nodes"),
        ("9", "there are 8 hosts"),
        ("...,N", "needs two increasing numbers"),
        ("4,2,...,N", "needs two increasing numbers"),
    ],
)
def test_what_is_no_list_of_sizes_is_refused(text: str, why: str):
    with pytest.raises(UserError, match=why):
        parse_sizes(text, 8)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "BUSY_SAMPLE_S", 0.001)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setitem(sys.modules, "paceline.machines.ssh", Fleet())


def planned(
    campaign_options: CampaignRequest, *overrides: str, recipe: str = "tiny-gpt"
) -> Campaign:
    request = replace(campaign_options.request, recipe=recipe, overrides=overrides)
    return new_campaign(Path("none"), replace(campaign_options, request=request), [])


def batches(campaign: Campaign) -> list[int]:
    return [point.spec.training.global_batch for point in campaign.points]


def test_the_kind_of_scaling_is_asked_for_or_the_recipes_or_follows_from_its_batch():
    def kind(name: str, variant: str | None = None) -> ScalingKind:
        return scaling_kind(load_recipe(name, variant), None)

    seeds = [kind(name) for name in ("opt-350m-sft", "opt-13b-sft", "llama31-8b", "llama31-405b")]
    assert seeds == ["weak"] * 4
    mlperf = [kind("llama2-70b-lora"), kind("flux1-schnell"), kind("llama31-8b", "mlperf")]
    assert mlperf == ["strong"] * 3
    assert (kind("tiny-gpt"), kind("gpt-1b3-tiny")) == ("weak", "strong")
    assert scaling_kind(load_recipe("opt-350m-sft"), "strong") == "strong"


@pytest.mark.parametrize(
    ("overrides", "kind", "expected"),
    [
        ((), "weak", [4 * 16, 8 * 16, 32 * 16]),
        (("global_batch=64 per node",), "weak", [32, 64, 256]),
        (("global_batch=96",), "weak", [48, 96, 384]),
        (("global_batch=96",), "strong", [96, 96, 96]),
        ((), "strong", [128, 128, 128]),
    ],
)
def test_the_batch_grows_under_weak_scaling_and_stays_under_strong(
    overrides: tuple[str, ...], kind: ScalingKind, expected: list[int]
):
    recipe = load_recipe("opt-13b-sft", None, overrides)
    points = [(1, 4), (1, 8), (4, 8)]
    assert [batch_on(recipe, kind, nodes, count, 8) for nodes, count in points] == expected


@pytest.mark.parametrize(
    ("name", "override", "kind", "why"),
    [
        ("tiny-gpt", "global_batch=16", "weak", "does not grow with the devices"),
        ("tiny-gpt", "batch_per_device=4", "strong", "needs one batch for all sizes"),
        ("tiny-gpt", "global_batch=3 per node", "weak", "a batch of 4.5 sequences"),
    ],
)
def test_a_recipe_that_does_not_say_enough_is_refused(
    name: str, override: str, kind: ScalingKind, why: str
):
    with pytest.raises(UserError, match=why):
        batch_on(load_recipe(name, None, [override]), kind, 3, 1, 2)


def test_points_below_one_node_come_first_and_use_a_part_of_the_devices():
    campaign = planned(campaign_request("a,b", "1,2", devices_per_node=(2, 1)))
    assert [(p.nodes, p.devices_per_node) for p in campaign.points] == [(1, 1), (1, 2), (2, 2)]
    assert batches(campaign) == [8, 16, 32]
    assert campaign.spec(("b",), 1).cluster.devices_per_node == 1


def test_a_size_that_no_point_has_gets_the_batch_of_its_kind():
    weak, strong = (
        planned(campaign_request("a,b,c,d", "1,4")),
        planned(campaign_request("a,b,c,d", "1,4"), recipe="gpt-1b3-tiny"),
    )
    assert weak.spec(("a", "b"), 1).training.global_batch == 16
    assert strong.spec(("a", "b"), 1).training.global_batch == 16
    assert strong.spec(("c", "d"), 1).cluster.hosts == ("c", "d")


def test_every_host_has_a_place_in_each_size_and_repeats_go_back_again():
    campaign = planned(campaign_request("node-[1-5]", "1,2", repeats=2))
    assert [round_.nodes for round_ in campaign.plan] == [1, 2, 2, 2, 2, 1]
    assert [round_.number for round_ in campaign.plan] == [1, 2, 3, 4, 5, 6]
    pairs = [round_ for round_ in campaign.plan if round_.nodes == 2 and round_.repeat == 1]
    assert pairs[0].left_over == ("node-5",) and pairs[1].made_up
    assert {host for round_ in pairs for group in round_.groups for host in group} == set(
        campaign.hosts
    )


def test_the_same_campaign_has_the_same_key_and_any_other_another():
    base = campaign_request("a,b", "1,2")
    key = planned(base).key
    assert planned(base).key == key
    others = [
        planned(campaign_request("a,c", "1,2")),
        planned(campaign_request("a,b", "1")),
        planned(base, "steps=7"),
        planned(replace(base, repeats=2)),
        planned(replace(base, split="random", seed=1)),
        planned(replace(base, rounds=2)),
    ]
    assert key not in {other.key for other in others}


def test_a_campaign_has_a_folder_of_its_own_and_is_found_again(tmp_path: Path):
    first, second = (
        made(tmp_path, campaign_request("a,b", "1")),
        made(tmp_path, campaign_request("a,b", "1")),
    )
    assert first.name != second.name and first.key == second.key
    assert equivalent_campaigns(tmp_path, second) == [first.name]
    assert read_campaign(tmp_path, first.name) == first
    assert read_campaign(tmp_path, "last").name == second.name
    with pytest.raises(UserError, match="does not exist in"):
        read_campaign(tmp_path, "other")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "campaign.json").write_text("{")
    assert equivalent_campaigns(tmp_path, second) == [first.name]


def test_a_name_is_gone_on_with_and_never_taken_for_something_else(tmp_path: Path):
    request = campaign_request("a,b", "1", name="night")
    first = made(tmp_path, request)
    assert first.name == "night" and made(tmp_path, request) == first
    with pytest.raises(UserError, match="measures something else"):
        new_campaign(tmp_path, replace(request, sizes="2"), [])
    for bad in ("last", "a/b", "../x", "a b", ""):
        with pytest.raises(UserError, match="is not a valid name of a scaling test"):
            new_campaign(tmp_path, replace(request, name=bad), [])
    (tmp_path / "checks" / "2026-01-01-check").mkdir(parents=True)
    with pytest.raises(UserError, match="--name checks: is a folder with other contents"):
        new_campaign(tmp_path, replace(request, name="checks"), [])
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked" / "lock").touch()
    assert new_campaign(tmp_path, replace(request, name="locked"), []).name == "locked"


def test_rounds_that_were_added_are_not_lost_when_it_goes_on(tmp_path: Path):
    campaign = made(tmp_path, campaign_request("a,b", "1"))
    extra = campaign.plan[0].model_copy(update={"number": 2, "purpose": "bisection"})
    begin(tmp_path, campaign.model_copy(update={"plan": campaign.plan}))
    longer = campaign.model_copy(update={"plan": (*campaign.plan, extra)})
    (tmp_path / campaign.name / "campaign.json").write_text(longer.model_dump_json())
    assert begin(tmp_path, with_folder(tmp_path, campaign)).plan == longer.plan


def test_this_machine_alone_has_points_below_one_node():
    request = campaign_request("a", "1", devices_per_node=(1, 2))
    where = replace(request.request.where, hosts=(), launcher="local")
    campaign = planned(replace(request, request=replace(request.request, where=where)))
    assert len(campaign.hosts) == 1 and batches(campaign) == [8, 16]
    assert campaign.spec(campaign.hosts, 2).cluster.hosts == ()


def test_what_else_runs_here_is_told_once_and_only_where_this_machine_trains(
    monkeypatch: pytest.MonkeyPatch,
):
    shares = iter(range(90, 99))
    monkeypatch.setattr(inventory.psutil, "cpu_percent", lambda interval: next(shares))
    remote = planned(campaign_request("node-[1-4]", "1,2,4"))
    assert not any("other programs" in notice for notice in remote.notices)
    here = campaign_request("a", "1", devices_per_node=(1, 2))
    where = replace(here.request.where, hosts=(), launcher="local")
    local = planned(replace(here, request=replace(here.request, where=where)))
    assert sum("other programs" in notice for notice in local.notices) == 1


@pytest.mark.parametrize(
    "text",
    [
        "node[1-2] left\nnode3 right # far\n\n",
        "SwitchName=left Nodes=node[1-2]\nSwitchName=right Level=0 LinkSpeed=1 Nodes=node3\n"
        "SwitchName=top Switches=left,right\n",
    ],
)
def test_switches_are_read_in_both_forms(tmp_path: Path, text: str):
    file = tmp_path / "topology"
    file.write_text(text)
    assert read_topology(file) == {"node1": "left", "node2": "left", "node3": "right"}


def test_a_line_that_names_no_switch_is_refused_with_its_number(tmp_path: Path):
    file = tmp_path / "topology"
    file.write_text("node1 left\nnode2\n")
    with pytest.raises(UserError, match=r"topology:2: is not a host and its switch"):
        read_topology(file)
    campaign = campaign_request("node[1-2]", "1", split="topology", topology=tmp_path / "none")
    with pytest.raises(UserError, match="cannot be read"):
        planned(campaign)


def test_devices_that_no_point_has_are_an_error_and_such_runs_are_none_of_the_campaign(
    tmp_path: Path,
):
    campaign = made(tmp_path, campaign_request("node-[1-2]", "1"))
    with pytest.raises(UserError, match="has no runs on 7 devices per node; allowed: 1"):
        campaign.spec(("node-1",), 7)
    cluster = campaign.points[0].spec.cluster.model_copy(update={"devices_per_node": 7})
    spec = campaign.points[0].spec
    training = spec.training.model_copy(update={"global_batch": 7 * spec.layout.micro_batch})
    other = spec.model_copy(update={"cluster": cluster, "training": training})
    trial = Trial(campaign=campaign.name, round=1, purpose="plan", hosts=("node-1",))
    make_finished(tmp_path, 1, 0.2, spec=other, trial=trial)
    assert known_trials(tmp_path, campaign) == {}


def test_slurm_is_taken_when_its_controller_answers_and_not_for_its_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    alone = CampaignRequest(Request("tiny-gpt", device="cpu"), "1,2")
    put(
        tmp_path,
        monkeypatch,
        sbatch="true",
        sinfo="echo 'idle node-[1-2]'",
        scontrol="echo 'Slurmctld(primary) at head is UP'",
    )
    assert new_campaign(tmp_path, alone, []).hosts == ("node-1", "node-2")
    put(tmp_path, monkeypatch, scontrol="sleep 0; echo 'at head is DOWN'")
    with pytest.raises(UserError):
        new_campaign(tmp_path, alone, [])
    assert new_campaign(tmp_path, replace(alone, sizes=None), []).hosts == (os.uname().nodename,)


def test_jobs_that_a_dead_controller_left_are_cancelled_when_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    campaign = made(tmp_path, campaign_request("node-[1-2]", "1"))
    trial = Trial(campaign=campaign.name, round=1, purpose="plan", hosts=("node-1",))
    spec = campaign.spec(("node-1",), campaign.whole_node)
    gone = this_controller().model_copy(update={"boot_id": "another boot"})
    left = make_finished(
        tmp_path, 1, 0.2, spec=spec, trial=trial, status="running", controller=gone
    )
    SlurmJournal(left).begin("4711")
    calls = put(tmp_path, monkeypatch, scancel="true")
    how = CampaignOptions(TableFormat.json, tmp_path, resume=campaign.name, extra_rounds=0)
    assert run_campaign(CampaignRequest(Request("")), how) == 0
    assert calls.read_text() == "scancel 4711\n"
    run_campaign(CampaignRequest(Request("")), how)
    assert calls.read_text() == "scancel 4711\n"
