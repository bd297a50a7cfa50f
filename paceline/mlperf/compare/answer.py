"""Scores beside published results: what `paceline mlperf compare` answers."""

from __future__ import annotations

from typing import Literal

from paceline.core.value import Value
from paceline.mlperf.compare.published import PublishedScore
from paceline.mlperf.compare.strong_scaling import ScalingStep
from paceline.mlperf.rules import UNOFFICIAL

OFFICIAL = "published by MLCommons Association; its score computed from the published logs"


class Beside(Value):
    """One published result on the same number and kind of accelerators."""

    submitter: str
    system: str
    round: str
    availability: str | None
    official: Literal[True] = True
    label: str = OFFICIAL
    score_minutes: float
    time_ratio: float
    """Minutes of the score / minutes of the published result: below 1 is faster."""
    global_batch: int | None
    mean_samples_to_target: float | None
    samples_per_s: float | None
    """Mean samples to the target over the olympic mean of the run times, evaluations included."""
    itself: bool = False
    """Whether the logs that were scored are those of this very result."""


class Own(Value):
    """One scored set of runs."""

    name: str
    system: str | None
    status: str
    reason: str | None
    official: Literal[False] = False
    label: str = UNOFFICIAL
    score_minutes: float | None
    num_devices: int | None
    accelerator: str | None
    """By the catalog's name, where it knows the accelerator."""
    global_batch: int | None
    mean_samples_to_target: float | None
    samples_per_s: float | None
    """As in `beside`."""
    model_flops_per_s_per_device: float | None
    convention: str | None
    beside: tuple[Beside, ...] = ()


class PublishedScaling(Value):
    """Results of one submitter on one kind of accelerator, against its smallest."""

    submitter: str
    accelerator: str
    steps: tuple[ScalingStep, ...]


class Compared(Value):
    """Scores of one benchmark, round and division beside what was published."""

    benchmark: str
    ruleset: str
    division: str
    source: str
    """Where the published results come from."""
    official: Literal[False] = False
    label: str = UNOFFICIAL
    own: tuple[Own, ...]
    published: tuple[PublishedScore, ...]
    """All results of the benchmark in the round and division that are known."""
    scaling: tuple[ScalingStep, ...]
    """The scores against the one on the fewest accelerators; empty with fewer than two sizes."""
    published_scaling: tuple[PublishedScaling, ...]
    notes: tuple[str, ...] = ()
