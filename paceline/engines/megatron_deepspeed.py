"""Megatron-DeepSpeed's log (BigScience and its followers): Megatron's records and more fields."""

from __future__ import annotations

import re
from collections.abc import Iterable

from paceline.engines.dialect.iteration_log import IterationLog
from paceline.engines.dialect.log_content import Dialect, LogContent

__all__ = ["DIALECT"]


def read(blocks: Iterable[bytes], log: LogContent) -> None:
    """Times in seconds, before 2022 in milliseconds; `TFLOPs` are of one device, samples of all.

    For some weeks of 2021 `samples per second` was divided by milliseconds; it is kept as printed.
    """
    for batch in IterationLog(log).batches(blocks):
        log.add_steps(batch.index, **batch.columns)


_OWN_FIELD = re.compile(
    rb"\| (?:consumed tokens: {1,24}+\d{1,18} \||elapsed time per iteration \(s\): |lm-loss: "
    rb"|samples per second: {0,8}+[0-9.]{1,18} \|)"
)

DIALECT = Dialect(
    title="Megatron-DeepSpeed",
    marks=(b"elapsed time per iteration (", b" | consumed samples: "),
    step_line=_OWN_FIELD,
    read=read,
    precedence=3,
    convention="megatron-deepspeed+recompute",
)
