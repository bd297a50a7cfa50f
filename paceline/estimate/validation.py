"""Validation of the time and memory models on a table of published measurements.

Published memory figures differ in kind: memory that nvidia-smi shows for the device, memory that
PyTorch's allocator reserved, or its peak of allocated memory. They also differ in the rank: the
most loaded one, or the one that writes the log. Comparing across kinds would be wrong by the
context and fragmentation.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf, log
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import UserError, unreadable
from paceline.core.value import Value
from paceline.estimate.estimates import estimates_of_cases
from paceline.estimate.fit.evidence import Evidence
from paceline.estimate.fit.published import NO_DEVICE, PublishedStep, UnsupportedRowError, read_row
from paceline.estimate.fit.refit import adjusted_to
from paceline.estimate.memory.device_memory import MemoryEstimate, memory, rank_memory
from paceline.estimate.memory.framework import FRAMEWORKS, Framework
from paceline.estimate.model.case import Case, Cases, Floats, cases_of
from paceline.estimate.model.weights import common_weights, ffn_weights
from paceline.files import catalog
from paceline.files.csv_table import MAX_CSV_BYTES
from paceline.files.documents import read_text

GIB = 2**30
_SIZE = re.compile(r"-(96)GB")
"""Device variants whose memory differs from that of the catalog's device of the same name."""
NO_MEMORY = "no memory figure"
MORE_STAGES = "more pipeline stages than layers"

Kind = Literal["allocated", "reserved", "device_used"]
KINDS: Mapping[str, Kind] = {"softmax": "device_used", "fused": "allocated", "torch": "reserved"}
"""Kind of memory that each implementation's publications state: nvidia-smi, Megatron's
mem-max-allocated, torchtitan."""
MOST, FIRST, LAST = "most", 0, -1
RANKS: Mapping[str, int] = {"golden": LAST, "tr3m-1B3": FIRST}
"""Rank whose memory a source states, by a word in the source's name.

Megatron's writer is on the last rank. The 1.3B study's figures do not grow with the logits of the
last stage. Other sources state the most loaded rank.
"""

SETTINGS: Mapping[str, Mapping[str, float | bool]] = {
    "gpt3_7b_tp1_pp4_memory_speed": {"vocab": 131073.0, "tied": False},
    "gpt3_7b_tp4_pp1_memory_speed": {"vocab": 131073.0, "tied": False},
    "account_for_embedding_loss_in_pipeline_split": {"vp": 2.0, "tied": False},
    "cross_entropy_loss_fusion": {"more_logit_bytes": 4.0},
    "llama3-8b_h200_202506": {"more_logit_bytes": -10.0},
}
"""Settings of Megatron's tests and torchtitan's runs that tables omit, by a word in the path.

From the tests' model_config.yaml (NVIDIA/Megatron-LM, tests/functional_tests/test_cases/gpt). A
compiled loss wrote its result from fp32 logits to another tensor of the same size (a note in
megatron/core/fusions/fused_cross_entropy.py, where later releases avoid it). torchtitan compiles
its loss where it compiles blocks, from April 2025 on (pytorch/torchtitan#1033): 16-bit logits and
their gradient remain, 4 bytes of 14.
"""
BLOCKING = "tr11-176B"
"""Word in the source whose runs used CUDA_LAUNCH_BLOCKING=1, according to that source."""


@dataclass(frozen=True)
class PublishedMemory:
    """One published memory figure, or one run that ran out of memory."""

    id: str
    source: str
    case: Case
    device_bytes: float
    reported_bytes: float | None
    """Bytes as stated; None if the run ran out of memory."""


