"""The verdict on two sides: what it needs, what it admits, and what it will not be talked into."""

from __future__ import annotations

import pytest

from paceline.compare.judge import judge
from paceline.compare.sides import ComparisonSide
from paceline.core.layout import Layout
from paceline.core.result import Metric, WindowRecord
from tests.compare.members import FACTS, WINDOW, member, metrics_at, repeats, side


def test_clearly_slower_repeats_are_slower():
    judged = judge(repeats(3, name="a"), repeats(3, 0.03, name="b"))
    assert (judged.verdict, judged.confidence, judged.repeats_needed) == ("slower", "normal", 0)
    assert judged.ratio == pytest.approx(1.03) and judged.low is not None and judged.low > 1
    assert (judged.n_a, judged.n_b, judged.metric) == (3, 3, "step_time_s")
    assert judged.observed == "b is 3.0% slower than a: 0.2060 s vs 0.2000 s."
    assert judged.sentence.startswith(f"{judged.observed} Proven: 95% interval +")


def test_exchanged_sides_give_the_opposite():
    assert judge(repeats(3, 0.03, name="a"), repeats(3, name="b")).verdict == "faster"


def test_equal_repeats_are_the_same():
    judged = judge(repeats(5, name="a"), repeats(5, name="b"))
    assert (judged.verdict, judged.confidence) == ("same", "normal")


def test_too_noisy_repeats_are_undecided_and_say_how_many_more_it_takes():
    judged = judge(repeats(3, name="a"), repeats(3, 0.006, name="b"))
    assert judged.verdict == "undecided"
    assert judged.repeats_needed is not None and 1 <= judged.repeats_needed < 50
    assert judged.repeats_note is not None and "80%" in judged.repeats_note


def test_at_the_margin_no_number_of_repeats_is_promised():
    judged = judge(repeats(3, name="a", deviation=0.008), repeats(3, 0.01, name="b"))
    assert judged.verdict == "undecided" and judged.repeats_needed == 50
    assert judged.repeats_note is not None and judged.repeats_note.startswith("at least")


@pytest.mark.parametrize("change", [0.02, -0.02, 0.005])
@pytest.mark.parametrize("n", [1, 2])
def test_a_small_difference_of_few_repeats_is_undecided(n: int, change: float):
    judged = judge(repeats(n, deviation=0.001, name="a"), repeats(n, change, 0.001, name="b"))
    assert (judged.verdict, judged.confidence) == ("undecided", "low")
    assert judged.low is not None and judged.low < 1 < (judged.high or 0)
    assert judged.repeats_needed == 3 - n
    size = f"{100 * abs(change):.{2 if abs(change) < 0.01 else 1}f}%"
    assert f"b is {size} {'slower' if change > 0 else 'faster'} than a: " in judged.observed
    assert "Not proven: 95% interval" in judged.sentence and judged.why_low
    assert f"Run {3 - n} more of each, alternating (A B A B)." in judged.sentence


def test_what_is_counted_needs_no_repeats():
    heavier = {**metrics_at(0.2), "memory_resident_bytes": Metric(value=7e8, unit="bytes")}
    pair = side([0.2], "a"), ComparisonSide("b", (member("b", metrics=heavier),))
    judged = judge(*pair, metrics=["memory_resident_bytes"])
    assert (judged.verdict, judged.confidence) == ("worse", "low")


def test_one_run_against_many_is_still_one_run():
    judged = judge(repeats(5, name="a"), repeats(1, 0.03, name="b"))
    assert (judged.confidence, judged.n_a, judged.n_b, judged.repeats_needed) == ("low", 5, 1, 2)


def test_single_runs_whose_own_noise_is_larger_than_the_difference_are_undecided():
    wide = {"step_time_s": Metric(value=0.206, unit="s", low=0.196, high=0.216)}
    judged = judge(side([0.2], "a"), ComparisonSide("b", (member("b", metrics=wide),)))
    assert judged.verdict == "undecided" and judged.repeats_needed == 2


