"""The steady window finds the end of warm-up and refuses what is not steady."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.steps import Steps
from paceline.core.window import (
    NoStepError,
    band_half_width,
    choose_window,
    relative_drift,
    steady_window,
    warmup_steps,
)
from paceline.files.events import read_rank
from tests.example import make_steps, noisy
from tests.files.test_events import STEP, lines


def test_warmup_is_left_out():
    window = steady_window(make_steps([2.0, 0.9, 0.4, *noisy(50)]))
    assert window.record.state == "steady"
    assert 3 <= window.record.n_warmup <= 5
    assert window.record.last_step == 53


def test_a_single_spike_stays_inside_the_window():
    times = noisy(40)
    times[20] = 1.0
    window = steady_window(make_steps(times))
    assert window.record.n == 40 - window.record.n_warmup
    assert 20 in np.arange(40)[window.rows]


def test_a_spike_does_not_end_the_warmup_early():
    times = np.array([1.0, 0.2, 1.0, 1.0, 1.0, 1.0, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2])
    assert warmup_steps(times, 0.01) == 6


def test_the_window_never_mixes_batch_sizes():
    steps = make_steps(noisy(30), global_batch=[8.0] * 10 + [16.0] * 20, seq_len=[64.0] * 30)
    window = steady_window(steps)
    assert window.record.global_batch == 16
    assert window.record.first_step is not None and window.record.first_step >= 11


def test_equal_printed_times_are_steady():
    assert steady_window(make_steps([0.2] * 12)).record.state == "steady"


def test_whole_second_logs_use_their_resolution():
    times = [29.0, 28.0] * 10
    window = steady_window(make_steps(times), resolution_s=1.0)
    assert window.record.n_warmup == 0


def test_four_steps_are_too_few():
    assert steady_window(make_steps([0.2] * 4)).record.state == "short"


def test_no_timed_step_gives_an_empty_window():
    record = steady_window(make_steps([float("nan")] * 3)).record
    assert (record.state, record.n, record.first_step) == ("none", 0, None)


def test_a_step_time_that_keeps_growing_is_called_drifting():
    times = [0.2 * (1 + 0.002 * i) for i in range(100)]
    record = steady_window(make_steps(times)).record
    assert record.state == "drifting"
    assert record.drift == pytest.approx(0.2, rel=0.4)


def test_drift_of_a_straight_line_is_its_rise():
    drift, noise = relative_drift(np.linspace(1.0, 1.1, 101))
    assert drift == pytest.approx(0.1 / 1.05) and noise == pytest.approx(0, abs=1e-9)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=80))
def test_window_is_always_a_suffix_of_the_steps(times: list[float]):
    window = steady_window(make_steps(times))
    rows = np.arange(len(times))[window.rows]
    assert list(rows) == list(range(len(times) - len(rows), len(times)))
    assert window.record.n + window.record.n_warmup == len(times)


@given(st.floats(0.01, 100), st.integers(5, 60))
def test_scaling_all_times_does_not_move_the_window(factor: float, n: int):
    times = [3.0, 1.0, *noisy(n)]
    plain = steady_window(make_steps(times))
    scaled = steady_window(make_steps([factor * t for t in times]))
    assert abs(plain.record.n_warmup - scaled.record.n_warmup) <= 0


def test_half_width_is_at_least_a_thousandth_of_the_median():
    assert band_half_width(np.full(10, 2.0)) == pytest.approx(0.002)


def test_noise_alone_is_rarely_called_a_drift():
    states = [steady_window(make_steps(noisy(60, seed=seed))).record.state for seed in range(200)]
    assert states.count("drifting") <= 4


def test_noise_alone_is_rarely_called_a_drift_on_long_runs():
    states = [
        steady_window(make_steps(noisy(5000, 0.2, 0.02, seed=seed))).record.state
        for seed in range(20)
    ]
    assert states.count("drifting") <= 1


def test_a_machine_that_gets_busy_is_called_drifting_however_wide_the_band():
    rng = np.random.default_rng(0)
    times = [0.3 * (1 + i / 30 + abs(rng.normal(0, 0.3))) for i in range(60)]
    assert steady_window(make_steps(times)).record.state == "drifting"


@pytest.mark.parametrize(("before", "behind"), [(0, 0), (2, 0), (0, 1), (3, 2)])
def test_lines_without_a_time_at_both_ends_leave_a_slice_that_costs_no_memory(
    before: int, behind: int
):
    nothing = float("nan")
    window = steady_window(make_steps([nothing] * before + [0.2] * 20 + [nothing] * behind))
    assert window.rows == slice(before, before + 20) and window.record.n == 20
    assert (window.record.first_step, window.record.last_step) == (before + 1, before + 20)


@pytest.mark.parametrize("times", [[], [float("nan")] * 3])
def test_no_times_are_no_window(times: list[float]):
    record = steady_window(make_steps(times)).record
    assert (record.state, record.n) == ("none", 0)


def test_a_rule_that_picks_nothing_is_told_from_what_is_no_rule():
    steps = make_steps([0.2] * 10)
    with pytest.raises(NoStepError, match="none of the 10"):
        choose_window(steps, "35:44")
    with pytest.raises(ValueError, match="not a window rule") as refused:
        choose_window(steps, "35")
    assert not isinstance(refused.value, NoStepError)
    with pytest.raises(NoStepError, match="excludes the only timed step"):
        choose_window(make_steps([0.2]), "35:44")


def test_a_watched_step_is_in_no_window_wherever_that_begins():
    """Its time is left out of the series, so even a window from step 1 passes over it."""
    watched = read_rank(
        lines(
            *(
                {
                    **STEP,
                    "step": k,
                    "step_time_s": 9.0 if k == 2 else 0.2 + k % 3 / 1e3,
                    **({"tracked": True} if k == 2 else {}),
                }
                for k in range(1, 21)
            )
        )
    )
    series = Steps.of(watched.steps)
    window = steady_window(series)

    assert window.record.first_step == 1 and window.record.n == 19
    assert 2 not in series.index[window.rows].tolist()
