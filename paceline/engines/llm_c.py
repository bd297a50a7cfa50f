"""Log format of llm.c: a table of settings, then `step 1/19560 | loss ... | 4688.25 ms | ...`.

Source: `train_gpt2.cu` and its reference `train_gpt2.py` of karpathy/llm.c, 2024.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from paceline.core.units import MIB
from paceline.engines.log_reading.log_content import (
    LogContent,
    LogFormat,
    excerpt,
    whole_numbers,
)
from paceline.engines.log_reading.records import (
    RecordColumn,
    Records,
    column,
    nan_if_negative,
    note_decimals,
    step_lines,
    store_total_steps,
    store_whole_numbers,
)

ENDS = b"total average iteration time: "

_STEP = re.compile(
    rb"step {1,12}(\d{1,18})/(\d{1,18}) \| ((?:train )?loss [^\r\n]{1,80}? norm [^\r\n]*)"
)
_INCOMPLETE = re.compile(rb"step {1,12}\d{1,18}/\d{1,18} \| (?:train )?loss (?!.{0,200}tok/s)")
_TIME = RecordColumn((re.compile(rb"[|(] {0,8}([0-9.]{1,24}) ms[^\n]*"),), 1e-3)
_COLUMNS = {
    "loss": column(rb"loss "),
    "grad_norm": column(rb"norm "),
    "step_time_s": _TIME,
    "mfu": RecordColumn((re.compile(rb"\| {0,8}(-?[0-9.]{1,24})% \w{2,8} MFU[^\n]*"),), 0.01),
}


def read(blocks: Iterable[bytes], log: LogContent) -> None:
    """Read steps, numbered from 1; time (ms) and MFU are of each single step, MFU per device.

    `tok/s` is a moving average over all devices and is ignored.
    """
    log.facts["log_interval"] = 1
    for text, steps in step_lines(blocks, log, _STEP, ENDS, _INCOMPLETE):
        _read_settings(text, log)
        if not steps:
            continue
        index, lasts, fields = steps
        records = Records(fields)
        columns = records.columns(_COLUMNS)
        if "mfu" in columns:
            columns["mfu"] = nan_if_negative(columns["mfu"])
        log.add_steps(whole_numbers(index), **columns)
        store_total_steps(log, lasts)
        note_decimals(log, records.either_texts(_TIME.patterns), 1e3)


_ROW = re.compile(
    rb"\| (micro batch size B|sequence length T|total batch size|num_processes|zero_stage|device"
    rb"|precision|padded_vocab_size Vp|num_layers L|num_heads NH|channels C|num_parameters) {1,24}"
    rb"\| ([^|\r\n]{1,80}?) {1,60}\|"
)
_ACCUMULATION = re.compile(rb"=> setting grad_accum_steps=(\d{1,12})")
_MEMORY = re.compile(rb"device memory usage: (\d{1,12}) MiB")
_FACTS = {
    b"micro batch size B": "micro_batch",
    b"sequence length T": "seq_len",
    b"num_processes": "num_devices",
    b"zero_stage": "zero_stage",
    b"padded_vocab_size Vp": "vocab_size",
    b"num_layers L": "num_layers",
    b"num_heads NH": "num_heads",
    b"channels C": "hidden_size",
    b"num_parameters": "num_parameters",
    b"total": "global_batch",
    b"accumulation": "gradient_accumulation",
}


def _read_settings(text: bytes, log: LogContent) -> None:
    """Store the settings in the table; the total batch is in tokens."""
    for name, value in _ROW.findall(text):
        store_whole_numbers(log, _FACTS, [(name, value)])
        if name in (b"device", b"precision"):
            fact = "device" if name == b"device" else "dtype"
            log.facts[fact] = excerpt(value.lower() if fact == "dtype" else value)
        elif name == b"total batch size" and value.isdigit():
            length = log.facts.get("seq_len")
            samples, remainder = (
                divmod(int(value[:18]), length) if isinstance(length, int) else (0, 1)
            )
            store_whole_numbers(log, _FACTS, [(b"total", b"%d" % samples)] if not remainder else [])
    for steps in _ACCUMULATION.findall(text):
        store_whole_numbers(log, _FACTS, [(b"accumulation", steps)])
    for used in _MEMORY.findall(text):
        log.peak("used", int(used) * MIB)


LOG_FORMAT = LogFormat(
    title="llm.c",
    marks=(b" tok/s",),
    step_line=re.compile(
        rb"step {1,12}\d{1,18}/\d{1,18} \| (?:train )?loss {1,4}[0-9ni-][^|\r\n]{0,40}\| norm "
        rb"[^\r\n]{1,120}? ms[ ,|]"
    ),
    read=read,
    example="`step    1/19560 | loss ... | 4688.25 ms | 28.8% bf16 MFU`",
    numbering="from 1",
)