def test_identical_values_are_doubted_although_they_agree():
    judged = judge(side([0.2] * 5, "a"), side([0.2] * 5, "b"))
    assert (judged.verdict, judged.confidence, judged.p) == ("same", "low", None)
    assert any("identical" in reason for reason in judged.why_low)


def test_one_side_of_identical_values_is_doubted_too():
    judged = judge(side([0.2] * 3, "a"), repeats(3, 0.03, name="b"))
    assert (judged.verdict, judged.confidence) == ("slower", "low")
    assert judged.why_low[0].startswith("step_time_s of a: identical values")


def test_a_metric_named_twice_counts_once():
    judged = judge(repeats(3, name="a"), repeats(3, name="b"), metrics=["step_time_s"] * 2)
    assert [m.metric for m in judged.metrics if m.primary] == ["step_time_s"]


def test_memory_may_well_be_identical():
    judged = judge(repeats(5, name="a"), repeats(5, name="b"))
    memory = next(m for m in judged.metrics if m.metric == "memory_resident_bytes")
    assert (memory.verdict, memory.note) == ("same", None)


def test_other_settings_are_not_comparable_and_are_all_listed():
    other = FACTS.model_copy(update={"dtype": "bf16", "layout": Layout(micro_batch=2)})
    judged = judge(repeats(3, name="a"), repeats(3, name="b", facts=other))
    assert judged.verdict == "not comparable" and judged.ratio is None and judged.metrics == ()
    assert judged.differing_keys == ("dtype", "matmul_precision", "layout")
    assert "dtype fp32 against bf16" in judged.sentence


def test_allowed_differences_are_told_and_nothing_else_is_allowed():
    other = FACTS.model_copy(update={"data": "synthetic", "seq_len": 64})
    sides = repeats(3, name="a"), repeats(3, 0.2, name="b", facts=other)
    assert judge(*sides, allowed=["data"]).verdict == "not comparable"
    judged = judge(*sides, allowed=["data", "seq_len"])
    assert judged.differing_keys == ("seq_len", "data")
    assert all(difference.allowed for difference in judged.differences)


def test_on_another_number_of_devices_tokens_a_device_are_compared():
    twice = FACTS.model_copy(update={"num_devices": 4, "global_batch": 16})
    judged = judge(
        repeats(3, name="a"), repeats(3, 0.03, name="b", facts=twice), allowed=["num_devices"]
    )
    assert judged.metric == "tokens_per_s_per_device" and judged.verdict == "slower"
    assert judged.ratio is not None and judged.ratio < 1
    assert any("weak scaling" in note for note in judged.notes)


def test_what_neither_side_states_lowers_the_confidence():
    silent = FACTS.model_copy(update={"data": None})
    judged = judge(repeats(5, name="a", facts=silent), repeats(5, name="b", facts=silent))
    assert (judged.verdict, judged.confidence, judged.unknown_keys) == ("same", "low", ("data",))


def test_failed_repeats_are_named_and_left_out_while_three_are_good():
    broken = member("broken", status="oom", reason="no memory left")
    good = repeats(3, 0.03, name="b")
    judged = judge(repeats(3, name="a"), ComparisonSide("b", (*good.members, broken)))
    assert judged.verdict == "slower" and judged.n_b == 3
    assert judged.warnings == ("left out: broken: no memory left",)
    few = judge(repeats(3, name="a"), ComparisonSide("b", (*good.members[:2], broken)))
    assert few.verdict == "invalid" and "broken: no memory left" in few.sentence


def test_a_run_that_did_not_end_well_is_invalid():
    judged = judge(side([0.2], "a"), ComparisonSide("b", (member("b", status="nan"),)))
    assert (judged.verdict, judged.n_b, judged.repeats_needed) == ("invalid", 0, None)


