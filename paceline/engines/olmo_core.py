"""Log format of OLMo-core: a line `[step=10/1000,epoch=1,...]`, followed by one line per metric.

Source: `train/callbacks/console_logger.py` and `speed_monitor.py` of allenai/OLMo-core, to 2026.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from paceline.core.steps import FloatColumn
from paceline.core.units import GIB, TERA
from paceline.engines.log_reading.log_content import LogContent, LogFormat, excerpt, whole_numbers
from paceline.engines.log_reading.records import (
    Records,
    RunningTotals,
    column,
    last_match,
    ratio,
    store_total_steps,
    watch_end,
    without_colors,
)

BEGINS = b"[step="
MAX_BYTES = 8000
"""Maximum length of a record in bytes."""

DECIMALS = {10.0: 1e-2, 1.0: 1e-3}
"""Resolution of printed batches per second above each rate; 0.0001 up to a rate of 1."""

_RECORD = re.compile(rb"\[step=(\d{1,18})/([0-9,]{1,24}|\?\?\?),epoch=[^\]\n]{1,80}\]")
_COLUMNS = {
    "loss": column(rb"train/CE loss="),
    "grad_norm": column(rb"optim/total grad norm="),
    "tokens_per_s_per_device": column(rb"throughput/device/TPS="),
    "reserved_bytes": column(rb"GPU reserved mem \(GiB\)=", scale=GIB),
    "flops_per_s_per_device": column(rb"throughput/device/TFLOPs_per_GPU=", scale=TERA),
    "mfu": column(rb"throughput/device/MFU(?: \(%\))?=", scale=0.01),
    "batches_per_s": column(rb"throughput/device/BPS="),
    "tokens": column(rb"throughput/total tokens="),
}


def read(blocks: Iterable[bytes], log: LogContent) -> None:
    """Read steps, numbered from 1; rates are per device and of each single step.

    The time is 1 / BPS. The figures called `(actual avg)` are running means and are ignored.
    """
    totals = RunningTotals()
    log.facts["log_interval"] = 1
    for block in watch_end(blocks, log, ENDS):
        _read_settings(block, log)
        heads, bodies = _records(block.replace(b"\r", b"\n"))
        rows = [n for n, body in enumerate(bodies) if b"throughput/" in body or b"loss=" in body]
        if not rows:
            continue
        records = Records([bodies[n].replace(b",", b"") for n in rows])
        index = whole_numbers([heads[n][1] for n in rows])
        columns = records.columns(_COLUMNS)
        if (rates := columns.pop("batches_per_s", None)) is not None:
            columns["step_time_s"] = _times(rates, log)
        token_totals = columns.get("tokens", np.full(len(index), np.nan))
        new, (tokens,) = totals.rates(index, token_totals[None, :])
        columns = {name: column[new] for name, column in columns.items()} | {"tokens": tokens}
        log.add_steps(index[new], **columns)
        store_total_steps(log, [heads[row][2] for row in rows])


def _records(text: bytes) -> tuple[list[re.Match[bytes]], list[bytes]]:
    """Return the head of each record, and its metrics: the text up to the next head."""
    heads, bodies = list(_RECORD.finditer(text)), list[bytes]()
    for head in heads:
        following = text.find(BEGINS, head.end())
        end = text.rfind(b"\n", head.end(), following) if following >= 0 else len(text)
        body = text[head.end() : min(max(end, head.end()), head.end() + MAX_BYTES)]
        bodies.append(without_colors(body).replace(b"\n", b" "))
    return heads, bodies


def _times(rates: FloatColumn, log: LogContent) -> FloatColumn:
    """Return seconds per step from batches per second; store their resolution."""
    times = ratio(np.ones(len(rates)), rates)
    rows = np.flatnonzero(np.isfinite(times))
    if len(rows):
        rate = float(rates[rows[-1]])
        decimal = next((step for minimum, step in DECIMALS.items() if rate > minimum), 1e-4)
        log.resolution_s = decimal / rate**2
    return times


ENDS = b"Training complete"

_DEVICE = re.compile(rb"Device: ([^,\n]{1,80}), Device peak FLOPS: (\d{1,20})")


def _read_settings(text: bytes, log: LogContent) -> None:
    if b"Device peak FLOPS: " in text and (match := last_match(_DEVICE, text)):
        log.facts["device"] = excerpt(match[1])
        log.remark(f"the log's MFU is relative to a peak of {int(match[2]):.4g} FLOP/s")


LOG_FORMAT = LogFormat(
    title="OLMo-core",
    marks=(b"throughput/device/", b"train/CE loss="),
    step_line=re.compile(
        rb"(?:throughput/device/(?:TPS|BPS)|throughput/total tokens|train/CE loss)=[0-9ni-]"
    ),
    read=read,
    example="`[step=10/1000,epoch=1,...]`, then `throughput/device/BPS=...`",
    numbering="from 1",
    begins=BEGINS,
)
