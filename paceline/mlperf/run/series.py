"""A series of trials of one benchmark: what was asked for, how far it has come, what it yields."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat

from paceline.core.value import NonNegativeInt, PositiveInt, Value
from paceline.files.run_folder import Controller
from paceline.mlperf.score.expected_time import ExpectedTime
from paceline.mlperf.score.score import Score

TrialStatus = Literal[
    "waiting", "running", "success", "missed", "timeout", "failed", "cancelled", "measured"
]
SeriesStatus = Literal["complete", "running", "unfinished", "failed"]
FINAL = frozenset({"success", "missed", "timeout", "failed", "measured"})
"""A trial that has come to one of these is not run again."""
SERIES_FILE = "series.json"


class TrialState(Value):
    """One trial: its place in the series, and what has become of it."""

    number: NonNegativeInt
    seed: NonNegativeInt
    status: TrialStatus = "waiting"
    """`missed`: all steps were done and the target was not reached. `measured`: on random samples,
    which have no target."""
    reason: str | None = None
    run: str | None = None
    """Its run folder's name."""
    file: str | None = None
    """Its log, in the series' folder."""
    minutes: float | None = None
    samples_to_target: int | None = None
    last_loss: float | None = None
    """Of the last evaluation."""
    samples_per_s: float | None = None


class TrialSeries(Value):
    """series.json: what `paceline mlperf run` was asked for, and its trials."""

    schema_version: int = 1
    name: str
    benchmark: str
    label: str
    """What is said of whatever it yields."""
    recipe: str
    variant: str
    overrides: tuple[str, ...] = ()
    key: str
    """Of the configuration, whatever the seed."""
    synthetic: bool = False
    data_digest: str | None = None
    """Of the small siblings' data."""
    first_seed: NonNegativeInt
    wanted: PositiveInt
    trial_limit_s: PositiveFloat | None = None
    drop_caches: bool = False
    controller: Controller | None = None
    """The process that runs it now."""
    trials: tuple[TrialState, ...] = ()

    @property
    def missing(self) -> list[TrialState]:
        """Trials that are still to run."""
        return [trial for trial in self.trials if trial.status not in FINAL]

    def with_trial(self, trial: TrialState) -> TrialSeries:
        """The series with another state of one trial."""
        changed = tuple(trial if old.number == trial.number else old for old in self.trials)
        return self.model_copy(update={"trials": changed})

    def up_to(self, num_trials: int) -> TrialSeries:
        """The series with so many trials, each with its own seed; none that has begun is lost."""
        begun = [trial.number + 1 for trial in self.trials if trial.status != "waiting"]
        wanted = max(num_trials, *begun, 1)
        kept = self.trials[:wanted]
        new = [TrialState(number=n, seed=self.first_seed + n) for n in range(len(kept), wanted)]
        return self.model_copy(update={"trials": (*kept, *new), "wanted": wanted})


class SeriesAnswer(Value):
    """What `paceline mlperf run` answers."""

    series: TrialSeries
    folder: str
    status: SeriesStatus
    """`failed`: every trial has ended, and none by its own last line."""
    label: str
    official: Literal[False] = False
    score: Score | None = None
    """None on random samples."""
    expected: ExpectedTime | None = None
    """On random samples: how long the training would take."""
    warnings: tuple[str, ...] = ()
    resume: str | None = None
    """The command that goes on."""


def status_of(series: TrialSeries, alive: bool = False) -> SeriesStatus:
    """How far a series has come."""
    if series.missing:
        return "running" if alive else "unfinished"
    ended = {"success", "missed", "measured"}
    return "complete" if any(trial.status in ended for trial in series.trials) else "failed"
