"""MaxText's log: one `completed step` line a step, printed by the first process."""

from __future__ import annotations

import re
from collections.abc import Iterable

from paceline.core.logged import Dialect, Logged, decimal_step, numbers, whole_numbers
from paceline.units import TERA

__all__ = ["DIALECT"]

NUMBER = rb"([0-9.eE+-]{1,24}|nan|inf)"

_STEP = re.compile(
    rb"completed step: (\d{1,18}), seconds: " + NUMBER
    + rb"(?:, TFLOP/s(?:/device)?: " + NUMBER + rb")?"
    + rb"(?:, Tokens/s/device: " + NUMBER + rb")?"
    + rb"(?:, total_weights: " + NUMBER + rb")?"
    + rb"(?:, loss: " + NUMBER + rb")?"
)  # fmt: skip


def read(blocks: Iterable[bytes], log: Logged) -> None:
    """Steps are numbered from 0; `TFLOP/s` is of one device, `total_weights` the step's tokens."""
    for block in blocks:
        found = _STEP.findall(block)
        if not found:
            continue
        index, seconds, tflops, tokens_per_s, tokens, loss = zip(*found, strict=True)
        log.resolution_s = log.resolution_s or decimal_step(seconds[0])
        log.add_steps(
            whole_numbers(index),
            step_time_s=numbers(seconds),
            flops_per_s_per_device=numbers(tflops) * TERA,
            tokens_per_s_per_device=numbers(tokens_per_s),
            tokens=numbers(tokens),
            loss=numbers(loss),
        )


DIALECT = Dialect(
    title="MaxText",
    marks=(b"completed step: ",),
    step_line=re.compile(rb"completed step: \d+, seconds: [0-9.]"),
    read=read,
    precedence=5,
)
