"""Log format of nanoGPT: `iter 10: loss 4.1234, time 250.12ms, mfu 12.34%` per `log_interval`.

Source: `train.py` of karpathy/nanoGPT, 2022-2025.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from paceline.engines.log_reading.log_content import (
    LogContent,
    LogFormat,
    decimal_step,
    numbers,
    whole_numbers,
)
from paceline.engines.log_reading.records import (
    NUMBER,
    last_match,
    nan_if_negative,
    store_whole_numbers,
    watch_end,
    without_colors,
)

MFU_REMARK = (
    "the log's MFU is a moving average, by default relative to an A100's peak of 312 TFLOP/s on "
    "any device"
)

TOKENS_HEADER = b"tokens per iteration will be: "
"""Header whose tokens per iteration apply to the steps after it."""

_BEFORE_HEADER = re.compile(rb"(?=" + TOKENS_HEADER + rb")")

_STEP = re.compile(
    rb"iter (?<![\w`'\"(]iter )(\d{1,18}): loss "
    + NUMBER
    + rb", time ([0-9.]{1,24})ms(?:, mfu (-?[0-9.]{1,24})%)?+(?=[ \t]{0,8}(?:[\r\n,]|\Z))"
)
_INCOMPLETE = re.compile(rb"(?<![\w`'\"(])iter \d{1,18}: loss (?!.{0,60}, time [0-9.]{1,24}ms)")


def read(blocks: Iterable[bytes], log: LogContent) -> None:
    """Read steps, numbered from 0; a step's time includes an evaluation just before it."""
    log.facts["log_interval"] = 1
    settings = _Settings(log)
    for block in watch_end(blocks, log, incomplete=_INCOMPLETE):
        text = without_colors(block)
        for part in _BEFORE_HEADER.split(text) if TOKENS_HEADER in text else (text,):
            settings.read(part)
            _add_steps(part, settings.tokens, log)
    settings.finish()


def _add_steps(text: bytes, tokens: int | None, log: LogContent) -> None:
    """Add the steps of a text, each with `tokens` over all devices."""
    steps = _STEP.findall(text)
    if not steps:
        return
    index, losses, times, shares = zip(*steps, strict=True)
    columns = {"loss": numbers(losses), "step_time_s": numbers(times) / 1e3}
    if any(shares):
        columns["mfu"] = nan_if_negative(numbers(shares) / 100)
        log.remark(MFU_REMARK)
    if tokens is not None:
        columns["tokens"] = np.full(len(index), float(tokens))
    log.add_steps(whole_numbers(index), **columns)
    log.resolution_s = decimal_step(times[-1]) / 1e3


_TOKENS = re.compile(rb"tokens per iteration will be: ([0-9,]{1,24})(?![0-9.])")
_PARTS = re.compile(
    rb"breaks down as: (\d{1,9}) grad accum steps \* (\d{1,9}) processes \* (\d{1,9}) batch size "
    rb"\* (\d{1,9}) max seq len"
)
_PARAMETERS = re.compile(rb"number of parameters: ([0-9.]{1,16})M")
_SETTING = re.compile(
    rb"(?:^|Overriding: |(?<=: )|(?<=\]:))"
    rb"(batch_size|block_size|n_layer|n_head|n_embd|max_iters|dtype) = '?([0-9a-z]{1,16})'?"
    rb"(?=[ \t]{0,8}(?:#|[\r\n]|\Z))",
    re.MULTILINE,
)
_FACTS = {
    b"batch_size": "micro_batch",
    b"block_size": "seq_len",
    b"n_layer": "num_layers",
    b"n_head": "num_heads",
    b"n_embd": "hidden_size",
    b"max_iters": "total_steps",
}
_PART_NAMES = ("gradient_accumulation", "num_devices", "micro_batch", "seq_len")


class _Settings:
    """Settings printed before the first step, only those that differ from the defaults."""

    def __init__(self, log: LogContent) -> None:
        self._log = log
        self._parts: tuple[bytes, ...] = ()
        self.tokens: int | None = None
        """Tokens of a step over all devices."""

    def read(self, text: bytes) -> None:
        """Read the settings in `text`; a restart repeats them."""
        log = self._log
        for name, value in _SETTING.findall(text) if b" = " in text else ():
            store_whole_numbers(log, _FACTS, [(name, value)])
            if name == b"dtype":
                log.facts["dtype"] = value.decode("ascii")
        for millions in _PARAMETERS.findall(text):
            count = numbers([millions]).item()
            if 0 < count < 1e9:
                log.facts["num_parameters"] = round(count * 1e6)
        if match := last_match(_PARTS, text):
            self._parts = match.groups()
        if match := last_match(_TOKENS, text):
            self.tokens = int(match[1].replace(b",", b"")[:15] or 0) or None

    def finish(self) -> None:
        """Store the factors of the batch, and the global batch in samples."""
        log = self._log
        names = {b"%d" % n: name for n, name in enumerate(_PART_NAMES)}
        store_whole_numbers(log, names, zip(names, self._parts, strict=False))
        length = log.facts.get("seq_len")
        if self.tokens is not None and isinstance(length, int):
            samples, remainder = divmod(self.tokens, length)
            if samples and not remainder:
                log.facts["global_batch"] = samples


LOG_FORMAT = LogFormat(
    title="nanoGPT",
    marks=(b"ms, mfu ", b", time "),
    step_line=re.compile(
        rb"(?<![\w`'\"(])iter \d{1,18}: loss (?:nan|-?[0-9.]{1,24}), time [0-9.]{1,24}ms"
        rb"(?:, mfu -?[0-9.]{1,24}%)?+[ \t]{0,8}(?:[\r\n,\x1b]|\Z)"
    ),
    read=read,
    example="`iter 10: loss 4.1234, time 250.12ms, mfu 12.34%`",
    numbering="from 0",
)
