"""Schedules made by hand: a table of nodes, batch and micro-batch, as CSV or Markdown."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from paceline.core.errors import UserError, unreadable
from paceline.core.layout import Layout
from paceline.core.problem import refusal
from paceline.core.units import counted

NAMES = {
    "nnodes": "nodes",
    "num_nodes": "nodes",
    "bs": "batch",
    "gbs": "batch",
    "global_batch": "batch",
    "mbs": "micro_batch",
    "zero": "zero_stage",
}
"""Other names of columns, in lower case, words joined by _."""
NEEDED = ("nodes", "batch")
AXES = ("micro_batch", "tp", "pp", "cp", "vp", "zero_stage", "recompute")


@dataclass(frozen=True)
class ScheduleLine:
    """One line of a schedule."""

    nodes: int
    batch: int
    layout: Layout


def read_schedule(path: Path, layout: Layout) -> list[ScheduleLine]:
    """The lines by rising batch; axes without a column are those of `layout`.

    Raises UserError for what is no schedule, with the line, and for a batch that comes twice.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(str(path), error) from error
    schedule = [_line(where, row, layout) for where, row in _rows(str(path), lines)]
    if not schedule:
        raise UserError(str(path), "holds no line of a schedule", allowed="nodes,batch,micro_batch")
    batches = [line.batch for line in schedule]
    twice = next((batch for batch in batches if batches.count(batch) > 1), None)
    if twice is not None:
        raise UserError(str(path), f"has batch {twice} twice", remedy="one line for each batch")
    return sorted(schedule, key=lambda line: line.batch)


def _rows(path: str, lines: list[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Where each line stands, and its cells by column."""
    names: list[str] | None = None
    for number, cells in enumerate(map(_cells, lines), start=1):
        where = f"{path}:{number}"
        if not any(cells) or all(set(cell) <= set("-: ") for cell in cells):
            continue
        if names is None:
            names = [_name(cell) for cell in cells]
            twice = [name for name in (*NEEDED, *AXES) if names.count(name) > 1]
            if twice:
                raise UserError(where, f"has {twice[0]} in two columns")
            missing = [name for name in NEEDED if name not in names]
            if missing:
                raise UserError(
                    where,
                    f"has no column {', '.join(missing)}",
                    allowed=", ".join((*NEEDED, *AXES)),
                )
            continue
        if len(cells) != len(names):
            raise UserError(
                where, f"has {counted(len(cells), 'cell')} under {counted(len(names), 'column')}"
            )
        yield where, dict(zip(names, cells, strict=True))


def _name(title: str) -> str:
    """A column's name; `Micro-batch` is micro_batch."""
    name = title.lower().replace("-", "_").replace(" ", "_")
    return NAMES.get(name, name)


def _cells(line: str) -> list[str]:
    text = line.strip()
    if text.startswith("|"):
        return [cell.strip() for cell in text.strip("|").split("|")]
    return [cell.strip() for cell in next(csv.reader([text]), [])]


def _line(where: str, row: Mapping[str, str], layout: Layout) -> ScheduleLine:
    changes: dict[str, Any] = {name: row[name] for name in AXES if row.get(name)}
    try:
        nodes, batch = int(row["nodes"]), int(row["batch"])
        if nodes < 1 or batch < 1:
            raise ValueError
        axes = {k: v if k == "recompute" else int(v) for k, v in changes.items()}
        return ScheduleLine(nodes, batch, Layout.model_validate({**layout.model_dump(), **axes}))
    except ValidationError as error:
        raise refusal(where, error) from error
    except ValueError as error:
        raise UserError(where, "holds something else than numbers from 1 on") from error
