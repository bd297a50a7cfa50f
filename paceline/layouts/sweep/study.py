"""Layouts of a published table, as the combinations of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.core.errors import UserError
from paceline.core.layout import AXIS_FIELDS
from paceline.files import references
from paceline.files.recipe import Recipe
from paceline.files.references import Row
from paceline.layouts.sweep.plan import Dimension

LAYOUT_FIELDS = (*AXIS_FIELDS, "zero_stage", "micro_batch", "recompute")


def study_combinations(
    recipe: Recipe, tables: str
) -> tuple[tuple[Dimension, ...], tuple[dict[str, str], ...]]:
    """Return the dimensions and combinations of published tables, in their order.

    `tables` are names of tables of the recipe's references with commas; the name of the reference
    may be left out: `32gb` is `bigscience-1b3-32gb`. Raises UserError for an unknown table, and for
    one without layouts or with several numbers of devices, which no sweep can run.
    """
    by_table = _rows_by_table(recipe)
    rows: list[Row] = []
    for name in tables.split(","):
        table = next((t for t in by_table if name.strip() in (t, *_short_names(recipe, t))), None)
        if table is None:
            short_names = [name for t in by_table for name in _short_names(recipe, t)]
            raise UserError(
                f"--study {name.strip()}",
                f"is not a table of {recipe.name}",
                allowed=", ".join(short_names) or "none; the recipe has no published table",
            )
        rows += by_table[table]
    devices = {(row.num_devices, row.global_batch) for row in rows}
    if len(devices) != 1 or any(row.layout is None for row in rows):
        raise UserError(
            f"--study {tables}",
            "has several batches or numbers of devices, or no layouts",
            remedy="use `paceline estimate rampup --check` for a schedule",
        )
    layouts = [row.layout.model_dump() for row in rows if row.layout]
    default = recipe.layout.model_dump()
    names = [name for name in LAYOUT_FIELDS if {each[name] for each in layouts} != {default[name]}]
    combinations = tuple(dict.fromkeys(_settings(layout, names) for layout in layouts))
    dimensions = [
        Dimension(f"layout.{name}", _values(str(layout[name]) for layout in layouts))
        for name in names
    ]
    return tuple(dimensions), tuple(map(dict, combinations))


def _rows_by_table(recipe: Recipe) -> dict[str, list[Row]]:
    by_table: dict[str, list[Row]] = {}
    for name in recipe.references:
        for row in references.find_rows(name):
            by_table.setdefault(row.table, []).append(row)
    return by_table


def _short_names(recipe: Recipe, table: str) -> list[str]:
    """Return the names of a table without that of its reference."""
    return [table.removeprefix(f"{name}-") for name in recipe.references if table.startswith(name)]


def _settings(layout: dict[str, Any], names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    return tuple((f"layout.{name}", str(layout[name])) for name in names)


def _values(texts: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))
