"""Published figures: tables of printed cells with what they were measured on.

A reference is never an expectation of Paceline. Cells keep the source's own characters; where a
cell contradicts the rest of its source, a slip says so and under which change of input it follows.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import Any, Literal, Self, cast

from pydantic import PositiveFloat, PositiveInt, model_validator

from paceline.core import rates
from paceline.core.flops import CONVENTIONS
from paceline.core.hardware import Dtype
from paceline.core.layout import Layout
from paceline.core.value import Value
from paceline.errors import UserError, did_you_mean
from paceline.units import GIB, TERA
from paceline.yaml_file import read_document, validate

UNIT_SIZES: dict[str, float] = {"%": 0.01, "TFLOP/s": TERA, "GiB": GIB}
"""Size of a printed unit in base units; every other unit is its own base unit."""

_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:E[+-]?\d+)?", re.IGNORECASE)


class Correction(Value):
    """Inputs with which a marked cell does follow, each None when it stays as stated."""

    step_time_s: PositiveFloat | None = None
    seq_len: PositiveInt | None = None
    peak_flops_per_s: PositiveFloat | None = None
    base_samples_per_s: PositiveFloat | None = None
    base_num_devices: PositiveInt | None = None
    rounding: Literal["nearest", "down"] | None = None
    status: Literal["ok", "oom"] | None = None


class Slip(Value):
    """Cells that contradict their own source: why, and what they follow from instead."""

    columns: tuple[str, ...]
    slip: str
    """One sentence."""
    follows_with: Correction


class Row(Value):
    """One published measurement with everything that decides it."""

    id: str
    table: str
    source: str
    where: str
    window: str
    """Which steps the source takes its figures from: `last step`, or `as printed` when it is silent."""
    recipe: str
    device: str
    """A name of the device catalog."""
    devices_per_node: PositiveInt
    num_devices: PositiveInt
    layout: Layout = Layout()
    dtype: Dtype
    seq_len: PositiveInt
    global_batch: PositiveInt
    convention: str | None
    """How the source counts FLOPs; None when it counts none."""
    nominal_parameters: PositiveFloat | None = None
    peak_flops_per_s: PositiveFloat | None = None
    """The peak that the source declares for its MFU."""
    flops_per_sample: PositiveFloat | None = None
    """The source's own rounded figure, where it computes with one."""
    total_tokens: PositiveFloat | None = None
    base_num_devices: PositiveInt | None = None
    """Devices of the row in the same table to which speed-ups relate."""
    repeats: str | None = None
    """Another row of the same source that states the same configuration."""
    status: Literal["ok", "oom"] = "ok"
    printed: dict[str, str]
    """Cells by metric, as the source prints them."""
    units: dict[str, str]
    efficiency: dict[PositiveInt, str] = {}
    """Scaling efficiency by the base's devices; it follows from printed cells and is not printed."""
    slips: tuple[Slip, ...] = ()
    note: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        without_unit = sorted(set(self.printed) - set(self.units))
        if without_unit:
            raise ValueError(f"units has no entry for {', '.join(without_unit)}")
        if self.convention is not None and self.convention not in CONVENTIONS:
            raise ValueError(f"convention must be one of {', '.join(CONVENTIONS)}")
        return self

    def figure(self, metric: str) -> float | None:
        """The first number of a printed cell in base units (`12.50%` is 0.125), None without one."""
        number = _NUMBER.search(self.printed.get(metric, ""))
        if number is None:
            return None
        return float(number[0].replace(",", "")) * UNIT_SIZES.get(self.units[metric], 1.0)

    @property
    def step_time_s(self) -> float | None:
        """Seconds a step: printed, or from printed samples/s; None when neither is printed."""
        samples_per_s = self.figure("samples_per_s")
        if samples_per_s is not None:
            return rates.step_time_s(self.global_batch, samples_per_s)
        return self.figure("step_time_s")

    @property
    def samples_per_s(self) -> float | None:
        """Sequences per second over all devices, printed or from the step time."""
        step_time_s = self.step_time_s
        return step_time_s and rates.samples_per_s(self.global_batch, step_time_s)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second over all devices, from the step time and not from a printed cell."""
        step_time_s = self.step_time_s
        return step_time_s and rates.tokens_per_s(self.seq_len, self.global_batch, step_time_s)

    def slips_in(self, metric: str) -> tuple[Slip, ...]:
        """The slips that mark the cell of `metric`."""
        return tuple(slip for slip in self.slips if metric in slip.columns)


class Table(Value):
    """Rows that stand together in a source; `common` in the file is filled into each of them."""

    id: str
    title: str
    rows: tuple[Row, ...]


class Source(Value):
    """One file: the tables of one publication."""

    source: str
    where: str
    window: str
    tables: tuple[Table, ...]

    @model_validator(mode="before")
    @classmethod
    def _fill_rows(cls, document: dict[str, Any]) -> dict[str, Any]:
        filled = dict(document)
        common = _merged(
            {key: document.get(key) for key in ("source", "where", "window")},
            filled.pop("common", {}),
        )
        if "tables" in filled:
            filled["tables"] = [_with_filled_rows(table, common) for table in filled["tables"]]
        return filled


@cache
def sources() -> dict[str, Source]:
    """The files that come with Paceline, by name without `.yaml`."""
    folder = resources.files("paceline") / "references"
    found: dict[str, Source] = {}
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".yaml"):
            with resources.as_file(entry) as path:
                document = read_document(path)
                found[path.stem] = validate(Source, document, str(path))
    return found


def tables() -> tuple[Table, ...]:
    """Every table of every source."""
    return tuple(table for source in sources().values() for table in source.tables)


def rows() -> tuple[Row, ...]:
    """Every row of every table."""
    return tuple(row for table in tables() for row in table.rows)


def row(row_id: str) -> Row:
    """The row called `row_id`; raises UserError with the nearest name."""
    by_id = {row.id: row for row in rows()}
    if row_id not in by_id:
        raise _unknown(f"reference row {row_id!r}", row_id, list(by_id))
    return by_id[row_id]


def named(name: str) -> tuple[Row, ...]:
    """Rows of a source (file), table or row by its name; raises UserError with the nearest name.

    They may lack a throughput (out of memory, node schedules) and belong to several recipes.
    """
    groups = {key: tuple(r for t in s.tables for r in t.rows) for key, s in sources().items()}
    groups |= {table.id: table.rows for table in tables()}
    groups |= {row.id: (row,) for row in rows()}
    if name not in groups:
        raise _unknown(f"reference {name!r}", name, list(groups))
    return groups[name]


def for_recipe(recipe: str) -> tuple[Row, ...]:
    """Rows of `recipe` with a measured throughput, in the order of the tables."""
    return tuple(r for r in rows() if r.recipe == recipe and r.step_time_s is not None)


def _unknown(where: str, word: str, choices: list[str]) -> UserError:
    allowed = ", ".join(sorted(sources()))
    hint = did_you_mean(word, choices) or None
    return UserError(
        where, "is unknown", allowed=f"{allowed}, or their tables and rows", remedy=hint
    )


def _with_filled_rows(table: dict[str, Any], common: dict[str, Any]) -> dict[str, Any]:
    filled = dict(table)
    shared = _merged(_merged(common, {"table": table.get("id")}), filled.pop("common", {}))
    if "rows" in filled:
        filled["rows"] = [_merged(shared, row) for row in filled["rows"]]
    return filled


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`: mappings merge, lists join, anything else is replaced."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            result[key] = _merged(cast(dict[str, Any], below), cast(dict[str, Any], value))
        elif isinstance(below, list) and isinstance(value, list):
            result[key] = [*cast(list[Any], below), *cast(list[Any], value)]
        else:
            result[key] = value
    return result
