"""Verdicts on few runs, by the published variation of such machines and by the runs' order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.compare.judge import judge
from paceline.compare.judgement import Comparison
from paceline.compare.sides import ComparisonSide
from paceline.compare.significance import RunVariation
from paceline.core.result import LevelShift, Metric
from paceline.core.run import RunSettings
from paceline.files.catalog import devices, variation_class, variation_classes
from tests.compare.members import FACTS, WINDOW, hour, member, repeats, side
from tests.nightly import NIGHTLY

GPU = FACTS.model_copy(update={"device": "H100-SXM", "device_label": None})
UNKNOWN = FACTS.model_copy(update={"device": None})


def runs_at(
    name: str, times_s: list[float], hours: list[float], facts: RunSettings = GPU, host: str = ""
) -> ComparisonSide:
    """Runs with these step times, made at these hours, on a host if it is known."""
    return ComparisonSide(
        name,
        tuple(
            member(f"{name}{i}", t, facts=facts, created=hour(at), hosts=(host,) if host else ())
            for i, (t, at) in enumerate(zip(times_s, hours, strict=True))
        ),
    )


def pair(change: float, facts: RunSettings = GPU, hours_later: float = 1) -> Comparison:
    return judge(
        runs_at("a", [0.2], [0], facts), runs_at("b", [0.2 * (1 + change)], [hours_later], facts)
    )


@pytest.mark.parametrize(
    ("facts", "hours", "likely", "proven"),
    [
        (GPU, 1, 0.031, 0.073),
        (GPU, 24, 0.039, 0.073),
        (FACTS, 1, 0.061, 0.103),
        (UNKNOWN, 1, 0.061, 0.103),
    ],
    ids=["GPU, one day", "GPU, another day", "CPU", "unknown device"],
)
def test_one_run_per_side_is_judged_by_published_variation(
    facts: RunSettings, hours: float, likely: float, proven: float
):
    """The thresholds: 3.0 and 7.0%; 3.8 and 7.0%; 6.0 and 9.8%, as logarithms."""
    steps = [(likely - 0.004, "undecided"), (likely + 0.001, "likely slower")]
    steps += [(proven - 0.004, "likely slower"), (proven + 0.001, "slower")]
    assert [pair(change, facts, hours).verdict for change, _ in steps] == [
        word for _, word in steps
    ]
    faster = pair(1 / (1 + proven + 0.001) - 1, facts, hours)
    assert (faster.verdict, faster.confidence) == ("faster", "low")


def test_the_sentence_gives_difference_then_evidence_then_what_would_settle_it():
    judged = pair(0.05)
    assert judged.verdict == "likely slower" and judged.repeats_needed == 2
    parts = [
        "b0 is 5.0% slower than a0",
        "Likely, not proven: 95% interval",
        "Runs of one system of this class (data-center GPUs) differ by more than 3% in 0.4% of "
        "5,256 published pairs (MLPerf Training v5.1).",
        "Run 2 more of each, alternating (A B A B).",
        "Three alternating runs per side detect a change of 2% with 80% probability.",
    ]
    names = "b is 5.0% slower than a"
    places = [judged.sentence.find(part) for part in [names, *parts[1:]]]
    assert -1 not in places and places == sorted(places)
    assert judged.evidence == parts[2]


def test_noisy_steps_widen_the_interval_of_a_single_run():
    def noisy(name: str, seconds: float, error: float) -> ComparisonSide:
        run = member(name, seconds, facts=GPU)
        low, high = seconds * np.exp(-1.96 * error), seconds * np.exp(1.96 * error)
        step = run.metrics["step_time_s"].model_copy(update={"low": low, "high": high})
        return ComparisonSide(name, (replace(run, metrics={**run.metrics, "step_time_s": step}),))

    verdicts = [judge(noisy("a", 0.2, e), noisy("b", 0.22, e)).verdict for e in (0.0005, 0.05)]
    assert verdicts == ["slower", "undecided"]


def test_few_runs_are_never_called_the_same_without_a_history():
    assert (
        judge(repeats(2, 0, 1e-5, "a", facts=GPU), repeats(2, 0, 1e-5, "b", facts=GPU)).verdict
        == "undecided"
    )
    quiet = RunVariation(within=0.001, between=0.001, degrees=20, n_runs=40, n_occasions=21)
    judged = judge(runs_at("a", [0.2], [0]), runs_at("b", [0.2], [1]), variation=quiet)
    assert judged.verdict == "same" and "40 runs of 21 days" in judged.evidence


def test_the_history_of_the_machine_replaces_published_variation():
    wild = RunVariation(within=0.03, between=0.0, degrees=20, n_runs=40, n_occasions=21)
    a, b = runs_at("a", [0.2], [0]), runs_at("b", [0.216], [1])
    assert (judge(a, b).verdict, judge(a, b, variation=wild).verdict) == ("slower", "undecided")


@pytest.mark.parametrize(
    "window",
    [
        {"shift": LevelShift(first_step=30, ratio=1.05)},
        {"shift": LevelShift(first_step=20, last_step=30, ratio=1.05)},
        {"state": "drifting", "drift": 0.05},
        {"state": "uneven"},
    ],
    ids=["shift", "temporary level", "drift", "two levels"],
)
def test_a_run_without_one_level_decides_nothing(window: dict[str, object]):
    a, b = runs_at("a", [0.2], [0]), runs_at("b", [0.23], [1])
    unsteady = replace(b.members[0], window=WINDOW.model_copy(update=window))
    judged = judge(a, ComparisonSide("b", (unsteady,)))
    assert judged.verdict == "undecided" and judged.repeats_needed is None
    reason = "Not proven: step time of b0 is not stationary. More runs do not help: find what"
    assert reason in judged.sentence and "Run 2 more" not in judged.sentence


def test_runs_that_throttle_are_not_asked_for_more_runs():
    """Three runs per side in turns, of which one side throttles for a while."""
    window = WINDOW.model_copy(
        update={"shift": LevelShift(first_step=20, last_step=30, ratio=1.08)}
    )
    a = runs_at("a", [0.2, 0.201, 0.199], [0, 3, 4])
    b = runs_at("b", [0.202, 0.2035, 0.2005], [1, 2, 5])
    throttled = ComparisonSide("b", tuple(replace(run, window=window) for run in b.members))
    judged = judge(a, throttled)
    assert (judged.verdict, judged.repeats_needed) == ("undecided", None)
    assert "step time of b0, b1, b2 is not stationary. More runs do not help" in judged.sentence


def false_alarms(
    days: float, within: float, change: float, order: str, trials: int = 100
) -> dict[str, float]:
    """Verdicts on sides of different days; `order` has one letter for each run and day."""
    rng = np.random.default_rng(5)
    blocks = order.split()
    words: list[str] = []
    for _ in range(trials):
        times: dict[str, tuple[list[float], list[float]]] = {"A": ([], []), "B": ([], [])}
        for number, block in enumerate(blocks):
            day = rng.normal(0, days)
            for at, letter in enumerate(block):
                true = 0.2 * (1 + change * (letter == "B"))
                times[letter][0].append(float(true * np.exp(day + rng.normal(0, within))))
                times[letter][1].append(24 * number + at)
        words.append(judge(*(runs_at(letter, *times[letter]) for letter in "AB")).verdict)
    return {word: words.count(word) / trials for word in ("slower", "faster", "same")}


@pytest.mark.parametrize(
    ("days", "within"), [(0.005, 0.001), (0.01, 0.003)] if NIGHTLY else [(0.01, 0.003)]
)
@pytest.mark.parametrize("order", ["AAA BBB", "AAAAA BBBBB", "AAA BBB A"])
def test_days_of_one_side_are_no_difference(days: float, within: float, order: str):
    """Three times the variance of single runs, the former rule, was wrong in 15 to 28%."""
    rates = false_alarms(days, within, 0.0, order)
    assert rates["slower"] + rates["faster"] <= 0.05
    assert false_alarms(days, within, 0.01, order)["same"] <= 0.05
    assert false_alarms(days, within, 0.10, order)["slower"] >= 0.9


def test_more_runs_in_blocks_or_turns_need_a_smaller_difference():
    """Three runs of A, then three of B, on one day needed more than one run each: 3.7 and 5.9%."""
    change = {"likely": 0.032, "proven": 0.074}
    spread = [0.2 * np.exp(0.003 * at) for at in (-1.0, 0.0, 1.0)]
    orders = {1: ([0], [1]), 2: ([0, 1], [2, 3]), 3: ([0, 1, 2], [3, 4, 5])}
    for n, (a_hours, b_hours) in orders.items():
        for word, size in change.items():
            times = spread[:n] if n < 3 else spread
            b_times = [time * (1 + size) for time in times]
            judged = judge(runs_at("a", times, a_hours), runs_at("b", b_times, b_hours))
            assert judged.verdict in ("slower", "likely slower") if word == "likely" else "slower"
            assert (judged.verdict == "slower") >= (word == "proven" or n > 1)
            assert judged.confidence == "low" and "published pairs" in judged.evidence
    turns = judge(
        runs_at("a", spread, [0, 3, 4]), runs_at("b", [t * 1.032 for t in spread], [1, 2, 5])
    )
    assert (turns.verdict, turns.evidence, turns.confidence) == ("slower", "", "normal")


def test_a_third_run_does_not_hide_what_two_runs_show():
    """The runs of A vary by 3%, so their own variation decides nothing below 7.4%."""
    a = runs_at("a", [0.2, 0.206, 0.194], [0, 3, 4])
    b = runs_at("b", [0.2135, 0.2130, 0.2125], [1, 2, 5])
    judged = judge(a, b)
    assert judged.verdict == "slower" and "published pairs" in judged.evidence
    assert judged.low is not None and judged.low > 1
    assert judge(a, runs_at("b", [0.2095, 0.2090, 0.2085], [1, 2, 5])).verdict == "likely slower"


def test_sides_that_share_their_days_are_tested_by_their_own_runs():
    rates = false_alarms(0.01, 0.003, 0.02, "ABABAB ABAB", trials=40)
    assert rates["slower"] >= 0.9


def test_daily_runs_in_turns_are_tested_by_their_own_variation():
    times = [0.2, 0.2002, 0.1998]
    a = runs_at("a", times, [0, 72, 96])
    b = runs_at("b", [1.02 * time for time in times], [24, 48, 120])
    judged = judge(a, b)
    assert (judged.verdict, judged.confidence) == ("slower", "normal")


def test_runs_on_different_hosts_are_doubted_and_need_a_larger_difference():
    hours = ([0, 2, 4], [1, 3, 5])
    times = [0.2, 0.2002, 0.1998], [0.205, 0.2052, 0.2048]
    apart = judge(
        runs_at("a", times[0], hours[0], host="x"), runs_at("b", times[1], hours[1], host="y")
    )
    assert (apart.verdict, apart.confidence) == ("undecided", "low")
    assert any("different hosts (x and y)" in reason for reason in apart.why_low)
    together = judge(
        runs_at("a", times[0], hours[0], host="x"), runs_at("b", times[1], hours[1], host="x")
    )
    assert (together.verdict, together.confidence) == ("slower", "normal")


def test_hosts_of_the_controller_are_not_hosts_of_the_runs():
    """Paceline ran on two login nodes, the trainer on one GPU node, and the other way round."""
    a, b = (
        [
            replace(run, environment={"host": login}, hosts=(node,))
            for run in runs_at(name, [0.2, 0.2002, 0.1998], hours).members
        ]
        for name, hours, login, node in (("a", [0, 2, 4], "x", "n1"), ("b", [1, 3, 5], "y", "n1"))
    )
    judged = judge(ComparisonSide("a", tuple(a)), ComparisonSide("b", tuple(b)))
    assert not any("different hosts" in reason for reason in judged.why_low)
    moved = tuple(replace(run, environment={"host": "x"}, hosts=("n2", "n3")) for run in b)
    judged = judge(ComparisonSide("a", tuple(a)), ComparisonSide("b", moved))
    assert any("different hosts (n1 and n[2-3])" in reason for reason in judged.why_low)


def test_a_likely_gain_can_be_too_good():
    judged = pair(-0.06)
    assert judged.verdict == "likely faster" and "suspicious" in (judged.too_good or "")


def test_the_variation_of_a_class_is_named_only_where_it_decides():
    a, b = runs_at("a", [0.2], [0]), runs_at("b", [0.23], [1])
    drifting = WINDOW.model_copy(update={"state": "drifting", "drift": 0.05})
    unsteady = ComparisonSide("b", (replace(b.members[0], window=drifting),))
    unknown = "1 run per side: run-to-run variation unknown"
    assert unknown in judge(a, unsteady).why_low
    assert unknown in judge(a, b, metrics=["memory_resident_bytes"]).why_low
    assert any("that of data-center GPUs" in reason for reason in judge(a, b).why_low)
    three = runs_at("a", [0.2, 0.2002, 0.1998], [0, 2, 4])
    assert any(
        reason.startswith("3 runs and 1 run: the variation is that")
        for reason in judge(three, b).why_low
    )


def test_a_decided_verdict_needs_no_repeats():
    judged = pair(0.2)
    assert (judged.verdict, judged.repeats_needed, judged.repeats_note) == ("slower", 0, None)


def test_a_history_without_variation_is_ignored():
    none = RunVariation(within=0.0, between=0.0, degrees=9, n_runs=10, n_occasions=10)
    a, b = runs_at("a", [0.2], [0]), runs_at("b", [0.2021], [1])
    assert judge(a, b, variation=none) == judge(a, b)


def test_without_dates_the_order_is_unknown():
    judged = judge(
        repeats(3, 0, 0.001, "a", facts=GPU, created=None),
        repeats(3, 0.02, 0.001, "b", facts=GPU, created=None),
    )
    assert (judged.verdict, judged.confidence) == ("undecided", "low")
    assert any("order of the runs is unknown" in reason for reason in judged.why_low)


@pytest.mark.parametrize(
    ("hours", "verdict"), [((0, 2, 4, 1, 3, 5), "slower"), ((0, 1, 2, 3, 4, 5), "undecided")]
)
def test_a_first_step_is_judged_by_its_own_runs_only(hours: tuple[int, ...], verdict: str):
    """The published variation of step times does not hold for the compilation in a first step."""
    sides = [
        ComparisonSide(
            name,
            tuple(
                member(
                    f"{name}{i}",
                    facts=GPU,
                    created=hour(at),
                    metrics={
                        "step_time_s": Metric(value=0.2, unit="s", n=56),
                        "first_step_s": Metric(value=first * (1 + 0.002 * i), unit="s", n=1),
                    },
                )
                for i, at in enumerate(hours_of_side)
            ),
        )
        for name, first, hours_of_side in (("a", 16.0, hours[:3]), ("b", 16.6, hours[3:]))
    ]
    comparison = judge(*sides)
    found = next(each for each in comparison.metrics if each.metric == "first_step_s")
    assert found.verdict == verdict
    assert (found.note is not None) == (verdict == "undecided")


def test_a_sentence_with_low_confidence_says_why():
    comparison = pair(0.1)
    assert comparison.verdict == "slower"
    assert comparison.sentence.endswith(" Low confidence: 1 run per side.")


def test_a_short_run_is_called_short():
    short = WINDOW.model_copy(update={"n": 12, "last_step": 16})
    judged = judge(side([0.2] * 3, "a"), repeats(3, 0.03, 0.001, "b", window=short))
    assert judged.confidence == "low"
    words = "short runs: b-0, b-1, b-2 have at least 12 steady steps and may still be warming up"
    assert any(words in reason for reason in judged.why_low)
    alone = judge(side([0.2], "a"), side([0.206], "b", window=short))
    words = "short run: b-0 has 12 steady steps and may still be warming up; use at least 20"
    assert words in alone.warnings


def test_the_classes_name_devices_of_the_catalog_and_state_their_sources():
    names = {device.name for device in devices()}
    for machine in variation_classes():
        assert set(machine.devices) <= names and machine.sources
        assert list(machine.published.beyond.values()) == sorted(
            machine.published.beyond.values(), reverse=True
        )
    assert variation_class("H100-SXM").within < variation_class("H100-PCIe").within
    assert variation_class(None) == variation_class("cpu") == variation_classes()[-1]