@pytest.mark.parametrize(("change", "doubted"), [(-0.04, False), (-0.12, True)])
def test_an_improvement_too_good_to_be_believed_is_flagged(change: float, doubted: bool):
    judged = judge(repeats(3, name="a"), repeats(3, change, name="b"))
    assert judged.verdict == "faster" and (judged.too_good is not None) == doubted


def test_where_something_was_meant_to_differ_a_large_gain_is_no_surprise():
    other = FACTS.model_copy(update={"data": "synthetic"})
    sides = repeats(3, name="a"), repeats(3, -0.3, name="b", facts=other)
    assert judge(*sides, allowed=["data"]).too_good is None


def test_a_run_with_an_impossible_mfu_is_excluded():
    shares = {**metrics_at(0.2), "mfu": Metric(value=1.04, unit="fraction")}
    run = member("b", metrics=shares)
    judged = judge(side([0.2], "a"), ComparisonSide("b", (run,)))
    assert judged.verdict == "invalid" and "impossible MFU of 104%" in judged.sentence
    some = judge(side([0.2] * 3, "a"), ComparisonSide("b", (run, *repeats(3, name="b").members)))
    assert some.verdict != "invalid" and some.n_b == 3


def test_more_than_the_achievable_rate_is_flagged_whatever_the_verdict():
    shares = {**metrics_at(0.2), "achievable_fraction": Metric(value=1.04, unit="fraction")}
    judged = judge(side([0.2], "a"), ComparisonSide("b", (member("b", metrics=shares),)))
    assert judged.verdict == "undecided"
    assert judged.too_good is not None and "achievable_fraction" in judged.too_good


def test_the_same_run_on_both_sides_proves_nothing():
    same_runs = repeats(5, name="a")
    judged = judge(same_runs, same_runs)
    assert (judged.verdict, judged.confidence) == ("same", "low")
    assert any("both sides" in reason for reason in judged.why_low)


def test_drift_other_windows_and_outliers_are_told():
    drifting = WINDOW.model_copy(update={"state": "drifting", "drift": 0.03})
    last = WindowRecord(
        rule="35:44", first_step=35, last_step=44, n=10, n_warmup=34, state="steady"
    )
    sides = side([0.2, 0.201, 0.25], "a", window=last), repeats(3, name="b", window=drifting)
    judged = judge(*sides)
    assert judged.confidence == "low"
    warnings = " ".join(judged.warnings)
    assert "35:44, auto" in warnings and "drifts by +3.0%" in warnings and "a-2 is" in warnings


def test_several_primary_metrics_fail_together():
    slower = repeats(3, 0.03, name="b")
    heavier = ComparisonSide(
        "b",
        tuple(
            member(
                m.name,
                m.metrics["step_time_s"].value or 0.0,
                metrics={**m.metrics, "memory_resident_bytes": Metric(value=7e8, unit="bytes")},
            )
            for m in repeats(3, name="b").members
        ),
    )
    both = ["step_time_s", "memory_resident_bytes"]
    assert judge(repeats(3, name="a"), slower, metrics=both).verdict == "slower"
    worse = judge(repeats(5, name="a"), heavier, metrics=both)
    assert (worse.verdict, worse.metric) == ("worse", "memory_resident_bytes")


def test_an_asked_for_metric_that_is_not_known_makes_no_verdict():
    judged = judge(repeats(3, name="a"), repeats(3, name="b"), metrics=["mfu"])
    assert judged.verdict == "invalid" and "mfu" in judged.sentence


def test_a_value_of_zero_has_no_ratio_and_harms_nobody():
    judged = judge(repeats(3, name="a"), repeats(3, name="b"))
    wait = next(m for m in judged.metrics if m.metric == "data_wait_fraction")
    assert wait.ratio is None and wait.verdict == "unknown" and wait.note is not None


