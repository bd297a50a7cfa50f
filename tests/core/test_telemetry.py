"""Energy is the integral of what was sampled over a window, and nothing where a part is dark."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.core.telemetry import Telemetry, energy_between, read_telemetry


def host(
    *samples: dict[str, Any], sources: tuple[str, ...] = ("gpu", "cpu"), name: str = "a"
) -> Telemetry:
    start = {
        "event": "telemetry",
        "host": name,
        "interval_s": 1.0,
        "sources": {part: f"{part} source" for part in sources},
        "unknown": {part: "cannot be read" for part in ("gpu", "cpu") if part not in sources},
    }
    lines = [json.dumps(start), *(json.dumps({"event": "sample", **sample}) for sample in samples)]
    telemetry = read_telemetry(lines)
    assert telemetry is not None
    return telemetry


def at(time: float, watts: list[float], joules: float | None = None) -> dict[str, Any]:
    gpus = [{"index": n, "power_w": watt} for n, watt in enumerate(watts)]
    return {"time_unix": time, "gpus": gpus, "cpu_energy_j": joules}


def test_constant_power_gives_power_times_time():
    energy = energy_between([host(*(at(t, [300.0, 100.0], 50.0 * t) for t in range(11)))], 2.0, 7.5)

    assert energy.parts_j == {"gpu": pytest.approx(400 * 5.5), "cpu": pytest.approx(50 * 5.5)}
    assert energy.energy_j == pytest.approx(450 * 5.5) and energy.power_w == pytest.approx(450)
    assert (energy.window_s, energy.n, energy.reason) == (5.5, 6, None)
    assert energy.sources == ("cpu source", "gpu source")


def test_power_between_samples_lies_on_a_straight_line():
    ramp = host(at(0, [0.0]), at(2, [200.0]), at(4, [0.0]), sources=("gpu",))

    assert energy_between([ramp], 0.0, 4.0).energy_j == pytest.approx(400)
    assert energy_between([ramp], 1.0, 3.0).energy_j == pytest.approx(300)


def test_hosts_are_added_and_one_without_a_part_takes_it_from_the_sum():
    first = host(*(at(t, [100.0], 10.0 * t) for t in range(5)))
    other = host(*(at(t, [200.0], 10.0 * t) for t in range(5)), name="b")
    dark = host(*(at(t, [200.0]) for t in range(5)), sources=("gpu",), name="c")

    assert energy_between([first, other], 0, 4).parts_j == {"gpu": 1200, "cpu": 80}
    assert energy_between([first, dark], 0, 4).parts_j == {"gpu": 1200}


@pytest.mark.parametrize(
    ("times", "reason"),
    [
        ([3, 4, 5, 6, 7, 8, 9, 10], "gpu: a: was not sampled over the whole window"),
        ([0, 1, 2, 3, 4], "gpu: a: was not sampled over the whole window"),
        ([0, 1, 2, 9, 10], "gpu: a: was not sampled for 7.0 s"),
        ([], "gpu: a: was not sampled"),
    ],
)
def test_a_window_that_is_not_covered_has_no_energy(times: list[int], reason: str):
    energy = energy_between([host(*(at(t, [100.0]) for t in times), sources=("gpu",))], 2.0, 8.0)

    assert (energy.energy_j, energy.power_w) == (None, None)
    assert reason in str(energy.reason) and "cpu: a: cannot be read" in str(energy.reason)


def test_a_device_that_falls_silent_leaves_no_sum_of_the_others():
    silent = {"time_unix": 2.0, "gpus": [{"index": 0, "power_w": 100.0}, {"index": 1}]}
    lines = [at(t, [100.0, 100.0]) for t in (0, 1)] + [silent] + [at(3, [100.0, 100.0])]
    energy = energy_between([host(*lines, sources=("gpu",))], 0.0, 3.0)

    assert energy.energy_j == pytest.approx(600)  # by the samples on both sides of it


def test_a_device_that_is_absent_from_samples_is_not_left_out_of_the_sum():
    seconds = range(81)
    some = host(*(at(t, [600.0] * (1 if 30 <= t < 60 else 2)) for t in seconds), sources=("gpu",))
    energy = energy_between([some], 0.0, 80.0)
    assert energy.energy_j is None
    assert "gpu: a: device 1 was not sampled for 31.0 s" in str(energy.reason)

    every_other = host(*(at(t, [600.0] * (8 - t % 2)) for t in seconds), sources=("gpu",))
    assert energy_between([every_other], 0.0, 80.0).energy_j == pytest.approx(8 * 600 * 80)


@pytest.mark.parametrize(("watts", "joules"), [(None, None), (600.0, 600.0 * 90)])
def test_a_counter_that_is_reset_is_not_used(watts: float | None, joules: float | None):
    lines = [
        {
            "time_unix": t,
            "gpus": [{"index": 0, "power_w": watts, "energy_j": 600.0 * (t if t < 30 else t - 30)}],
        }
        for t in range(91)
    ]
    energy = energy_between([host(*lines, sources=("gpu",))], 0.0, 90.0)
    assert energy.energy_j == joules
    assert joules or "gpu: a: has an energy counter that was reset" in str(energy.reason)

    wrapped = host(*(at(t, [], 150.0 * (t % 80)) for t in range(91)), sources=("cpu",))
    assert energy_between([wrapped], 0.0, 70.0).energy_j == pytest.approx(150 * 70)
    assert "cpu: a: has an energy counter" in str(energy_between([wrapped], 0.0, 90.0).reason)


@pytest.mark.parametrize("stated", ["NVML power", "NVML energy counter"])
@pytest.mark.parametrize("lacking", [None, 2])
def test_the_source_is_what_was_used_and_not_what_the_first_look_promised(
    stated: str, lacking: int | None
):
    looks = [
        {"index": 0, "power_w": 100.0} | ({} if t == lacking else {"energy_j": 150.0 * t})
        for t in range(5)
    ]
    lines = [{"time_unix": t, "gpus": [gpu]} for t, gpu in enumerate(looks)]
    measured = host(*lines, sources=("gpu",))
    start = measured.start.model_copy(update={"sources": {"gpu": stated}})
    energy = energy_between([Telemetry(start, measured.samples)], 0.0, 4.0)

    used = "NVML power" if lacking else "NVML energy counter"
    assert (energy.energy_j, energy.sources) == (400.0 if lacking else 600.0, (used,))


def test_every_host_at_fault_is_named_with_what_it_lacks():
    whole = host(*(at(t, [1.0]) for t in range(5)), sources=("gpu",), name="n1")
    short = [host(at(0, [1.0]), sources=("gpu",), name=name) for name in ("n2", "n3", "n3")]
    dark = host(sources=(), name="n7")

    energy = energy_between([whole, *short, dark], 0, 4)

    assert energy.energy_j is None
    assert str(energy.reason).split("; ") == [
        "gpu: n[2-3]: was not sampled over the whole window",
        "gpu: n7: cannot be read",
        "cpu: n[1-3],n7: cannot be read",
    ]


def test_nothing_recorded_is_no_energy():
    assert energy_between([], 0.0, 1.0).reason == "no telemetry was recorded"


def test_broken_lines_are_passed_over_and_a_file_without_a_beginning_is_none():
    start = '{"event": "telemetry", "host": "a", "interval_s": 1, "sources": {}, "unknown": {}}'
    telemetry = read_telemetry(["", "[]", start, '{"event": "sample"}', '{"event": "sam'])

    assert telemetry is not None and telemetry.samples == ()
    assert read_telemetry(['{"event": "sample", "time_unix": 1}']) is None