def read_memory_row(row: Mapping[str, str]) -> PublishedMemory:
    """Read a row with memory (mem_gb, in GiB) or that ran out; raises UnsupportedRowError.

    Gaps are filled as in `read_row`. Models without a gate have learned positions and a tied head.
    The notes report an optimizer with 8-bit moments.
    """
    notes, memory_text = row.get("notes", ""), (row.get("mem_gb") or "").strip()
    ran_out = notes.startswith("OOM")
    if not memory_text and not ran_out:
        raise UnsupportedRowError(NO_MEMORY)
    # A run that ran out of memory has no step time, but `read_row` requires one. This value is
    # large enough that no peak FLOP rate rejects it.
    case = read_row({**row, "step_time_s": "1e9"}).case
    if float(row.get("pp") or 1) > case.layers:
        raise UnsupportedRowError(MORE_STAGES)
    try:
        device = catalog.find_device(row.get("gpu", "")).device
    except UserError as error:
        raise UnsupportedRowError(NO_DEVICE) from error
    variant = _SIZE.search(row.get("gpu", ""))
    case = replace(
        case,
        tied=not case.gated,
        positions=0.0 if case.gated else case.seq_len,
        moment_bytes=1.0 if "bnb" in notes and "w/o bnb" not in notes else 4.0,
        summed_gradient_bytes=4.0 if "fp32 grad accum" in notes else 0.0,
        blocking_launches=BLOCKING in row.get("source", ""),
    )
    case = replace(case, **_settings(row.get("table_or_path", "")))
    return PublishedMemory(
        id=row.get("id", ""),
        source=row.get("source", "").split(" (via")[0],
        case=case,
        device_bytes=float(variant[1]) * 1e9 if variant else device.memory_bytes or float("inf"),
        reported_bytes=float(memory_text) * GIB if memory_text else None,
    )


def _settings(path: str) -> Mapping[str, Any]:
    none: Mapping[str, float | bool] = {}
    return next((settings for word, settings in SETTINGS.items() if word in path), none)


def memory_as_reported(
    rows: Sequence[PublishedMemory], frameworks: Mapping[str, Framework] | Framework = FRAMEWORKS
) -> Floats:
    """Return estimated bytes of the kind and of the rank that each row states.

    The estimate is capped at the device's memory.
    """
    x = cases_of([row.case for row in rows])
    estimates: dict[int | str, MemoryEstimate] = {
        MOST: memory(x, frameworks),
        FIRST: rank_memory(x, FIRST, frameworks),
        LAST: rank_memory(x, LAST, frameworks),
    }
    totals = {
        (rank, kind): getattr(estimate, kind)
        for rank, estimate in estimates.items()
        for kind in set(KINDS.values())
    }
    estimates_ = [
        totals[rank_of_source(row.source), KINDS[row.case.implementation]][i]
        for i, row in enumerate(rows)
    ]
    return np.minimum(estimates_, [row.device_bytes for row in rows])


def rank_of_source(source: str) -> int | str:
    """Return the pipeline rank whose memory a source states, or MOST."""
    return next((rank for word, rank in RANKS.items() if word in source), MOST)


SHARE, NARROW_SHARE = 0.45, 0.33
"""MFU assumed by the flat rule for 16-bit dtypes, and for narrower ones."""


def flat_rule_step_time(x: Cases) -> Floats:
    """Return the step time in seconds at 45% of the 16-bit peak (33% of a narrower one).

    FLOPs per token: 2 per weight and pass (forward, two backward, one more with recompute), plus
    those of both attention GEMMs. The head is never recomputed.
    """
    active = np.where(x.experts > 1, x.experts_per_token / x.experts, 1.0)
    weights = x.layers * (common_weights(x) + ffn_weights(x) * active)
    attention = 2 * x.layers * x.seq_len * x.heads * x.head_dim * np.where(x.causal > 0, 0.5, 1.0)
    passes = 3 + x.full_recompute
    per_token = passes * (2 * weights + 2 * attention) + 6 * x.vocab * x.hidden
    rate = np.where(x.peak_narrow > 0, NARROW_SHARE * x.peak_narrow, SHARE * x.peak_16bit)
    return per_token * x.seq_len * x.global_batch / x.devices / rate


MAX_PARTS = 10
"""Parts of a table of which each is predicted by a fit to the others."""
REQUIRED_COLUMNS = ("layers", "hidden", "heads", "gpu", "num_gpus", "gbs", "step_time_s")
"""Columns without which no row can be estimated."""


class StepAccuracy(Value):
    """Accuracy of predicted step times; shares are 0-1."""

    n: int
    mape: float | None = None
    """Mean of |predicted / measured - 1|; all fields are None without rows."""
    median: float | None = None
    """Median of |ln(predicted / measured)|."""
    within_10: float | None = None
    within_20: float | None = None
    coverage_80: float | None = None
    """Share of the measured step times that are within their 80% interval."""
    flat_mape: float | None = None
    """MAPE of the flat rule: 45% of the 16-bit peak, 33% of a narrower one."""


