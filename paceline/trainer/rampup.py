"""How many samples each step takes while the batch ramps up, from the samples behind it alone."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


class BatchSizes:
    """The global batch of every step (from 0) and the samples before it.

    `ramp_up` holds (until, batch) pairs in rising order: a batch is taken while fewer than `until`
    samples are behind; after the last pair it is `global_batch`.
    """

    def __init__(self, ramp_up: Sequence[Sequence[int]], global_batch: int) -> None:
        self._first_steps, self._behind, self._batches = [0], [0], [global_batch]
        step = behind = 0
        for until, batch in ramp_up:
            steps = max(0, -(-(until - behind) // batch))
            if steps:
                self._batches[-1:] = [batch, global_batch]
                step, behind = step + steps, behind + steps * batch
                self._first_steps.append(step)
                self._behind.append(behind)

    def batch(self, step: int) -> int:
        """Samples of a step over all ranks."""
        return self._batches[self._stretch(step)]

    def consumed(self, step: int) -> int:
        """Samples of all steps before one."""
        i = self._stretch(step)
        return self._behind[i] + (step - self._first_steps[i]) * self._batches[i]

    def _stretch(self, step: int) -> int:
        return bisect_right(self._first_steps, step) - 1
