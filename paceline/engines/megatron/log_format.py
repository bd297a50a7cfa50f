"""Log format of Megatron-LM since 2021: an `iteration` record per interval, from the last rank."""

from __future__ import annotations

import re
from collections.abc import Iterable

from paceline.engines.log_reading.iteration_log import IterationLog
from paceline.engines.log_reading.log_content import LogContent, LogFormat

__all__ = ["LOG_FORMAT"]

CAUSAL_SINCE = "2025-03-06"
"""Date since which Megatron-LM excludes the masked half of attention from FLOPs (core 0.12)."""

_DAY = re.compile(rb"\[(20\d\d-\d\d-\d\d) \d\d:\d\d:\d\d[0-9.]{0,8}\] {1,4}iteration ")


def read(blocks: Iterable[bytes], log: LogContent) -> None:
    """Read steps, numbered from 1; times are means over the log interval, TFLOP/s per device."""
    day = None
    for batch in IterationLog(log).batches(blocks):
        log.add_steps(batch.index, **batch.columns)
        day = day or _DAY.search(batch.text)
    if day and day[1].decode() < CAUSAL_SINCE:
        log.facts["framework_version"] = "core 0.11 or older"


LOG_FORMAT = LogFormat(
    title="Megatron-LM",
    marks=(b"elapsed time per iteration (", b" | consumed samples: "),
    step_line=re.compile(
        rb"iteration {1,24}+\d{1,18}/ {0,24}+\d{1,18} {0,4}+\| {1,4}"
        rb"(?:consumed samples|elapsed time)"
    ),
    read=read,
    example="`iteration 35/ 50 | ... elapsed time per iteration (ms): 5690.4`",
    numbering="from 1",
    end_marker="[after training is done]",
    precedence=4,
    convention="causal",
)
