"""Training time between the evaluations of an MLPerf run, from its interval lines.

Blocks, epochs and evaluations have start and stop lines. How far the run is stands in the lines of
an evaluation: in samples, in steps, or in epochs of `train_samples`. Some programs count batches in
`train_samples`; the printed throughput shows which.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.engines.log_reading.mllog import MlRecord, number

STARTS = ("block_start", "epoch_start")
STOPS = ("block_stop", "epoch_stop", "eval_start")
EVALUATIONS = ("eval_start", "eval_accuracy")
KEYS = frozenset((*STARTS, *STOPS, "eval_stop", "eval_accuracy"))
WITH_EVALUATIONS = "its time includes the evaluations"
SAME_RATE = (0.75, 1.15)
"""Range of printed rate / rate of the intervals in which both count the same: a printed rate may
include evaluations."""
MAX_EPOCHS = 10_000
"""Some programs write samples or tokens as `epoch_num`; higher numbers are not epochs."""


@dataclass(frozen=True, slots=True)
class TrainingInterval:
    """Training between two known positions of a run."""

    end: int
    """Samples of the run so far."""
    samples: float
    seconds: float


class TrainingClock:
    """Clock that runs while a block or an epoch is open and no evaluation interrupts it."""

    def __init__(self) -> None:
        self.global_batch = self.train_samples = self.local_batch = 0
        self.evaluation_s = 0.0
        """Seconds in which the run only evaluated."""
        self.training_s = 0.0
        """Seconds of all intervals."""
        self._since: float | None = None
        self._evaluating_since: float | None = None
        self._paused = False
        self._seconds = self._position = 0.0
        self._epoch_samples = 0

    def take(self, record: MlRecord, rate: float) -> TrainingInterval | None:
        """Follow an interval line; return the interval that ends at it.

        `rate` is the throughput that was printed since the last evaluation, or NaN.
        """
        time_s = record.time_ms / 1000
        if record.key in STOPS and self._since is not None:
            self._seconds += time_s - self._since
            self._since, self._paused = None, record.key == "eval_start"
        if record.key == "eval_start":
            self._evaluating_since = time_s
        elif record.key in STARTS or record.key == "eval_stop":
            if self._evaluating_since is not None:
                self.evaluation_s += time_s - self._evaluating_since
                self._evaluating_since = None
            if self._since is None and (record.key in STARTS or self._paused):
                self._since, self._paused = time_s, False
        return self._interval(record, rate) if record.key in EVALUATIONS else None

    @property
    def rate_with_evaluations(self) -> float | None:
        """Samples per second over training and evaluations, or None without both."""
        if not (self.training_s and self.evaluation_s):
            return None
        return self._position / (self.training_s + self.evaluation_s)

    def position(self, record: MlRecord) -> int | None:
        """Return the samples of the run at a line, or None if it does not show them."""
        if (samples := record.count("samples_count")) is not None:
            return samples
        if (step := record.count("step")) is not None:
            return step * self.global_batch or None
        epochs = _epochs(record)
        size = self._epoch_samples or self.train_samples
        return int(epochs * size) if epochs is not None and 0 <= epochs * size < 1e18 else None

    def _interval(self, record: MlRecord, rate: float) -> TrainingInterval | None:
        if _epochs(record) is not None and self._seconds > 0 and not self._epoch_samples:
            self._epoch_samples = self._samples_per_epoch(record, rate)
        end = self.position(record)
        if end is None or end <= self._position or self._seconds <= 0:
            return None
        interval = TrainingInterval(end, end - self._position, self._seconds)
        self.training_s += self._seconds
        self._position, self._seconds = float(end), 0.0
        return interval

    def _samples_per_epoch(self, record: MlRecord, rate: float) -> int:
        """Return `train_samples`, times the batch if only that agrees with the printed rate."""
        epochs = _epochs(record) or 0.0
        batch, local = self.global_batch, self.local_batch
        scales = (1.0, local / batch if batch and local else 1.0)
        for factor in (1, batch):
            expected = factor * self.train_samples * epochs / self._seconds
            for scale in scales:
                if expected and SAME_RATE[0] < rate / (expected * scale) < SAME_RATE[1]:
                    return factor * self.train_samples
        return 0


def _epochs(record: MlRecord) -> float | None:
    epochs = number(record.metadata.get("epoch_num"))
    return epochs if epochs is not None and epochs <= MAX_EPOCHS else None
