"""What a Hugging Face Trainer's log says of its settings.

Its own block, its arguments, and what DeepSpeed prints of its configuration.
"""

from __future__ import annotations

import re

from paceline.engines.log_reading.log_content import LogContent
from paceline.engines.log_reading.records import keep_whole_numbers

RUNNING = b"***** Running training *****"
_NUMBERING = re.compile(
    rb"(?=\*{5} Running training \*{5}|logging_steps|max_steps|Total optimization steps)"
)
"""Statements that change how what follows is numbered."""

_MARKS = (
    b"batch",
    b"_steps",
    b"ation steps",
    b"world_size .",
    b"_stage .",
    b"16=True",
    b"TrainOutput(",
)
"""Each statement has one of these in itself, so that it does not matter what stands around it."""

_SETTING = re.compile(
    rb"(?<![\w-])(Instantaneous batch size per device|Total train batch size|Total batch size"
    rb"|Gradient [Aa]ccumulation steps|Total optimization steps|logging_steps|max_steps"
    rb"|per_device_train_batch_size|gradient_accumulation_steps|train_micro_batch_size_per_gpu"
    rb"|(?:train_batch_size|world_size|zero_optimization_stage)(?= \.))"
    rb"(?: \([^){}\r\n]{1,80}\))?(?: = |=|[\"']: | {1,3}\.{0,40} {0,3})"
    rb"([0-9][0-9,]{0,30})(?![0-9.])"
)
_DTYPE = re.compile(rb"(?<![\w-])(bf16|fp16)=True")
_FINISHED = re.compile(rb"TrainOutput\(global_step=(\d{1,15}),")

_FACTS = {
    b"Instantaneous batch size per device": "micro_batch",
    b"per_device_train_batch_size": "micro_batch",
    b"train_micro_batch_size_per_gpu": "micro_batch",
    b"Total train batch size": "global_batch",
    b"Total batch size": "global_batch",
    b"train_batch_size": "global_batch",
    b"Gradient Accumulation steps": "gradient_accumulation",
    b"Gradient accumulation steps": "gradient_accumulation",
    b"gradient_accumulation_steps": "gradient_accumulation",
    b"Total optimization steps": "total_steps",
    b"max_steps": "total_steps",
    b"logging_steps": "log_interval",
    b"world_size": "num_devices",
    b"zero_optimization_stage": "zero_stage",
}


def pieces(text: bytes) -> list[bytes]:
    """`text`, divided before each statement that changes how what follows is numbered."""
    if RUNNING in text or b"_steps" in text or b"ation steps" in text:
        return _NUMBERING.split(text)
    return [text]


def read_settings(text: bytes, log: LogContent) -> None:
    """Keep what `text` says in the log's facts; the last attempt of several in one log counts."""
    if not any(mark in text for mark in _MARKS):
        return
    keep_whole_numbers(log, _FACTS, _SETTING.findall(text))
    for dtype in _DTYPE.findall(text):
        log.facts["dtype"] = dtype.decode()
    for steps in _FINISHED.findall(text):
        log.figures["timed_steps"] = float(steps)


def complete_settings(log: LogContent) -> None:
    """Add the number of devices where the batches tell it: total / (a device's x accumulation)."""
    total, part = log.facts.get("global_batch"), log.facts.get("micro_batch")
    accumulation = log.facts.get("gradient_accumulation")
    if isinstance(total, int) and isinstance(part, int) and isinstance(accumulation, int):
        devices, rest = divmod(total, part * accumulation)
        if devices and not rest:
            log.facts.setdefault("num_devices", devices)
