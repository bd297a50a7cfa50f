"""Megatron-Bridge's log: each step stands in two lines, written by two ranks at the same moment."""

from __future__ import annotations

import re
from collections.abc import Iterable

from paceline.engines.log_reading.iteration_log import IterationLog
from paceline.engines.log_reading.log_content import LogContent, LogFormat
from paceline.engines.log_reading.step_time_join import STEP_TIME, StepTimeJoin

__all__ = ["LOG_FORMAT"]


def read(blocks: Iterable[bytes], log: LogContent) -> None:
    """The iteration record of the last rank with the TFLOP/s that rank 0 prints beside it."""
    join = StepTimeJoin(log)
    for batch in IterationLog(log).batches(blocks):
        join.add(batch.index, batch.columns, STEP_TIME.findall(batch.text))
    join.finish()


LOG_FORMAT = LogFormat(
    title="Megatron-Bridge",
    marks=(b"Step Time : ",),
    step_line=re.compile(rb"Step Time : [0-9.]{1,24}s GPU utilization: "),
    read=read,
    end_marker="[after training is done]",
    precedence=2,
    convention="causal",
)