def test_p_values_are_corrected_for_the_tests_made_and_not_for_other_units_of_one():
    judged = judge(repeats(3, name="a"), repeats(3, 0.012, name="b"))
    by_name = {m.metric: m for m in judged.metrics}
    tested = [m for m in judged.metrics if m.p_corrected is not None]
    assert {m.metric for m in tested} == {"step_time_s", "step_time_mean_s"}
    assert by_name["tokens_per_s"].follows == "step_time_s"
    assert all((m.p or 0) <= (m.p_corrected or 0) for m in tested)


def test_changed_surroundings_are_possible_causes():
    before = {"versions.torch": "2.12.0", "host": "a1"}
    after = {"versions.torch": "2.13.0", "host": "a1"}
    judged = judge(
        repeats(3, name="a", environment=before), repeats(3, name="b", environment=after)
    )
    assert judged.causes == ("torch 2.12.0 -> 2.13.0",)


def test_whole_second_logs_widen_the_margin_and_say_so():
    sides = side([29.0], "a", printed_step_s=1.0), side([28.0], "b", printed_step_s=1.0)
    judged = judge(*sides)
    assert judged.verdict == "undecided" and judged.resolution == pytest.approx(0.0351, abs=1e-4)
    assert any("printed to within 3.51%" in note for note in judged.notes)


def test_figures_counted_in_different_conventions_are_not_held_together():
    def counted(name: str, convention: str) -> ComparisonSide:
        metric = Metric(value=0.4, unit="fraction", convention=convention)
        return ComparisonSide(name, (member(name, metrics={**metrics_at(0.2), "mfu": metric}),))

    judged = judge(counted("a", "causal"), counted("b", "full-attention"))
    mfu = next(m for m in judged.metrics if m.metric == "mfu")
    assert mfu.ratio is None and mfu.note is not None and "conventions (causal" in mfu.note
    alike = judge(counted("a", "causal"), counted("b", "causal"))
    assert next(m for m in alike.metrics if m.metric == "mfu").ratio == 1.0


def test_with_another_sequence_length_flops_are_compared_if_they_are_known():
    longer = FACTS.model_copy(update={"seq_len": 64})
    sides = repeats(3, name="a"), repeats(3, 0.9, name="b", facts=longer)
    blind = judge(*sides, allowed=["seq_len"])
    assert blind.metric == "tokens_per_s_per_device" and "FLOP/s are unknown" in blind.notes[0]

    def counted(side: ComparisonSide) -> ComparisonSide:
        flops = Metric(value=1e12, unit="FLOP/s", convention="causal")
        figures = {"model_flops_per_s_per_device": flops}
        runs = (
            member(m.name, facts=m.facts, metrics={**m.metrics, **figures}) for m in side.members
        )
        return ComparisonSide(side.name, tuple(runs))

    judged = judge(*map(counted, sides), allowed=["seq_len"])
    assert judged.metric == "model_flops_per_s_per_device"


@pytest.mark.parametrize(("deviation", "found"), [(0.004, (90, 100)), (0.01, (20, 55))])
def test_the_power_for_the_scatter_that_was_seen_is_told(deviation: float, found: tuple[int, int]):
    judged = judge(repeats(3, 0, deviation, name="a"), repeats(3, 0, deviation, name="b"))
    (note,) = [note for note in judged.notes if "find a change of 2.0%" in note]
    assert f"run-to-run variation of {100 * deviation:.2g}% " in note
    low, high = found
    assert low <= int(note.split(" in ")[-1].split("%")[0]) <= high


def test_no_power_is_told_where_the_printed_digits_hide_the_difference():
    def notes(resolution: float) -> tuple[str, ...]:
        row = ComparisonSide("row", (member("row"),), published=True, resolution=resolution)
        return judge(row, repeats(3, 0.002, 0.004, name="b")).notes

    (note,) = [note for note in notes(0.001) if "find a change of 2.0%" in note]
    assert note.startswith("3 runs with a run-to-run variation of 0.4%")
    assert not any("find a change" in note for note in notes(0.5 / 29))
