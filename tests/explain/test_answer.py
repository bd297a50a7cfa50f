"""Every cause is found with its seconds; none if no time is lost."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import UserError
from paceline.core.layout import Layout, Recompute
from paceline.core.result import ReferenceComparison
from paceline.explain.baseline import baseline_of
from paceline.explain.diagnosis import explain, explain_run
from paceline.explain.explanation import Explanation
from paceline.explain.observed_run import observed_run
from paceline.explain.step_breakdown import RankEvents, StepParts, break_down_steps
from paceline.explain.work_causes import recomputed_share
from paceline.files.documents import write_text, write_value
from paceline.files.events import StepEvent
from paceline.profiles.profile import PROFILE_FILE, Profile
from tests.command import paceline
from tests.example import SHAPE
from tests.explain.example import STEPS, write_parts
from tests.files.test_events import lines

STAGED = Layout(pp=2, micro_batch=4)
CROWDED = {"cores": "0", "threads": 1}


def recomputing(recompute: Recompute, micro_batch: int = 4) -> Layout:
    return Layout(micro_batch=micro_batch, recompute=recompute)


def write_profile(folder: Path, host_gap_s: float) -> None:
    """Write a profile of a step of 0.4 s."""
    profile = Profile(
        tool="torch", run=folder.name, ranks=(0,), steps=(5,), step_time_s=0.4, n=2,
        parts={"gemm": 0.4 - host_gap_s, "host_gap": host_gap_s},
    )  # fmt: skip
    write_value(folder / PROFILE_FILE, profile)


def causes_of(explanation: Explanation) -> list[str]:
    return [cause.cause for cause in explanation.causes]


def answer(root: Path, name: str = "it", against: str | None = None, **more: Any) -> Explanation:
    return explain(root / name, against, root, **more)


@pytest.mark.parametrize(
    ("cause", "seconds", "written"),
    [
        ("data starvation", 0.1, {"ranks": ({"data": 0.1}, {})}),
        ("checkpoint stalls", 0.1, {"ranks": ({"checkpoint": 0.1}, {"checkpoint": 0.1})}),
        ("slow rank", 0.1, {"ranks": ({}, {"work": 1.5})}),
        ("other load", 0.1, {"ranks": ({"waited": 0.1}, {})}),
        ("clock limit", 0.1, {"ranks": ({"waited": 0.1, "throttled": 0.1}, {})}),
        ("thread binding", 0.1, {"ranks": ({"waited": 0.1}, {}), "start": CROWDED}),
        ("pipeline bubble", 0.1, {"ranks": ({"comm": 0.1},) * 2, "layout": STAGED}),
    ],
)
def test_a_wait_is_found_with_its_seconds(
    cause: str, seconds: float, written: dict[str, Any], tmp_path: Path
):
    write_parts(tmp_path, "it", **written)
    explanation = answer(tmp_path)
    (found,) = explanation.causes
    assert found.cause == cause
    assert found.seconds == pytest.approx(seconds, rel=0.05)
    assert found.share == pytest.approx(found.seconds / explanation.lost_s)
    assert found.evidence[0].unit == "s/step" and found.evidence[0].n == STEPS


@pytest.mark.parametrize(
    ("cause", "written", "usual"),
    [
        ("slow link", {"ranks": ({"comm": 0.1},) * 2}, {}),
        (
            "small micro-batch",
            {"ranks": ({"work": 1.5},) * 2, "layout": Layout(micro_batch=1)},
            {},
        ),
        (
            "recompute",
            {"ranks": ({"work": 1.5},) * 2, "layout": Layout(micro_batch=4, recompute="full")},
            {},
        ),
        ("memory allocator", {"ranks": ({"work": 1.5, "system": 0.1},) * 2}, {}),
        ("thread binding", {"ranks": ({"work": 1.5},) * 2}, {"start": {"threads": 2}}),
    ],
)
def test_longer_work_is_explained_by_different_settings(
    cause: str, written: dict[str, Any], usual: dict[str, Any], tmp_path: Path
):
    write_parts(tmp_path, "it", **written)
    write_parts(tmp_path, "usual", **usual)
    explanation = answer(tmp_path, against="usual")
    (found,) = explanation.causes
    assert found.cause == cause
    assert found.seconds == pytest.approx(0.1, rel=0.05)
    assert explanation.lost_s == pytest.approx(0.1, rel=0.05)
    assert explanation.unexplained_s == pytest.approx(0, abs=0.005)


EQUAL = {"experts": 0.08, "dispatch": 0.01, "comm": 0.01, "overload": 1.0}
EXPERTS = Layout(micro_batch=4, ep=2)


def test_unequal_loads_of_experts_are_no_slow_rank(tmp_path: Path):
    """Ranks with 1.5 and 0.5 times the mean load: 120 and 40 ms of experts, 15 ms of exchange."""
    loaded = {**EQUAL, "experts": 0.12, "dispatch": 0.015, "comm": 0.015, "overload": 1.5}
    idle = {**loaded, "experts": 0.04, "dispatch": 0.095}
    write_parts(tmp_path, "it", ({**loaded, "work": 1.2}, {**idle, "work": 0.8}), layout=EXPERTS)
    write_parts(tmp_path, "usual", (EQUAL, EQUAL), layout=EXPERTS)
    for against in (None, "usual"):
        explanation = answer(tmp_path, against=against)
        assert [cause.cause for cause in explanation.causes] == ["expert imbalance"]
        (found,) = explanation.causes
        assert found.seconds == pytest.approx(0.045, rel=0.02)
        figures = {each.what: each.value for each in found.evidence}
        assert figures["step with equal loads"] == pytest.approx(0.21, rel=0.02)
        assert figures["tokens/s with equal loads"] == pytest.approx(255 / 210, rel=0.02)


def test_longer_exchanges_of_tokens_are_not_a_slow_link(tmp_path: Path):
    slow = {**EQUAL, "dispatch": 0.05, "comm": 0.05}
    write_parts(tmp_path, "it", (slow, slow), layout=EXPERTS)
    write_parts(tmp_path, "usual", (EQUAL, EQUAL), layout=EXPERTS)
    (found,) = answer(tmp_path, against="usual").causes
    assert found.cause == "dispatch" and found.seconds == pytest.approx(0.04)
    # Without a baseline, the exchange has no expected time.
    assert answer(tmp_path).causes == ()


def test_less_recomputation_than_the_baseline_is_not_a_cause(tmp_path: Path):
    write_parts(tmp_path, "it", ({"work": 1.5},) * 2, layout=recomputing("selective"))
    write_parts(tmp_path, "usual", layout=recomputing("full"))
    assert answer(tmp_path, against="usual").causes == ()


def test_recomputation_takes_the_time_that_the_baseline_does_not_recompute(tmp_path: Path):
    """With different micro-batches it is attributed by FLOPs."""
    shares: dict[str, float] = {}
    for name, layout in (("it", recomputing("full", 2)), ("usual", recomputing("selective"))):
        folder = write_parts(tmp_path, name, ({"work": 3.0},) * 2, layout=layout)
        shares[name] = recomputed_share(observed_run(folder))
    write_parts(tmp_path, "it", ({"work": 6.0},) * 2, layout=recomputing("full", 2))
    explanation = answer(tmp_path, against="usual")
    found = next(cause for cause in explanation.causes if cause.cause == "recompute")
    more = shares["it"] - shares["usual"]
    assert 0 < more < shares["it"]
    assert found.seconds == pytest.approx(more * explanation.parts_s["compute"])
    assert [e.value for e in found.evidence[-2:]] == [shares["it"], shares["usual"]]


def test_recomputation_that_memory_needs_is_not_lost(tmp_path: Path):
    run = observed_run(write_parts(tmp_path, "it", device="H100-SXM", layout=recomputing("full")))
    spared = explain_run(run, baseline_of(run, None, tmp_path), None)
    assert [cause.cause for cause in spared.causes] == ["recompute"]
    assert spared.unexplained_s == pytest.approx(0, abs=1e-3)
    facts = run.facts.model_copy(update={"device_memory_bytes": 1.0})
    run = replace(run, report=replace(run.report, facts=facts))
    needed = explain_run(run, baseline_of(run, None, tmp_path), None)
    assert needed.causes == ()
    assert needed.lost_s == pytest.approx(spared.lost_s - spared.causes[0].seconds)


def test_longer_work_without_different_settings_is_unexplained(tmp_path: Path):
    write_parts(tmp_path, "it", ({"work": 1.5},) * 2)
    write_parts(tmp_path, "usual")
    explanation = answer(tmp_path, against="usual")
    assert explanation.causes == ()
    assert (
        explanation.unexplained_s
        == pytest.approx(explanation.lost_s)
        == pytest.approx(0.1, rel=0.05)
    )
    assert "for no recorded reason" in explanation.notes[0]


def test_a_run_as_fast_as_its_baseline_gets_no_cause(tmp_path: Path):
    for name in ("it", "usual"):
        write_parts(tmp_path, name, ({"data": 0.05, "comm": 0.05},) * 2)
    assert answer(tmp_path, against="usual").causes == ()
    write_parts(tmp_path, "alone")
    assert answer(tmp_path, "alone").causes == ()


def test_causes_are_sorted_by_share(tmp_path: Path):
    write_parts(tmp_path, "it", ({"data": 0.05, "checkpoint": 0.2}, {"checkpoint": 0.2}))
    first, second = answer(tmp_path).causes
    assert (first.cause, second.cause) == ("checkpoint stalls", "data starvation")
    assert first.share + second.share == pytest.approx(1, abs=0.01)


def test_a_baseline_of_another_batch_is_scaled_by_its_sequences(tmp_path: Path):
    write_parts(tmp_path, "it")
    write_parts(tmp_path, "twice", ({"work": 2.0},) * 2, global_batch=16)
    explanation = answer(tmp_path, against="twice")
    assert explanation.baseline_s == pytest.approx(0.2, rel=0.02)
    assert "is scaled by 0.5" in explanation.notes[0]


def test_a_host_that_a_campaign_flagged_is_evidence(tmp_path: Path):
    write_parts(tmp_path, "it", ({}, {"work": 1.5}))
    write_text(tmp_path / "campaign-1" / "scale.json", json.dumps({"flagged": ["h"]}))
    (cause,) = answer(tmp_path).causes
    assert [e.source for e in cause.evidence if "flagged" in e.what] == ["scaling test campaign-1"]


def test_a_profile_adds_the_host_gap(tmp_path: Path):
    write_parts(tmp_path, "it", ({"comm": 0.1},) * 2, device="H100-SXM")
    folder = write_parts(tmp_path, "profiled", device="H100-SXM")
    write_profile(folder, 0.1)
    outputs = [paceline("explain", "it", "--profile", name, "--json", runs=tmp_path)
            for name in ("profiled", folder / PROFILE_FILE)]  # fmt: skip
    (cause,) = json.loads(outputs[0].stdout)["causes"]
    assert cause["cause"] == "host gap" and cause["evidence"][0]["value"] == 0.25
    assert cause["seconds"] == pytest.approx(0.3 / 4, rel=0.02)
    assert outputs[0].stdout == outputs[1].stdout
    assert [cause.cause for cause in answer(tmp_path, "profiled").causes] == ["host gap"]
    with pytest.raises(UserError, match="was not profiled"):
        answer(tmp_path, profile="it")


def test_a_host_gap_is_compared_with_the_baselines(tmp_path: Path):
    folder = write_parts(tmp_path, "it", ({"comm": 0.2},) * 2, device="H100-SXM")
    usual = write_parts(tmp_path, "usual", device="H100-SXM")
    write_profile(folder, 0.2)
    # Without a profile the baseline's host gap is unknown.
    for against in ("usual", "estimate"):
        assert "host gap" not in causes_of(answer(tmp_path, against=against))
    write_profile(usual, 0.1)
    explanation = answer(tmp_path, against="usual")
    gap = next(cause for cause in explanation.causes if cause.cause == "host gap")
    assert gap.seconds == pytest.approx(explanation.step_s / 2 - (explanation.baseline_s or 0) / 4)
    assert [evidence.value for evidence in gap.evidence] == [0.5, 0.25]
    write_profile(usual, 0.4)
    assert "host gap" not in causes_of(answer(tmp_path, against="usual"))


def test_the_parts_add_up_to_the_step(tmp_path: Path):
    write_parts(tmp_path, "it", ({"data": 0.02, "waited": 0.03}, {"comm": 0.01, "waited": 0.02}))
    explanation = answer(tmp_path)
    assert sum(explanation.parts_s.values()) == pytest.approx(explanation.step_s)
    assert list(explanation.parts_s) == [field.name for field in fields(StepParts)]


def parts_of(root: Path, *ranks: dict[str, float]) -> dict[str, float]:
    """Return the parts of a run whose ranks have these times."""
    write_parts(root, "it", ranks)
    explanation = answer(root)
    assert sum(explanation.parts_s.values()) == pytest.approx(explanation.step_s)
    return dict(explanation.parts_s)


def test_delays_of_two_ranks_that_overlap_are_counted_once(tmp_path: Path):
    parts = parts_of(tmp_path, {"data": 0.3, "comm": 0.05}, {"work": 2.5, "comm": 0.05})
    assert parts["compute"] == pytest.approx(0.2, rel=0.05)
    assert parts["data"] + parts["straggler"] == pytest.approx(0.3, rel=0.05)
    assert min(parts["data"], parts["straggler"]) > 0.1


def test_a_checkpoint_that_one_rank_saves_is_a_checkpoint_wait(tmp_path: Path):
    parts = parts_of(tmp_path, {"checkpoint": 0.2}, {"comm": 0.2})
    assert parts["checkpoint"] == pytest.approx(0.2)
    assert parts["compute"] == pytest.approx(0.2, rel=0.02)


def test_ranks_that_wait_for_cores_at_once_wait_once(tmp_path: Path):
    parts = parts_of(tmp_path, *({"waited": 0.1, "comm": 0.15},) * 2)
    assert parts["core_wait"] == pytest.approx(0.1)
    assert parts["communication"] == pytest.approx(0.15)


def test_ranks_that_wait_for_cores_in_turns_delay_each_other():
    rng = np.random.default_rng(3)
    ranks: list[list[StepEvent]] = [[], []]
    for step, (first, second) in enumerate(rng.uniform(0, 0.2, (200, 2)), 1):
        # Each rank waits 0.1 s for the link, and in a second collective for the other rank.
        for rank, mine, other in ((0, first, second), (1, second, first)):
            event = {
                "step": step,
                "step_time_s": 0.3 + mine + other,
                "comm_wait_s": 0.1 + other,
                "cores": {"waited_s": mine},
            }
            ranks[rank].append(StepEvent.model_validate(event))
    account = break_down_steps(
        {r: RankEvents(None, tuple(e)) for r, e in enumerate(ranks)}, None, None
    )
    assert account
    assert account.parts.core_wait == pytest.approx(0.2, rel=0.1)
    assert account.parts.communication == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("seed", range(8))
def test_no_part_is_negative(seed: int, tmp_path: Path):
    rng = np.random.default_rng(seed)
    names = ("data", "checkpoint", "waited", "comm")
    ranks = [{name: float(rng.exponential(0.2)) for name in names} for _ in range(2)]
    parts = parts_of(tmp_path, *({**rank, "work": rng.uniform(1, 5)} for rank in ranks))
    assert min(parts.values()) >= 0


def write_clock(folder: Path, mhz: float) -> None:
    start = {"event": "telemetry", "schema_version": 1, "host": "h", "interval_s": 1.0}
    sample = {"event": "sample", "time_unix": 1.5, "gpus": [{"index": 0, "sm_clock_mhz": mhz}]}
    text = "".join(lines({**start, "sources": {"gpu": "it"}, "unknown": {}}, sample))
    write_text(folder / "telemetry" / "h.jsonl", text)


def test_a_lower_device_clock_is_a_cause(tmp_path: Path):
    write_clock(write_parts(tmp_path, "it", ({"work": 1.5},) * 2, device="H100-SXM"), 1000.0)
    write_clock(write_parts(tmp_path, "usual", device="H100-SXM"), 1500.0)
    (cause,) = answer(tmp_path, against="usual").causes
    assert cause.cause == "clock limit"
    assert [e.value for e in cause.evidence if e.unit == "MHz"] == [1000.0, 1500.0]


def test_an_estimate_can_be_the_baseline(tmp_path: Path):
    write_parts(tmp_path, "it", ({"data": 0.5}, {}), device="H100-SXM")
    explanation = answer(tmp_path, against="estimate")
    assert explanation.baseline_s and explanation.baseline_parts_s
    assert sum(explanation.baseline_parts_s.values()) == pytest.approx(explanation.baseline_s)
    assert explanation.lost_s == pytest.approx(explanation.step_s - explanation.baseline_s)
    assert [cause.cause for cause in explanation.causes] == ["data starvation"]
    assert (
        explanation.unexplained_s > 0.1
    )  # the ranks' 0.2 s of work, which take milliseconds there


@pytest.mark.parametrize(("metric", "ratio"), [("samples_per_s", 0.5), ("step_time_s", 2.0)])
def test_a_published_row_can_be_the_baseline(metric: str, ratio: float, tmp_path: Path):
    run = observed_run(write_parts(tmp_path, "it", ({"data": 0.2}, {})))
    row = ReferenceComparison(
        reference="row", source="paper", metric=metric, reference_value=1.0, unit="u",
        ratio=ratio, comparable=True,
    )  # fmt: skip
    result = run.result.model_copy(update={"references": (row,)})
    run = replace(run, report=replace(run.report, result=result))
    explanation = explain_run(run, baseline_of(run, "reference", tmp_path), None)
    assert explanation.baseline_s == pytest.approx(explanation.step_s / 2)
    assert [cause.cause for cause in explanation.causes] == ["data starvation"]


def test_a_run_that_records_no_waits_is_explained_by_its_other_parts(tmp_path: Path):
    folder = write_parts(tmp_path, "it", ({"data": 0.1},))
    path = folder / "steps" / "rank-00000.jsonl"
    unmarked = [json.loads(line) for line in path.read_text().splitlines()]
    for event in unmarked:
        for name in ("busy_time_s", "comm_wait_s", "cores"):
            event.pop(name, None)
    path.write_text("".join(lines(*unmarked)))
    assert [cause.cause for cause in answer(tmp_path).causes] == ["data starvation"]


def test_runs_that_cannot_be_explained_raise_errors(tmp_path: Path):
    write_parts(tmp_path, "it")
    for against, words in (
        ("reference", "no published row"),
        ("estimate", "calibrat"),
        ("nobody", "is not in"),
    ):
        with pytest.raises(UserError, match=words):
            answer(tmp_path, against=against)
    write_parts(tmp_path, "other")
    text = (tmp_path / "other" / "run.json").read_text()
    wider = text.replace(f'"ffn_size": {SHAPE.ffn_size}', '"ffn_size": 128')
    (tmp_path / "other" / "run.json").write_text(wider)
    with pytest.raises(UserError, match="trains something else"):
        answer(tmp_path, against="other")


def test_the_verb_prints_text_and_tables(tmp_path: Path):
    write_parts(tmp_path, "it", ({"data": 0.1}, {}))
    text = paceline("explain", "it", runs=tmp_path).stdout
    assert "Largest cause  data starvation" in text and "remedy" in text
    itself = paceline("explain", "it", "--against", "it", runs=tmp_path).stdout
    assert "the same as run it; no cause found" in itself
    table = paceline("explain", "it", "--format", "csv", runs=tmp_path)
    assert table.stdout.splitlines()[0] == "cause,share,seconds,evidence,remedy"
