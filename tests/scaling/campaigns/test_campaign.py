"""A scaling test on simulated hosts: where groups run, which values are kept, and resuming."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread

import pytest

from paceline.core.errors import UserError
from paceline.core.hosts import Host, expand
from paceline.core.job import Job
from paceline.files.run_folder import groups, read_record, run_folders
from paceline.machines.placement import HostPlacement, Request
from paceline.machines.probe import inventory
from paceline.runs.flow import Watcher
from paceline.runs.plan import Plan
from paceline.runs.tasks.slot import JobSlot
from paceline.scaling.analysis.result import sentences
from paceline.scaling.campaigns.plan import (
    CampaignRequest,
    begin,
    new_campaign,
    resumed_campaign,
    with_folder,
)
from paceline.scaling.campaigns.record import (
    Campaign,
    Group,
    PlannedRound,
    TrialResult,
    exclusive_lock,
    known_trials,
)
from paceline.scaling.campaigns.result import campaign_analysis
from paceline.scaling.campaigns.rounds import (
    CampaignRunner,
    Limits,
    Remaining,
    SubCluster,
    SubClusterEnd,
)
from tests.scaling.fleet import STEP_S, Fleet, FleetRun

BATCH = 8


@pytest.fixture(autouse=True)
def fleet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fleet:
    monkeypatch.setattr(inventory, "BUSY_SAMPLE_S", 0.001)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    made = Fleet()
    monkeypatch.setitem(sys.modules, "paceline.machines.ssh", made)
    return made


def campaign_request(hosts: str, sizes: str, **fields: object) -> CampaignRequest:
    named = tuple(Host(name=name) for name in expand(hosts))
    request = Request("tiny-gpt", device="cpu", where=HostPlacement(hosts=named))
    return CampaignRequest(request, sizes, **fields)  # type: ignore[arg-type]


@dataclass
class Notes:
    """Observer that records its calls."""

    rounds: list[tuple[int, list[Group], Remaining]] = field(default_factory=list)
    results: list[TrialResult] = field(default_factory=list)
    lost_hosts: dict[str, str] = field(default_factory=dict)
    on_end: Callable[[TrialResult], None] = lambda _: None

    def round_begins(self, round: PlannedRound, groups: Sequence[Group], left: Remaining) -> None:
        self.rounds.append((round.number, list(groups), left))

    @contextmanager
    def running(self, task: SubCluster, plan: Plan) -> Iterator[Watcher]:
        yield lambda _: None

    def task_ended(self, task: SubCluster, kept: SubClusterEnd) -> None:
        self.results.append(kept.result)
        self.on_end(kept.result)

    def slot_lost(self, slot: JobSlot, why: str, for_good: bool) -> None:
        self.lost_hosts[slot.name] = why


def made(root: Path, request: CampaignRequest) -> Campaign:
    return begin(root, with_folder(root, new_campaign(root, request, ["paceline", "scale"])))


def made_runner(root: Path, campaign: Campaign, limits: Limits, notes: Notes) -> CampaignRunner:
    return CampaignRunner(
        notes, root, ["paceline"], campaign=campaign, round_begins=notes.round_begins, limits=limits
    )


def run(
    root: Path, campaign: Campaign, limits: Limits | None = None, notes: Notes | None = None
) -> CampaignRunner:
    going = made_runner(root, campaign, limits or Limits(), notes or Notes())
    if notes:
        notes.stop = going.stop  # type: ignore[attr-defined]
    going.run()
    return going


def test_every_size_is_measured_and_every_run_is_an_ordinary_one(tmp_path: Path, fleet: Fleet):
    campaign = made(tmp_path, campaign_request("node-[1-4]", "1,2,4"))
    going = run(tmp_path, campaign)

    assert [len(hosts) for hosts in fleet.runs] == [1] * 4 + [2] * 2 + [4]
    values = {t.hosts: t.samples_per_s for t in going.trials.values()}
    assert values["node-1",] == pytest.approx(BATCH / STEP_S, rel=0.01)
    assert values["node-1", "node-2", "node-3", "node-4"] == pytest.approx(
        4 * BATCH / STEP_S / 1.02, rel=0.01
    )
    records = [read_record(folder) for folder in run_folders(tmp_path)]
    assert {r.status for r in records} == {"ok"}
    assert {r.trial.hosts for r in records if r.trial} == set(values)
    assert sorted(map(len, groups(tmp_path).values())) == [1, 2, 4]


def test_sub_clusters_of_a_round_run_at_the_same_time_as_many_as_allowed(
    tmp_path: Path, fleet: Fleet
):
    fleet.run_s = 0.6
    start = fleet.submit

    def in_pairs(job: Job, folder: Path) -> FleetRun:
        """A run that ends when its partner has started, or has not in a minute."""
        handle = start(job, folder)
        at = [other is handle for other in fleet.handles].index(True)
        with_partner = at // 2 * 2 + 2
        poll, latest = handle.poll, time.monotonic() + 60
        handle.poll = lambda: (
            poll() if len(fleet.handles) >= with_partner or time.monotonic() > latest else None
        )
        return handle

    fleet.submit = in_pairs
    campaign = made(tmp_path, campaign_request("node-[1-4]", "1"))
    going = run(tmp_path, campaign, Limits(max_parallel=2))
    spans = sorted((t.started_unix or 0, t.ended_unix or 0) for t in going.trials.values())
    at_once = [sum(s <= start < e for s, e in spans) for start, _ in spans]
    assert max(at_once) == 2


def test_what_is_finished_is_not_run_again_and_what_is_missing_is(tmp_path: Path, fleet: Fleet):
    campaign = made(tmp_path, campaign_request("node-[1-4]", "1,2"))
    notes = Notes()
    notes.on_end = lambda _: notes.stop.set() if len(notes.results) == 4 else None  # type: ignore[attr-defined]
    run(tmp_path, campaign, Limits(max_parallel=1), notes)
    assert len(fleet.runs) == 4

    again = run(tmp_path, resumed_campaign(tmp_path, campaign.name))
    assert [len(hosts) for hosts in fleet.runs] == [1] * 4 + [2] * 2
    assert len(again.trials) == 6 and all(t.ok for t in again.trials.values())
    run(tmp_path, resumed_campaign(tmp_path, "last"))
    assert len(fleet.runs) == 6


def test_a_stop_ends_what_runs_and_starts_nothing_more(tmp_path: Path, fleet: Fleet):
    fleet.run_s = 60
    campaign = made(tmp_path, campaign_request("node-[1-3]", "1,3"))
    going = made_runner(tmp_path, campaign, Limits(), Notes())
    thread = Thread(target=going.run)
    thread.start()
    while len(fleet.handles) < 3:
        thread.join(0.05)
    going.stop.set()
    thread.join(30)
    assert not thread.is_alive()
    assert len(fleet.runs) == 3 and all(handle.stopped for handle in fleet.handles)
    assert {read_record(f).status for f in run_folders(tmp_path)} == {"cancelled"}
    assert len(going.missing(campaign.plan[0])) == 3


def test_a_run_of_another_configuration_does_not_count(tmp_path: Path, fleet: Fleet):
    campaign = made(tmp_path, campaign_request("node-[1-2]", "1"))
    run(tmp_path, campaign)
    for folder in run_folders(tmp_path)[:1]:
        record = json.loads((folder / "run.json").read_text())
        record["spec"]["training"]["steps"] += 1
        (folder / "run.json").write_text(json.dumps(record))
    run(tmp_path, campaign)
    assert len(fleet.runs) == 3


def test_a_host_that_is_down_is_a_result_with_a_cause_and_taken_out(tmp_path: Path, fleet: Fleet):
    fleet.down = {"node-3"}
    notes = Notes()
    campaign = made(tmp_path, campaign_request("node-[1-5]", "1,2,5"))
    going = run(tmp_path, campaign, notes=notes)

    failed = [t for t in going.trials.values() if not t.ok]
    assert [(t.hosts, t.reason) for t in failed] == [(("node-3",), "node-3: does not answer")]
    assert list(notes.lost_hosts) == ["node-3"]
    assert not any("node-3" in hosts for hosts in fleet.runs[5:])
    pairs = [set(hosts) for hosts in fleet.runs if len(hosts) == 2]
    assert {host for pair in pairs for host in pair} == {"node-1", "node-2", "node-4", "node-5"}
    assert going.unplaced_hosts[campaign.plan[-1].number] == (
        "node-1",
        "node-2",
        "node-4",
        "node-5",
    )


def test_the_partners_of_a_host_that_dies_work_together_instead(tmp_path: Path, fleet: Fleet):
    fleet.dying = {"node-2"}
    going = run(tmp_path, made(tmp_path, campaign_request("node-[1-5]", "2")))
    good = {t.hosts for t in going.trials.values() if t.ok}
    assert ("node-3", "node-4") in good
    assert any("node-1" in hosts or "node-5" in hosts for hosts in good)
    assert going.excluded_hosts["node-2"] == "the connection to node-2 was lost"


def test_nothing_goes_on_when_nothing_works(tmp_path: Path, fleet: Fleet):
    fleet.broken = "out of luck"
    going = run(tmp_path, made(tmp_path, campaign_request("node-[1-2]", "1,2")))
    assert len(fleet.runs) == 2
    assert going.stop_reason and "out of luck" in going.stop_reason


def test_when_every_host_is_at_fault_at_once_none_is_taken_out(tmp_path: Path, fleet: Fleet):
    campaign = made(tmp_path, campaign_request("node-[1-2]", "1,2"))
    run(tmp_path, campaign)
    (folder,) = [f for f in run_folders(tmp_path) if "2xcpu" in f.name]
    shutil.rmtree(folder)
    fleet.down = {"node-1", "node-2"}
    going = run(tmp_path, campaign)
    assert (
        going.stop_reason
        and "every host failed, so this machine may be at fault" in going.stop_reason
    )
    assert going.excluded_hosts == {}


def test_a_campaign_stops_when_its_allocation_ends_and_goes_on_in_another(
    tmp_path: Path, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "paceline.machines.slurm", fleet)
    request = campaign_request("node-[1-2]", "1,2", repeats=2)
    where = replace(request.request.where, allocation="7", launcher="slurm")
    campaign = made(tmp_path, replace(request, request=replace(request.request, where=where)))
    fleet.broken = "the allocation ended"

    def ended(job: str) -> tuple[Host, ...]:
        raise UserError(f"job {job}", "is not running, so it has no hosts")

    monkeypatch.setattr("paceline.runs.tasks.slot.allocation_hosts", ended)
    going = run(tmp_path, campaign)
    assert (
        going.stop_reason == "job 7: is not running, so it has no hosts"
        and going.excluded_hosts == {}
        and len(fleet.runs) == 2
    )
    fleet.broken = None

    monkeypatch.setattr(
        "paceline.scaling.campaigns.plan.allocation_hosts", lambda _: (Host(name="node-1"),)
    )
    with pytest.raises(UserError, match="needs node-2, which job 8 lacks"):
        resumed_campaign(tmp_path, campaign.name, "8")
    hosts = tuple(Host(name=name) for name in campaign.hosts)
    monkeypatch.setattr("paceline.scaling.campaigns.plan.allocation_hosts", lambda _: hosts)
    going = run(tmp_path, resumed_campaign(tmp_path, campaign.name, "8"))
    assert all(t.ok for t in going.trials.values()) and len(going.trials) == 6
    spec = going.campaign.spec(("node-1",), 1)
    assert (spec.cluster.slurm.allocation, spec.cluster.slurm.retries) == ("8", 0)


def test_a_resumed_campaign_tries_failed_sub_clusters_again(tmp_path: Path, fleet: Fleet):
    fleet.down = {"node-3"}
    campaign = made(tmp_path, campaign_request("node-[1-3]", "1,3"))
    run(tmp_path, campaign)
    fleet.down, fleet.runs = set(), []
    going = run(tmp_path, campaign)
    assert fleet.runs == [("node-3",), ("node-1", "node-2", "node-3")]
    assert all(t.ok for t in going.trials.values())


def test_runs_that_are_too_short_for_a_figure_say_so_and_still_do_when_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tests.scaling.fleet.NUM_STEPS", 3)
    going = run(tmp_path, made(tmp_path, campaign_request("node-[1-2]", "1")))
    assert going.stop_reason and "3 steady steps; at least 5 are needed" in going.stop_reason
    again = known_trials(tmp_path, going.campaign)
    assert again == going.trials
    assert {trial.status for trial in again.values()} == {"incomplete"}


def test_a_slow_node_is_paired_with_proven_ones(tmp_path: Path, fleet: Fleet):
    fleet.slow = {"node-05": 0.10}
    campaign = made(tmp_path, campaign_request("node-[01-10]", "1"))
    going = run(tmp_path, campaign, Limits(extra_rounds=4))
    second = [t for t in going.trials.values() if t.purpose == "second pass"]
    partners = {h for t in second if "node-05" in t.hosts for h in t.hosts} - {"node-05"}
    assert len(partners) == 2
    batches = {t.global_batch for t in second}
    assert batches == {2 * BATCH}
    fleet.runs.clear()
    run(tmp_path, resumed_campaign(tmp_path, campaign.name))
    assert fleet.runs == []


def test_no_more_extra_rounds_run_than_allowed(tmp_path: Path, fleet: Fleet):
    fleet.slow = {"node-05": 0.10}
    going = run(
        tmp_path, made(tmp_path, campaign_request("node-[01-10]", "1")), Limits(extra_rounds=1)
    )
    assert [round_.purpose for round_ in going.campaign.plan] == ["plan", "second pass"]
    going = run(
        tmp_path, made(tmp_path, campaign_request("node-[01-10]", "1")), Limits(extra_rounds=0)
    )
    assert [round_.purpose for round_ in going.campaign.plan] == ["plan"]


def test_a_second_pass_that_was_cut_short_is_gone_on_with_and_none_is_planned_twice(
    tmp_path: Path, fleet: Fleet
):
    fleet.slow = {"node-05": 0.10}
    campaign = made(tmp_path, campaign_request("node-[01-10]", "1"))
    run(tmp_path, campaign, Limits(extra_rounds=1))
    going = run(tmp_path, resumed_campaign(tmp_path, campaign.name))
    rounds = [round_ for round_ in going.campaign.plan if round_.purpose == "second pass"]
    partners = {host for round_ in rounds for host in round_.groups[0]} - {"node-05"}
    assert len(rounds) == len(partners) == 2

    other = made(tmp_path, replace(campaign_request("node-[01-10]", "1"), name="dying"))
    run(tmp_path, other, Limits(extra_rounds=0))
    fleet.dying = partners
    going = run(tmp_path, resumed_campaign(tmp_path, "dying"))
    assert [round_.purpose for round_ in going.campaign.plan].count("second pass") == 2


def test_a_group_that_is_slow_without_a_slow_node_is_halved_and_measured_again(
    tmp_path: Path, fleet: Fleet
):
    fleet.behind = {f"node-{n}" for n in range(1, 5)}
    going = run(tmp_path, made(tmp_path, campaign_request("node-[1-8]", "1,2,8")))
    halves = [t for t in going.trials.values() if t.purpose == "bisection"]
    assert {t.hosts for t in halves} == {
        tuple(f"node-{n}" for n in numbers) for numbers in (range(1, 5), range(5, 9), range(1, 9))
    }
    assert {t.global_batch for t in halves} == {4 * BATCH, 8 * BATCH} and all(t.ok for t in halves)
    analysis = campaign_analysis(going.campaign, going.trials.values(), going.context)
    assert any("between node-[1-4] and node-[5-8]" in sentence for sentence in sentences(analysis))


def test_what_is_left_is_told_with_a_time(tmp_path: Path, fleet: Fleet):
    fleet.run_s = 0.3
    notes = Notes()
    run(tmp_path, made(tmp_path, campaign_request("node-[1-4]", "1,2")), notes=notes)
    left = [(remaining.trials, remaining.rounds) for _, _, remaining in notes.rounds]
    assert left == [(6, 2), (2, 1)]
    assert notes.rounds[0][2].seconds is None and 0.2 < (notes.rounds[1][2].seconds or 0) < 10


def test_a_campaign_is_run_by_one_process_at_a_time(tmp_path: Path):
    with (
        exclusive_lock(tmp_path / "mine"),
        pytest.raises(UserError, match="is running in process"),
        exclusive_lock(tmp_path / "mine"),
    ):
        pass
    with exclusive_lock(tmp_path / "mine"):
        pass