class MemoryAccuracy(Value):
    """Accuracy of predicted memory, in the metric of each source; shares are 0-1."""

    n: int
    mape: float | None = None
    median: float | None = None
    """Median of |predicted / reported - 1|."""
    within_5: float | None = None
    within_10: float | None = None


class ValidatedRow(Value):
    """Measured and predicted step time of one row, in seconds."""

    id: str
    source: str
    kind: str
    measured_s: float
    predicted_s: float
    low_s: float
    high_s: float
    error: float
    """predicted / measured - 1."""


class UnsupportedRow(Value):
    """A row that the model does not cover, with the reason."""

    id: str
    reason: str


class Validation(Value):
    """Accuracy on a whole table."""

    table: str
    evidence: str
    overall: StepAccuracy
    left_out: StepAccuracy | None = None
    """Accuracy on rows that are left out of a fit to the others; None if nothing was fitted."""
    by_source: dict[str, StepAccuracy]
    by_kind: dict[str, StepAccuracy]
    memory: MemoryAccuracy
    rows: tuple[ValidatedRow, ...]
    unsupported_rows: tuple[UnsupportedRow, ...]


def read_table(path: Path) -> list[dict[str, str]]:
    """Read the rows of a CSV file; raises UserError if a column of REQUIRED_COLUMNS is missing.

    Unclosed quotes (which would swallow rows), duplicate columns and rows with more cells than
    columns are rejected too.
    """
    try:
        with io.StringIO(read_text(path, MAX_CSV_BYTES), newline="") as lines:
            reader = csv.DictReader(lines, strict=True)
            columns = [name for name in reader.fieldnames or () if name]
            missing = [name for name in REQUIRED_COLUMNS if name not in columns]
            duplicates = sorted({name for name in columns if columns.count(name) > 1})
            if duplicates:
                raise UserError(str(path), f"has duplicate columns: {', '.join(duplicates)}")
            if not columns:
                raise UserError(str(path), "is empty", allowed="a header line and rows")
            if missing:
                raise UserError(
                    str(path),
                    f"lacks the columns {', '.join(missing)}",
                    allowed="the columns in docs/reference/tables.md",
                )
            return [_cells(row, path, reader.line_num) for row in reader]
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(str(path), error) from error
    except csv.Error as error:
        raise UserError(str(path), f"cannot be read as CSV: {error}") from error


def _cells(row: dict[str | None, Any], path: Path, line: int) -> dict[str, str]:
    """Return the cells of a row; its line number is its id if it has none.

    Raises UserError for more cells than columns, because an extra comma shifts all cells after it.
    """
    beyond = [cell for cell in row.get(None) or () if cell.strip()]
    if beyond:
        raise UserError(
            f"{path}:{line}",
            f"has more cells than columns: {', '.join(beyond)}",
            remedy="put text with a comma in quotes",
        )
    cells = {name: cell for name, cell in row.items() if name and isinstance(cell, str)}
    return {**cells, "id": cells.get("id", "").strip() or f"line {line}"}


def validate_rows(
    table: str,
    lines: Sequence[dict[str, str]],
    evidence: Evidence,
    refit: bool = False,
) -> Validation:
    """Predict every row that the model covers, and give the reason for the others.

    With `refit`, also predict each row by coefficients that were adjusted to the other rows.
    """
    rows: list[PublishedStep] = []
    unsupported: list[UnsupportedRow] = []
    for line in lines:
        try:
            rows.append(read_row(line))
        except UnsupportedRowError as reason:
            unsupported.append(UnsupportedRow(id=line.get("id", ""), reason=str(reason)))
    predicted_rows, flat = _predicted(rows, evidence) if rows else ([], np.zeros(0))
    left_out = _accuracy(leave_out(evidence, rows), flat) if rows and refit else None
    sources = np.array([row.source for row in rows])
    kinds = np.array([row.kind for row in rows])
    return Validation(
        table=table,
        evidence=evidence.title,
        overall=_accuracy(predicted_rows, flat),
        left_out=left_out,
        by_source=_accuracies(predicted_rows, flat, sources),
        by_kind=_accuracies(predicted_rows, flat, kinds),
        memory=_memory_accuracy(lines),
        rows=tuple(predicted_rows),
        unsupported_rows=tuple(unsupported),
    )


