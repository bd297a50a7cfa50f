"""Log format of torchtitan: a line for step 1, then one per `log_freq` steps with their mean.

It is not a table, because the ranks are the product of a printed mesh in two forms, a batch is in
sequences or tokens, and some printed numbers mean unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from paceline.core.units import GIB, TERA
from paceline.engines.log_reading.log_content import LogContent, LogFormat, excerpt, whole_numbers
from paceline.engines.log_reading.records import (
    Records,
    column,
    last_match,
    note_decimals,
    product,
    step_lines,
    store_whole_numbers,
)

ENDS = b"Training completed"

_STEP = re.compile(
    rb'step(?<!validate step)"?[:=] {0,12}(\d{1,18})[ ,]{1,4}'
    rb'((?:loss: |global_avg_loss=|"loss_metrics/).*)'
)
_INCOMPLETE = re.compile(rb"step: {1,12}\d{1,18} +loss(?!.{0,4000}(?:tps|wps|iter): {0,12}[0-9])")
_COLOUR = rb"(?:\x1b\[[0-9;]{0,24}m)?"
_STEP_LINE = re.compile(
    # A literal at the front is searched many times faster than alternatives.
    rb"step(?:: {1,12}\d{1,18} {1,4}"
    + _COLOUR
    + rb"loss: {1,12}"
    + _COLOUR
    + rb"[0-9ni-][^\r\n]{0,200}?(?:tps|wps|iter): |=\d{1,18} global_avg_loss="
    + rb'|(?<="step)": \d{1,18}, "loss_metrics/)'
)

_TIME = column(rb'end_to_end\(s\)"?[:=] ?', rb"iter: {1,12}")
_COLUMNS = {
    "loss": column(rb"loss: {1,12}", rb'global_avg_loss"?[:=] ?'),
    "step_time_s": _TIME,
    "tokens_per_s_per_device": column(rb"tps: ", rb"wps: ", rb'throughput\(tps\)"?[:=] ?'),
    "grad_norm": column(rb'grad_norm"?[:=] {0,12}'),
    "flops_per_s_per_device": column(rb'tflops"?[:=] ?', scale=TERA),
    "mfu": column(rb'mfu(?:\(%\))?"?[:=] ?', scale=0.01),
    "reserved_bytes": column(rb"memory: {0,12}", rb'max_reserved\(GiB\)"?[:=] ?', scale=GIB),
}
_UNKNOWN = {"loss": -1.0, "reserved_bytes": 0.0}
"""Values that mean unknown: loss on first pipeline stages, memory on devices that do not count it.
"""


def read(blocks: Iterable[bytes], log: LogContent) -> None:
    """Read steps, numbered from 1; tokens/s, TFLOP/s and MFU are per device, memory is reserved.

    Lines with `validate step` are not training steps.
    """
    for text, steps in step_lines(blocks, log, _STEP, ENDS, _INCOMPLETE):
        _read_settings(text, log)
        if not steps:
            continue
        index, fields = steps
        # Commas are thousands separators, at least in the rates.
        records = Records([line.replace(b",", b"") for line in fields])
        columns = records.columns(_COLUMNS)
        for name in _UNKNOWN.keys() & columns.keys():
            columns[name] = np.where(columns[name] == _UNKNOWN[name], np.nan, columns[name])
        log.add_steps(whole_numbers(index), **columns)
        note_decimals(log, records.either_texts(_TIME.patterns))
    if log.facts.get("pp", 1) != 1:
        # The pipeline schedule splits the local batch further.
        log.facts.pop("micro_batch", None)


_MODEL = re.compile(rb"Model (\S{1,60} \S{1,60}) +size: ([0-9,]{1,30}) total parameters")
_DEVICE = re.compile(rb" capacity: (\S[^\n]{1,100}?)(?: \(\d{1,4}\))? with [0-9.]{1,12}GiB memory")
_MESH = re.compile(rb" device mesh with parallelism: ([a-z_]{2,20}=[^\n]{1,200})")
_OLD_MESH = re.compile(rb"-D device mesh with \[([^\]\n]{0,200})\], \[([^\]\n]{0,100})\]")
_BATCH = re.compile(
    rb"local batch size (\d{1,12}), global batch size (\d{1,12}), (?:[^\n]{0,80}? )?"
    rb"sequence length (\d{1,12}), total steps (\d{1,12})"
)
_TOKENS = re.compile(
    rb"(\d{1,15}) tokens per train step, (?:[^\n]{0,80}? )?"
    rb"maximum context length (\d{1,12}), total steps (\d{1,12})"
)
_ACCUMULATION = re.compile(rb"gradient.accumulation.steps:? (\d{1,9})")
_LOG_FREQ = re.compile(rb"log_freq[\"']?[:=] ?(\d{1,9})")
_VERSION = re.compile(rb"torchtitan version: ([\w.+-]{1,40})")
_PEAK = re.compile(rb"Peak FLOPS used for computing MFU: ([0-9.e+]{1,16})")
_AXES = {b"tp": "tp", b"pp": "pp", b"cp": "cp", b"ep": "ep"}
_WORLD_AXES = {b"pp", b"dp_replicate", b"dp_shard", b"cp", b"tp"}
"""Axes whose product is the number of ranks; expert parallelism spans several of them."""

_LOW_PRECISION = ((b"Swapped to Float8Linear", "fp8"), (b"Swapped to MXLinear", "mxfp8"))


def _read_settings(text: bytes, log: LogContent) -> None:
    """Store the settings in the lines before the first step; a restart repeats them."""
    if b" device mesh with " in text:
        _read_mesh(text, log)
    if b" capacity: " in text and (match := last_match(_DEVICE, text)):
        log.facts["device"] = excerpt(match[1])
    if b" total parameters" in text and (match := last_match(_MODEL, text)):
        log.facts["model"] = excerpt(match[1])
        store_whole_numbers(log, {b"n": "num_parameters"}, [(b"n", match[2])])
    if b", total steps " in text:
        _read_batch(text, log)
    if b"accumulation" in text and (match := last_match(_ACCUMULATION, text)):
        store_whole_numbers(log, {b"n": "gradient_accumulation"}, [(b"n", match[1])])
    if b"log_freq" in text and (match := last_match(_LOG_FREQ, text)):
        store_whole_numbers(log, {b"n": "log_interval"}, [(b"n", match[1])])
    if b"torchtitan version: " in text and (match := last_match(_VERSION, text)):
        log.facts["framework_version"] = match[1].decode()
    for peak in _PEAK.findall(text):
        log.remark(f"the log's MFU is relative to a peak of {peak.decode()} FLOP/s")
    for mark, dtype in _LOW_PRECISION:
        if mark in text:
            log.facts["dtype"] = dtype


def _read_mesh(text: bytes, log: LogContent) -> None:
    new, old = last_match(_MESH, text), last_match(_OLD_MESH, text)
    if new and not (old and old.start() > new.start()):
        sizes = dict(re.findall(rb"([a-z_]{2,20})=(\d{1,9})", new[1]))
        world = [size for name, size in sizes.items() if name in _WORLD_AXES]
    elif old:
        names = re.findall(rb"'([a-z_]{2,20})'", old[1])
        world = re.findall(rb"\d{1,9}", old[2])
        sizes = dict(zip(names, world, strict=False))
    else:
        return
    for name in (*_AXES.values(), "num_devices"):
        log.facts.pop(name, None)
    store_whole_numbers(log, _AXES, sizes.items())
    ranks = product(*map(int, world))
    if ranks is not None and ranks < 1 << 62:
        log.facts["num_devices"] = ranks


def _read_batch(text: bytes, log: LogContent) -> None:
    """Store batch sizes, printed in sequences or, since 2026, in tokens."""
    statements: list[tuple[bytes, bytes]] = []
    if match := last_match(_BATCH, text):
        statements = list(
            zip((b"micro", b"global", b"length", b"steps"), match.groups(), strict=True)
        )
    if match := last_match(_TOKENS, text):
        tokens, length = int(match[1]), int(match[2])
        statements += [(b"length", match[2]), (b"steps", match[3])]
        if length and tokens % length == 0:
            statements.append((b"global", b"%d" % (tokens // length)))
    store_whole_numbers(log, _BATCH_FACTS, statements)


_BATCH_FACTS = {
    b"micro": "micro_batch",
    b"global": "global_batch",
    b"length": "seq_len",
    b"steps": "total_steps",
}

LOG_FORMAT = LogFormat(
    title="torchtitan",
    marks=(b"loss: ", b"global_avg_loss"),
    step_line=_STEP_LINE,
    read=read,
    example="`step: 50 loss: ... tps: 1,444 tflops: 300.32`",
    numbering="from 1",
    end_marker="Training completed",
    convention="full-attention",
)
