"""Log format of nanotron: an `iteration: 991 / 1000 | ...` line per step, with 3-digit numbers.

Source: `trainer.py` and `logging/base.py` of huggingface/nanotron, 2023-2026.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from paceline.core.units import TERA
from paceline.engines.log_reading.log_content import (
    LogContent,
    LogFormat,
    numbers,
    whole_numbers,
)
from paceline.engines.log_reading.records import (
    LARGEST_SETTING,
    Records,
    last_match,
    note_decimals,
    note_resolution,
    product,
    step_lines,
    store_total_steps,
    store_whole_numbers,
)

DIGITS = 3
"""Significant digits of every number; trailing zeros are omitted, `2.61K` is 2610."""

_STEP = re.compile(rb"iteration: (\d{1,18}) / (\d{1,18}) \| (consumed_(?:tokens|samples): .*)")
_INCOMPLETE = re.compile(rb"iteration: \d{1,18} / (?!.{0,2000}\| (?:lm_loss|lr): )")
_NUMBER = rb"(-?(?:nan|inf)|[-+0-9.eE]{1,24}[KMGBTPE]?)(?![0-9A-Za-z])[^\n]*"
_FIELDS = {
    "step_time_s": (re.compile(rb"time_per_iteration_ms: {0,8}" + _NUMBER), 1e3),
    "tokens_per_s_per_device": (re.compile(rb"tokens_per_sec_per_gpu: {0,8}" + _NUMBER), 1.0),
    "global_batch": (
        re.compile(rb"global_batch_size: {0,8}(\d{1,12})(?![0-9.KMGBTPE])[^\n]*"),
        1.0,
    ),
    "loss": (re.compile(rb"lm_loss: {0,8}" + _NUMBER), 1.0),
    "grad_norm": (re.compile(rb"grad_norm: {0,8}" + _NUMBER), 1.0),
    "flops_per_s_per_device": (re.compile(rb"model_tflops_per_gpu: {0,8}" + _NUMBER), 1 / TERA),
    "reserved_bytes": (re.compile(rb"cuda_max_memory_reserved: {0,8}" + _NUMBER), 1.0),
}
"""Column of Step: its field, and the divisor of the printed number.

A batch of `1.02K` may be any of 1015 to 1024, so it is ignored.
"""

_SUFFIXES = dict(zip(b"KMGBTPE", (b"e3", b"e6", b"e9", b"e9", b"e12", b"e15", b"e18"), strict=True))


def read(blocks: Iterable[bytes], log: LogContent) -> None:
    """Read steps, numbered from 1; tokens/s and TFLOP/s are per device.

    In 2023, numbers were printed in full, with one decimal of a millisecond.
    """
    settings = _Settings(log)
    for text, steps in step_lines(blocks, log, _STEP, incomplete=_INCOMPLETE):
        settings.read(text)
        if not steps:
            continue
        index, lasts, fields = steps
        records = Records(fields)
        columns = {
            name: numbers(list(map(_expand_suffix, texts))) / divisor
            for name, (pattern, divisor) in _FIELDS.items()
            if (texts := records.texts(pattern)) is not None
        }
        log.add_steps(whole_numbers(index), **columns)
        store_total_steps(log, lasts)
        if fields[-1].startswith(b"consumed_tokens"):
            note_resolution(log, columns, DIGITS)
        else:
            note_decimals(log, records.texts(_FIELDS["step_time_s"][0]) or (), 1e3)
    settings.finish()


def _expand_suffix(text: bytes) -> bytes:
    """Return `2.61e3` for `2.61K`."""
    suffix = _SUFFIXES.get(text[-1]) if len(text) > 1 else None
    return text[:-1] + suffix if suffix else text


_SETTING = re.compile(
    rb"[ (](dp|pp|tp|context_parallel_size|expert_parallel_size|zero_stage|hidden_size"
    rb"|num_hidden_layers|num_attention_heads|num_key_value_heads|intermediate_size|vocab_size)"
    rb"=(\d{1,15})[,)]"
)
_START = re.compile(
    rb"\| mbs: (\d{1,12}) \| grad_accum: (\d{1,12}) \| global_batch_size: (\d{1,12}) "
    rb"\| sequence_length: (\d{1,12}) \| train_steps: (\d{1,12}) \|"
)
_DTYPE = re.compile(rb"[ (]dtype=torch\.([a-z0-9_]{1,16}),")
_NAMES = {
    b"tp": "tp",
    b"pp": "pp",
    b"context_parallel_size": "cp",
    b"expert_parallel_size": "ep",
    b"zero_stage": "zero_stage",
    b"hidden_size": "hidden_size",
    b"num_hidden_layers": "num_layers",
    b"num_attention_heads": "num_heads",
    b"num_key_value_heads": "num_kv_heads",
    b"intermediate_size": "ffn_size",
    b"vocab_size": "vocab_size",
}
_WORLD_AXES = {b"dp", b"tp", b"pp", b"context_parallel_size", b"expert_parallel_size"}
_START_NAMES = ("micro_batch", "gradient_accumulation", "global_batch", "seq_len", "total_steps")


class _Settings:
    """Settings in the printed configuration; a restart repeats it."""

    def __init__(self, log: LogContent) -> None:
        self._log = log
        self._axes: dict[bytes, int] = {}

    def read(self, text: bytes) -> None:
        """Read the settings in `text`."""
        log = self._log
        if b"grad_accum: " in text and (match := last_match(_START, text)):
            names = {b"%d" % n: name for n, name in enumerate(_START_NAMES)}
            store_whole_numbers(log, names, zip(names, match.groups(), strict=True))
        if b"=" not in text:
            return
        if statements := _SETTING.findall(text):
            store_whole_numbers(log, _NAMES, statements)
            self._axes.update((name, int(size)) for name, size in statements if name in _WORLD_AXES)
        if b"dtype=torch." in text and (match := last_match(_DTYPE, text)):
            log.facts["dtype"] = match[1].decode("ascii")

    def finish(self) -> None:
        """Add the number of devices: the product of all axes, of which `dp` is always printed."""
        ranks = product(*self._axes.values())
        if b"dp" in self._axes and ranks is not None and ranks < LARGEST_SETTING:
            self._log.facts["num_devices"] = ranks


LOG_FORMAT = LogFormat(
    title="nanotron",
    marks=(b"time_per_iteration_ms: ",),
    step_line=re.compile(
        rb"iteration: \d{1,18} / \d{1,18} \| consumed_(?:tokens|samples): {1,12}"
        rb"[0-9.KMGBTPE]{1,16} "
    ),
    read=read,
    example="`iteration: 991 / 1000 | ... elapsed_time_per_iteration_ms: 2.61K`",
    numbering="from 1",
)
