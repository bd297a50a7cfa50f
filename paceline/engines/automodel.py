"""Log format of NeMo Automodel: `step 9 | epoch 0 | loss ... | tps 11278.56(1409.82/gpu) | ...`.

Also reads its `training.jsonl`. Source: `recipes/llm/train_ft.py` and `components/loggers/` of
NVIDIA-NeMo/Automodel, 2025-2026.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from paceline.core.units import GIB
from paceline.engines.log_reading.log_content import (
    LogContent,
    LogFormat,
    whole_numbers,
)
from paceline.engines.log_reading.records import (
    NUMBER,
    RecordColumn,
    Records,
    field,
    json_field,
    note_decimals,
    ratio,
    store_whole_numbers,
    watch_end,
    without_colors,
)

_STEP = re.compile(
    rb"step (\d{1,18}) \| epoch \d{1,9} \| (loss [^|\r\n]{1,32}\| grad_norm [^\r\n]*)"
    rb'|\{"step": (\d{1,18}), "epoch": \d{1,9}, "timestamp": "[^"\r\n]{1,60}", '
    rb"([^{}\r\n]{1,8000})\}"
)
_INCOMPLETE = re.compile(
    rb"step \d{1,18} \| epoch \d{1,9} \| loss [^|]{1,32}\| grad_norm "
    rb"(?!.{0,400}(?:tps [0-9.]{1,24}[( ]|time [0-9.]{1,24}s))"
    rb'|\{"step": \d{1,18}, "epoch": [^{}]{0,8000}\Z'
)
_TIME = RecordColumn((re.compile(rb"\| time ([0-9.]{1,24})s[^\n]*"),))
_COLUMNS = {
    "loss": RecordColumn((field(rb"loss "), json_field(rb"loss"))),
    "grad_norm": RecordColumn((field(rb"grad_norm "), json_field(rb"grad_norm"))),
    "allocated_bytes": RecordColumn((field(rb"mem:? "), json_field(rb"mem")), GIB),
    "step_time_s": _TIME,
}
_OF_RANK = re.compile(rb"\(" + NUMBER + rb"/gpu\)[^\n]*")
_OTHERS = {
    "tps": RecordColumn((field(rb"\| tps "), json_field(rb"tps"))),
    "of_rank": RecordColumn((_OF_RANK, json_field(rb"tps_per_gpu"))),
    "tokens": RecordColumn((json_field(rb"num_tokens_per_step"),)),
}


def read(blocks: Iterable[bytes], log: LogContent) -> None:
    """Read steps, numbered from 0; `tps` covers all devices and excludes trailing padding.

    The figure printed per GPU belongs to a data- and context-parallel rank. It equals a device's
    figure only without other parallelism, so the number of devices is read from `World size`. The
    JSON form has the tokens of a step, and therefore its time: tokens / tps.
    """
    world = 0
    for block in watch_end(blocks, log, incomplete=_INCOMPLETE):
        text = without_colors(block).replace(b"\r", b"\n")
        for part in _BEFORE_WORLD.split(text) if b"World size: " in text else (text,):
            if match := _WORLD.match(part):
                world = int(match[1])
                store_whole_numbers(log, {b"n": "num_devices"}, [(b"n", match[1])])
            _add_steps(part, world, log)


def _add_steps(text: bytes, world: int, log: LogContent) -> None:
    """Add the steps of a text from `world` devices (0 if unknown)."""
    steps = [(a or c, b or d) for a, b, c, d in _STEP.findall(text)]
    steps = [(n, fields) for n, fields in steps if fields[:5] == b"loss " or b'"loss": ' in fields]
    if not steps:
        return
    index, fields = zip(*steps, strict=True)
    records = Records(fields)
    columns = records.columns(_COLUMNS)
    unknown = np.full(len(index), np.nan)
    rates = dict.fromkeys(_OTHERS, unknown) | records.columns(_OTHERS)
    printed_times = columns.get("step_time_s", unknown)
    columns["tokens"] = rates["tokens"]
    columns["step_time_s"] = np.where(
        np.isnan(printed_times), ratio(rates["tokens"], rates["tps"]), printed_times
    )
    note_decimals(log, records.either_texts(_TIME.patterns))
    if world:
        columns["tokens_per_s_per_device"] = rates["tps"] / world
    else:
        columns["tokens_per_s_per_device"] = rates["of_rank"]
        log.remark("tokens/s per GPU are those of a data-parallel rank: the log has no World size")
    log.add_steps(whole_numbers(index), **columns)


_WORLD = re.compile(rb"World size: (\d{1,9})")
_BEFORE_WORLD = re.compile(rb"(?=World size: \d)")
"""Header line whose world size applies to the steps after it."""

LOG_FORMAT = LogFormat(
    title="NeMo Automodel",
    marks=(b" | grad_norm ", b'"timestamp": "'),
    step_line=re.compile(
        rb"step \d{1,18} \| epoch \d{1,9} \| loss [-0-9nai.]{1,24} \| grad_norm [-0-9nai.]{1,24} "
        rb'|\{"step": \d{1,18}, "epoch": \d{1,9}, "timestamp": "[^"\r\n]{1,60}", "'
    ),
    read=read,
    example="`step 9 | epoch 0 | loss ... | tps 11278.56(1409.82/gpu)`",
    numbering="from 0",
)
