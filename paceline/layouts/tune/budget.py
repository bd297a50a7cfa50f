"""How much a tuning may try: a number of runs, or the time that they take together."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import floor
from statistics import median

from paceline.core.errors import UserError
from paceline.core.units import counted

_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*")
UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
RUNS = ("trials", "trial", "runs", "run")
ALLOWED = "a time as in 600s, 10m, 1.5h, or a number as in `20 trials`"
MOST_RUNS = 10_000


@dataclass(frozen=True)
class Budget:
    """One of the two is given."""

    runs: int | None = None
    seconds: float | None = None

    def left(self, took_s: list[float], whole_s: list[float] | None = None) -> int:
        """Runs that there is still time for, as long as they take what runs took so far.

        `whole_s` are those of `took_s` that came to a figure: what fails soon says nothing of them.
        """
        if self.runs is not None:
            return max(0, self.runs - len(took_s))
        rest = (self.seconds or 0.0) - sum(took_s)
        if not took_s:
            return 1 if rest > 0 else 0
        return max(0, floor(rest / max(median(whole_s or took_s), 1e-3)))

    def __str__(self) -> str:
        return counted(self.runs, "trial") if self.runs is not None else f"{self.seconds:g} s"


def read_budget(text: str) -> Budget:
    """The budget in a text; raises UserError for what is none."""
    match = _TEXT.fullmatch(text.lower())
    number, unit = (float(match[1]), match[2]) if match else (0.0, "")
    if unit in UNITS and number > 0:
        return Budget(seconds=number * UNITS[unit])
    if unit in RUNS and number >= 1 and number.is_integer() and number <= MOST_RUNS:
        return Budget(runs=int(number))
    raise UserError(f"--budget {text}", "is no budget", allowed=ALLOWED)
