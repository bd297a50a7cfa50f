"""Log format of nanochat: `step 00100/21400 (0.47%) | loss: ... | dt: 480.12ms | tok/sec: ...`.

Source: `scripts/base_train.py` and `chat_sft.py` of karpathy/nanochat, 2025-2026. The last
field is `mfu: ...`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from paceline.core.units import MIB
from paceline.engines.log_reading.log_content import (
    LogContent,
    LogFormat,
    excerpt,
    numbers,
    whole_numbers,
)
from paceline.engines.log_reading.records import (
    Records,
    column,
    last_match,
    nan_if_negative,
    note_decimals,
    product_of,
    step_lines,
    store_total_steps,
    store_whole_numbers,
)

ENDS = b"Total training time: "

_STEP = re.compile(rb"step (\d{1,18})(?:/(\d{1,18}))? \([^|()\r\n]{1,24}\) \| (loss: [^\r\n]*)")
_INCOMPLETE = re.compile(
    rb"step \d{1,18}/\d{1,18} \([0-9.%]{1,12}\) \| loss: (?!.{0,400}tok/sec: [0-9])"
)
_TIME = column(rb"\| dt: ", scale=1e-3)
_COLUMNS = {
    "loss": column(rb"loss: "),
    "grad_norm": column(rb"grad norm: "),
    "step_time_s": _TIME,
    "mfu": column(rb"mfu: ", scale=0.01),
    "rate": column(rb"\| tok/sec: "),
}


def read(blocks: Iterable[bytes], log: LogContent) -> None:
    """Read steps, numbered from 0.

    `dt` is the time of each single step, `tok/sec` covers all devices, and MFU is per device.
    """
    settings = _Settings(log)
    for text, steps in step_lines(blocks, log, _STEP, ENDS, _INCOMPLETE):
        settings.read(text)
        if not steps:
            continue
        index, lasts, fields = steps
        records = Records([line.replace(b",", b"") for line in fields])
        columns = records.columns(_COLUMNS)
        if "mfu" in columns:
            columns["mfu"] = nan_if_negative(columns["mfu"])
        rates = columns.pop("rate", None)
        if rates is not None and "step_time_s" in columns:
            columns["tokens"] = product_of(rates, columns["step_time_s"])
        log.add_steps(whole_numbers(index), **columns)
        log.remark("the losses are moving averages")
        store_total_steps(log, lasts)
        note_decimals(log, records.either_texts(_TIME.patterns), 1e3)
    settings.finish()


_BATCH = re.compile(rb"Total batch size ([0-9,]{1,24}) => gradient accumulation steps: (\d{1,9})")
_OF_RANK = re.compile(rb"Tokens / micro-batch / rank: (\d{1,9}) x (\d{1,9}) = ")
_OF_ALL = re.compile(rb"Tokens / micro-batch: ([0-9,]{1,24})")
_DEVICE = re.compile(rb"GPU: ([^|\n]{1,80}?) \| Peak FLOPS \(BF16\): ([0-9.e+]{1,16})")
_PARAMETERS = re.compile(rb"(?:Number of parameters|total {19}): ([0-9,]{1,24})")
_CONFIG = re.compile(rb'"(n_layer|n_head|n_kv_head|n_embd|vocab_size)": (\d{1,12})')
_DTYPE = re.compile(rb"COMPUTE_DTYPE: torch\.([a-z0-9]{1,16})")
_PEAK = re.compile(rb"Peak memory usage: ([0-9.]{1,16})MiB")
_FACTS = {
    b"n_layer": "num_layers",
    b"n_head": "num_heads",
    b"n_kv_head": "num_kv_heads",
    b"n_embd": "hidden_size",
    b"vocab_size": "vocab_size",
    b"parameters": "num_parameters",
    b"micro": "micro_batch",
    b"length": "seq_len",
    b"accumulation": "gradient_accumulation",
    b"devices": "num_devices",
    b"batch": "global_batch",
}


class _Settings:
    """Settings before the first step and after the last; a restart repeats them."""

    def __init__(self, log: LogContent) -> None:
        self._log = log
        self._matches: dict[re.Pattern[bytes], re.Match[bytes]] = {}
        self._fp8 = False

    def read(self, text: bytes) -> None:
        """Read the settings in `text`."""
        log = self._log
        for pattern in (_BATCH, _OF_RANK, _OF_ALL, _DEVICE, _PARAMETERS, _DTYPE):
            if match := last_match(pattern, text):
                self._matches[pattern] = match
        self._fp8 |= b"FP8 training enabled" in text
        store_whole_numbers(log, _FACTS, _CONFIG.findall(text) if b'": ' in text else ())
        for memory in _PEAK.findall(text):
            peak = numbers([memory]).item()
            if peak > 0:
                log.peak("allocated", peak * MIB)

    def finish(self) -> None:
        """Store the settings in the log."""
        log, matches = self._log, self._matches
        if parameters := matches.get(_PARAMETERS):
            store_whole_numbers(log, _FACTS, [(b"parameters", parameters[1])])
        self._keep_batch()
        if dtype := matches.get(_DTYPE):
            log.facts["dtype"] = dtype[1].decode("ascii")
        if self._fp8:
            log.facts["dtype"] = "fp8"
        if device := matches.get(_DEVICE):
            log.facts["device"] = excerpt(device[1])
            log.remark(f"the log's MFU is relative to a peak of {device[2].decode()} FLOP/s")

    def _keep_batch(self) -> None:
        """Store batch sizes, stated in tokens: per rank and micro-batch, of all ranks, per step."""
        rank, every, step = (self._matches.get(p) for p in (_OF_RANK, _OF_ALL, _BATCH))
        statements: list[tuple[bytes, bytes]] = []
        if rank:
            statements += [(b"micro", rank[1]), (b"length", rank[2])]
            if every:
                statements.append((b"devices", _quotient(every[1], int(rank[1]) * int(rank[2]))))
            if step:
                statements.append((b"batch", _quotient(step[1], int(rank[2]))))
        if step:
            statements.append((b"accumulation", step[2]))
        store_whole_numbers(self._log, _FACTS, statements)


def _quotient(total: bytes, part: int) -> bytes:
    """Return `total` / `part` in digits, empty if that is not a whole number."""
    count, remainder = divmod(int(total.replace(b",", b"") or 0), part) if part else (0, 1)
    return b"" if remainder else b"%d" % count


LOG_FORMAT = LogFormat(
    title="nanochat",
    marks=(b"| tok/sec: ",),
    step_line=re.compile(
        rb"step \d{1,18}(?:/\d{1,18})? \([^|()\r\n]{1,24}\) \| loss: [^\r\n]{1,200}?\| dt: "
        rb"[0-9.]{1,24}ms \| tok/sec: "
    ),
    read=read,
    example="`step 00100/21400 (0.47%) | loss: ... | dt: 480.12ms`",
    numbering="from 0",
)