def modelled_steps(lines: Sequence[dict[str, str]]) -> list[tuple[Case, float]]:
    """Return case and measured seconds of the rows that the model covers.

    A step right after a start is none to adjust the model to.
    """
    steps: list[tuple[Case, float]] = []
    for line in lines:
        with suppress(UnsupportedRowError):
            row = read_row(line)
            if row.kind != "first step":
                steps.append((row.case, row.measured_s))
    return steps


def leave_out(evidence: Evidence, rows: Sequence[PublishedStep]) -> list[ValidatedRow]:
    """Predict each row by coefficients that were adjusted to the rows of other parts.

    There are at most MAX_PARTS parts. Rows with the same case are in the same part, because repeats
    predict each other too well.
    """
    numbers = {case: number for number, case in enumerate(dict.fromkeys(row.case for row in rows))}
    parts = [numbers[row.case] % MAX_PARTS for row in rows]
    predictions: dict[int, ValidatedRow] = {}
    for part in set(parts):
        inside = [row for row, number in zip(rows, parts, strict=True) if number == part]
        steps = [
            (row.case, row.measured_s)
            for row, number in zip(rows, parts, strict=True)
            if number != part and row.kind != "first step"
        ]
        after = adjusted_to(evidence, steps, "the table") if steps else evidence
        which = [i for i, number in enumerate(parts) if number == part]
        predictions |= zip(which, _predicted(inside, after)[0], strict=True)
    return [predictions[i] for i in range(len(rows))]


def _memory_accuracy(lines: Sequence[dict[str, str]]) -> MemoryAccuracy:
    """Return the accuracy on the rows that report memory (mem_gb)."""
    rows: list[PublishedMemory] = []
    for line in lines:
        with suppress(UnsupportedRowError, ValueError):
            rows.append(read_memory_row(line))
    rows = [row for row in rows if row.reported_bytes and 0 < row.reported_bytes < inf]
    if not rows:
        return MemoryAccuracy(n=0)
    missed = np.abs(memory_as_reported(rows) / np.array([row.reported_bytes for row in rows]) - 1)
    return MemoryAccuracy(
        n=len(rows),
        mape=float(missed.mean()),
        median=float(np.median(missed)),
        within_5=float((missed <= 0.05).mean()),
        within_10=float((missed <= 0.1).mean()),
    )


def _predicted(
    rows: Sequence[PublishedStep], evidence: Evidence
) -> tuple[list[ValidatedRow], Floats]:
    """Return rows with their predictions, and the predictions of the flat rule."""
    estimates = estimates_of_cases(cases_of([row.case for row in rows]), evidence)
    columns = (estimates.step_time_s, *estimates.interval_s)
    predictions = zip(rows, *(column.tolist() for column in columns), strict=True)
    predicted_rows = [
        ValidatedRow(
            id=row.id,
            source=row.source,
            kind=row.kind,
            measured_s=row.measured_s,
            predicted_s=seconds,
            low_s=low,
            high_s=high,
            error=seconds / row.measured_s - 1,
        )
        for row, seconds, low, high in predictions
    ]
    return predicted_rows, flat_rule_step_time(estimates.x)


def _accuracies(
    rows: Sequence[ValidatedRow], flat: Floats, names: NDArray[np.str_]
) -> dict[str, StepAccuracy]:
    """Return the accuracy of each group, the largest group first."""
    unique, counts = np.unique(names, return_counts=True)
    accuracies: dict[str, StepAccuracy] = {}
    for name in unique[np.argsort(-counts, kind="stable")].tolist():
        members = np.flatnonzero(names == name)
        accuracies[name] = _accuracy([rows[i] for i in members.tolist()], flat[members])
    return accuracies


def _accuracy(rows: Sequence[ValidatedRow], flat: Floats) -> StepAccuracy:
    if not rows:
        return StepAccuracy(n=0)
    error = np.array([abs(row.error) for row in rows])
    measured = np.array([row.measured_s for row in rows])
    return StepAccuracy(
        n=len(rows),
        mape=float(error.mean()),
        median=float(np.median([abs(log(row.predicted_s / row.measured_s)) for row in rows])),
        within_10=float((error <= 0.1).mean()),
        within_20=float((error <= 0.2).mean()),
        coverage_80=float(np.mean([r.low_s <= r.measured_s <= r.high_s for r in rows])),
        flat_mape=float(np.abs(flat / measured - 1).mean()),
    )
