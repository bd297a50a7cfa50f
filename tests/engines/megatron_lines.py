"""Iteration records as the Megatron family prints them, made up field by field."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.engines.log_reading.log_content import LogContent, LogFormat

FIELDS = {
    "consumed samples": "        1024",
    "elapsed time per iteration (ms)": "1250.5",
    "learning rate": "2.093023E-06",
    "global batch size": "  128",
    "lm loss": "8.995420E+00",
    "loss scale": "1.0",
    "grad norm": "6.042",
    "number of skipped iterations": "  0",
    "number of nan iterations": "  0",
}
MS, S = "elapsed time per iteration (ms)", "elapsed time per iteration (s)"


def fields(changed: dict[str, str | None]) -> dict[str, str]:
    """FIELDS with other values; those of None are not printed, new ones come last."""
    return {name: value for name, value in (FIELDS | changed).items() if value is not None}


def record(number: int, changed: dict[str, str | None] | None = None, before: str = " ") -> bytes:
    """One iteration's line with these fields changed."""
    printed = "".join(f" {name}: {value} |" for name, value in fields(changed or {}).items())
    return f"{before}iteration {number:8d}/     500 |{printed}\n".encode()


def records(times_ms: Sequence[float], first: int = 1) -> bytes:
    """Lines of iterations that took these times."""
    return b"".join(
        record(number, {MS: f"{time:.1f}"}) for number, time in enumerate(times_ms, first)
    )


def read(kind: LogFormat, *blocks: bytes) -> LogContent:
    """What the log format reads of these blocks."""
    log = LogContent()
    kind.read(blocks, log)
    return log


def column(log: LogContent, name: str) -> list[float | None]:
    """A column as plain numbers with the digits of 32 bit; None where nothing is said."""
    return [
        None if np.isnan(value) else float(f"{value:.7g}") for value in log.steps()[name].tolist()
    ]
