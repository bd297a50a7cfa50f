"""Log format of Primus: Megatron's records after `[date][rank-7/8][INFO ] [trainer.py:1234] :`.

Runs of torchtitan and MaxText under Primus use their own log formats. Source:
`modules/trainer/megatron/trainer.py` and `core/utils/logger.py` of AMD-AGI/Primus, 2025-2026.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from paceline.engines.log_reading.iteration_log import IterationLog
from paceline.engines.log_reading.log_content import LogContent, LogFormat
from paceline.engines.log_reading.records import last_match, store_whole_numbers

_COLOUR = rb"(?:\x1b\[[0-9;]{0,24}m){0,2}"
_HEAD = rb"rank-(\d{1,9})/(\d{1,9})" + _COLOUR + rb"\]\[" + _COLOUR + rb"[A-Z]{4,8} {0,4}"
_RECORD = _HEAD + rb"[^|\r\n]{0,160}?iteration {1,24}\d{1,18}/ {0,24}\d{1,18} {0,4}\|"
_STEP = re.compile(_RECORD)


def read(blocks: Iterable[bytes], log: LogContent) -> None:
    """Read steps as in Megatron-LM; in `13372.8/13364.7` the second number is a running mean.

    TFLOP/s follow Megatron-LM's convention since 2026, and Primus' own before.
    """
    for batch in IterationLog(log).batches(blocks):
        log.add_steps(batch.index, **batch.columns)
        if match := last_match(_STEP, batch.text):
            store_whole_numbers(log, {b"n": "num_devices"}, [(b"n", match[2])])


LOG_FORMAT = LogFormat(
    title="Primus",
    marks=(b"rank-",),
    step_line=re.compile(_RECORD.replace(rb"(\d{1,9})", rb"\d{1,9}")),
    read=read,
    example="Megatron's line after `[...][rank-7/8][INFO ]`, with `13372.8/13364.7`",
    numbering="from 1",
    precedence=2,
)
