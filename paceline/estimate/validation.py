"""Predicted against measured: the time model on a table of published measurements."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from contextlib import suppress
from math import inf, log
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import UserError, unreadable
from paceline.core.value import Value
from paceline.estimate.estimates import estimates_of_cases
from paceline.estimate.fit.evidence import Evidence
from paceline.estimate.fit.published import PublishedStep, UnmodelledError, read_row
from paceline.estimate.memory.published import PublishedMemory, as_stated, read_memory_row
from paceline.estimate.model.case import Cases, Floats, cases_of
from paceline.estimate.model.weights import common_weights, ffn_weights

SHARE, NARROW_SHARE = 0.45, 0.33
"""Of the 16-bit peak, and of the peak of a dtype narrower than that."""


def flat_rule_s(x: Cases) -> Floats:
    """Seconds of a step at 45 % of the 16-bit peak (33 % of a narrower one).

    FLOP of a token: 2 a weight and pass, forward, twice backward and once more with recomputation,
    and those of attention's two products; the head is never recomputed.
    """
    active = np.where(x.experts > 1, x.experts_per_token / x.experts, 1.0)
    weights = x.layers * (common_weights(x) + ffn_weights(x) * active)
    attention = 2 * x.layers * x.seq_len * x.heads * x.head_dim * np.where(x.causal > 0, 0.5, 1.0)
    passes = 3 + x.full_recompute
    per_token = passes * (2 * weights + 2 * attention) + 6 * x.vocab * x.hidden
    rate = np.where(x.peak_narrow > 0, NARROW_SHARE * x.peak_narrow, SHARE * x.peak_16bit)
    return per_token * x.seq_len * x.global_batch / x.devices / rate


NEEDED = ("layers", "hidden", "heads", "gpu", "num_gpus", "gbs", "step_time_s")
"""Columns without which no row says anything."""


class StepAccuracy(Value):
    """How well step times were predicted; shares are 0-1."""

    n: int
    mape: float | None
    """Mean of |predicted / measured - 1|; this and all others are None without rows."""
    median: float | None
    """Median of |ln(predicted / measured)|."""
    within_10: float | None
    within_20: float | None
    coverage_80: float | None
    """Share of the measured step times that lie in their 80 % interval."""
    flat_mape: float | None
    """MAPE of the flat rule: 45 % of the 16-bit peak, 33 % of a narrower one."""


class MemoryAccuracy(Value):
    """How well stated memories were predicted, each as its source states it; shares are 0-1."""

    n: int
    mape: float | None
    median: float | None
    """Of |predicted / stated - 1|."""
    within_5: float | None
    within_10: float | None


class ValidatedRow(Value):
    """One row: what was measured and what is predicted, in seconds of a step."""

    id: str
    source: str
    kind: str
    measured_s: float
    predicted_s: float
    low_s: float
    high_s: float
    error: float
    """predicted / measured - 1."""


class Unmodelled(Value):
    """A row that was left out, and why."""

    id: str
    reason: str


class Validation(Value):
    """The whole table."""

    table: str
    evidence: str
    overall: StepAccuracy
    by_source: dict[str, StepAccuracy]
    by_kind: dict[str, StepAccuracy]
    memory: MemoryAccuracy
    rows: tuple[ValidatedRow, ...]
    unmodelled: tuple[Unmodelled, ...]


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file; raises UserError when it is no table or lacks a column of NEEDED.

    An open quote, which would swallow rows, a column that is there twice and a row of more cells
    than columns are refused too.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.DictReader(lines, strict=True)
            columns = [name for name in reader.fieldnames or () if name]
            missing = [name for name in NEEDED if name not in columns]
            twice = sorted({name for name in columns if columns.count(name) > 1})
            if twice:
                raise UserError(str(path), f"has more than one column {', '.join(twice)}")
            if not columns:
                raise UserError(str(path), "is empty", allowed="a header line and rows")
            if missing:
                raise UserError(
                    str(path),
                    f"has no column {', '.join(missing)}",
                    allowed="the columns of docs/estimate.md",
                )
            return [_cells(row, path, reader.line_num) for row in reader]
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(str(path), error) from error
    except csv.Error as error:
        raise UserError(str(path), f"cannot be read as CSV: {error}") from error


def _cells(row: dict[str | None, Any], path: Path, line: int) -> dict[str, str]:
    """The cells of a row that has an id, else its line stands for it; gaps are left out.

    Raises UserError for more cells than columns: behind a comma too many all of them are shifted.
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


def validate_rows(table: str, lines: Sequence[dict[str, str]], evidence: Evidence) -> Validation:
    """Every row that can be modelled with its prediction, the others with their reason."""
    rows: list[PublishedStep] = []
    unmodelled: list[Unmodelled] = []
    for line in lines:
        try:
            rows.append(read_row(line))
        except UnmodelledError as reason:
            unmodelled.append(Unmodelled(id=line.get("id", ""), reason=str(reason)))
    validated, flat = _predicted(rows, evidence) if rows else ([], np.zeros(0))
    sources = np.array([row.source for row in rows])
    kinds = np.array([row.kind for row in rows])
    return Validation(
        table=table,
        evidence=evidence.title,
        overall=_accuracy(validated, flat),
        by_source=_accuracies(validated, flat, sources),
        by_kind=_accuracies(validated, flat, kinds),
        memory=_memory_accuracy(lines),
        rows=tuple(validated),
        unmodelled=tuple(unmodelled),
    )


def _memory_accuracy(lines: Sequence[dict[str, str]]) -> MemoryAccuracy:
    """The accuracy of the rows that state a memory (mem_gb) and can be modelled."""
    rows: list[PublishedMemory] = []
    for line in lines:
        with suppress(UnmodelledError, ValueError):
            rows.append(read_memory_row(line))
    rows = [row for row in rows if row.stated_bytes and 0 < row.stated_bytes < inf]
    if not rows:
        return MemoryAccuracy(n=0, mape=None, median=None, within_5=None, within_10=None)
    missed = np.abs(as_stated(rows) / np.array([row.stated_bytes for row in rows]) - 1)
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
    """Rows with their predictions, and the flat rule's."""
    estimates = estimates_of_cases(cases_of([row.case for row in rows]), evidence)
    columns = (estimates.step_time_s, *estimates.interval_s)
    predictions = zip(rows, *(column.tolist() for column in columns), strict=True)
    validated = [
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
    return validated, flat_rule_s(estimates.x)


def _accuracies(
    rows: Sequence[ValidatedRow], flat: Floats, names: NDArray[np.str_]
) -> dict[str, StepAccuracy]:
    """The accuracy of each group, the largest first."""
    unique, counts = np.unique(names, return_counts=True)
    accuracies: dict[str, StepAccuracy] = {}
    for name in unique[np.argsort(-counts, kind="stable")].tolist():
        members = np.flatnonzero(names == name)
        accuracies[name] = _accuracy([rows[i] for i in members.tolist()], flat[members])
    return accuracies


def _accuracy(rows: Sequence[ValidatedRow], flat: Floats) -> StepAccuracy:
    if not rows:
        return StepAccuracy(
            n=0,
            mape=None,
            median=None,
            within_10=None,
            within_20=None,
            coverage_80=None,
            flat_mape=None,
        )
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
