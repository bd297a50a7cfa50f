"""Whether a log comes to the end that its program would have written."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.core.steps import Steps
from paceline.engines.log_reading.log_content import LogContent, LogFormat


def missing_end(kind: LogFormat, log: LogContent, steps: Steps) -> Iterator[str]:
    """A sentence when the log format has an end marker and the log, which has steps, ends without.

    Nothing of one that tells its end otherwise: by its last step, a run time, a torn line, or that
    memory ran out.
    """
    total = log.facts.get("total_steps")
    # Some log formats count from 0.
    done = isinstance(total, int) and len(steps) > 0 and int(steps.index.max()) >= total - 1
    ends = log.ended or log.torn or log.out_of_memory or "run_time_s" in log.figures
    if kind.end_marker and len(steps) and not done and not ends:
        yield (
            f"ends without an end marker ({kind.end_marker}): the run went on, was ended, or the "
            "log is cut"
        )
