"""Published figures: tables of printed cells with what they were measured on.

A reference is never an expectation of Paceline. Cells keep the source's own characters, whether
they follow from the rest of their row or not; `paceline audit` tells which do not, and why.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self, cast

from pydantic import PositiveFloat, model_validator

from paceline.core import rates
from paceline.core.errors import UserError, did_you_mean
from paceline.core.flops import CONVENTIONS, without_recompute
from paceline.core.hardware import Dtype
from paceline.core.layout import Layout
from paceline.core.printed import read_printed
from paceline.core.shape import DecoderShape
from paceline.core.units import GIB, TERA, counted
from paceline.core.value import PositiveInt, Value
from paceline.files.yaml_file import read_model, read_shipped

UNIT_SIZES: dict[str, float] = {"%": 0.01, "TFLOP/s": TERA, "GiB": GIB}
"""Size of a printed unit in base units; every other unit is its own base unit."""


class Row(Value):
    """One published measurement with what decides it; None is what the source does not state."""

    id: str
    table: str
    source: str
    where: str
    window: str
    """The steps that the source's figures are from: `last step`, `as printed` if it is silent."""
    statement: str | None = None
    """For a claim of the text: what is claimed, in other words than the source's."""
    recipe: str | None = None
    model: str | None = None
    """The source's name of the model, for rows without a recipe."""
    shape: DecoderShape | None = None
    """Of the model, for rows without a recipe."""
    experts_per_token: PositiveInt | None = None
    """Experts that see a token; `shape.ffn_size` is then that of one expert."""
    device: str | None = None
    """A name of the device catalog."""
    devices_per_node: PositiveInt | None = None
    num_devices: PositiveInt | None = None
    hosts: str | None = None
    layout: Layout = Layout()
    """Only the fields that were given are stated by the source."""
    dtype: Dtype | None = None
    seq_len: PositiveInt | None = None
    global_batch: PositiveInt | None = None
    convention: str | None = None
    """How the source counts FLOPs; None when it counts none, or in no way known here."""
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
    resolution: dict[str, PositiveFloat] = {}
    """What a cell is a multiple of, where that is more than its last digit shows."""
    note: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        without_unit = sorted(set(self.printed) - set(self.units))
        if without_unit:
            raise ValueError(f"units has no entry for {', '.join(without_unit)}")
        if self.convention and without_recompute(self.convention) not in CONVENTIONS:
            raise ValueError(f"convention must be one of {', '.join(CONVENTIONS)}")
        return self

    def figure(self, metric: str) -> float | None:
        """The first number of a printed cell in base units (`12.50%` is 0.125), else None."""
        number = read_printed(self.printed.get(metric, ""))
        return number and number.value * UNIT_SIZES.get(self.units[metric], 1.0)

    @property
    def step_time_s(self) -> float | None:
        """Seconds a step: printed, or from printed samples/s or tokens/s; None without a speed."""
        samples_per_s = self.figure("samples_per_s") or self._samples_per_s_of_tokens()
        if samples_per_s and self.global_batch:
            return rates.step_time_s(self.global_batch, samples_per_s)
        return self.figure("step_time_s")

    @property
    def samples_per_s(self) -> float | None:
        """Sequences per second over all devices, printed or from the step time."""
        step_time_s = self.step_time_s
        if not (step_time_s and self.global_batch):
            return None
        return rates.samples_per_s(self.global_batch, step_time_s)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second over all devices, from the row's own speed."""
        step_time_s = self.step_time_s
        if not (step_time_s and self.global_batch and self.seq_len):
            return None
        return rates.tokens_per_s(self.seq_len, self.global_batch, step_time_s)

    def _samples_per_s_of_tokens(self) -> float | None:
        """From printed tokens/s, in rows that print no step time."""
        if "step_time_s" in self.printed or not self.seq_len:
            return None
        total = self.figure("tokens_per_s")
        per_device = self.figure("tokens_per_s_per_device")
        tokens_per_s = total or (per_device and self.num_devices and per_device * self.num_devices)
        return tokens_per_s / self.seq_len if tokens_per_s else None


class ReferenceTable(Value):
    """Rows that stand together in a source; `common` in the file is filled into each of them.

    Many rows may be written as `rows_csv`: one line a row, columns by their dotted names
    (`layout.tp`, `printed.step_time_s`), an empty cell for what is not stated.
    """

    id: str
    title: str
    rows: tuple[Row, ...]


class ConvergencePoint(Value):
    """Samples that a benchmark's reference needed to its target, in repeated runs at one batch."""

    id: str
    benchmark: str
    rulesets: tuple[str, ...]
    """Rounds of MLPerf Training in which it is valid."""
    global_batch: PositiveInt
    samples_to_target: tuple[PositiveInt, ...]
    """One figure a run."""
    hyperparameters: dict[str, float] = {}
    platform: str | None = None


class Source(Value):
    """One file: the tables of one publication."""

    source: str
    where: str
    window: str
    tables: tuple[ReferenceTable, ...] = ()
    convergence: tuple[ConvergencePoint, ...] = ()
    scores_csv: str | None = None
    """Published MLPerf Training results, one a line."""

    @model_validator(mode="before")
    @classmethod
    def _fill_rows(cls, document: dict[str, Any]) -> dict[str, Any]:
        filled = dict(document)
        common = _merged(
            {key: document.get(key) for key in ("source", "where", "window")},
            _taken_common(filled),
        )
        return _each(filled, "tables", lambda table: _with_filled_rows(table, common))

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        repeated = [name for name, n in Counter(row.id for row in self.rows).items() if n > 1]
        if repeated:
            raise ValueError(f"two rows are called {repeated[0]!r}")
        return self

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows of all its tables."""
        return tuple(row for table in self.tables for row in table.rows)


def source_names() -> list[str]:
    """Names of the files that come with Paceline, without `.yaml`."""
    return sorted(_files())


@cache
def source(name: str) -> Source:
    """Return the file called `name`; raise KeyError for an unknown one."""
    return Source.model_validate(read_shipped(_files()[name]))


def read_source(path: Path) -> Source:
    """Return a user's file in the form of references; raise UserError with its line."""
    return read_model(Source, path)[0]


def sources() -> dict[str, Source]:
    """All files that come with Paceline, by name."""
    return {name: source(name) for name in source_names()}


def tables() -> tuple[ReferenceTable, ...]:
    """Every table of every source."""
    return tuple(table for source in sources().values() for table in source.tables)


def rows() -> tuple[Row, ...]:
    """Every row of every table."""
    return tuple(row for table in tables() for row in table.rows)


def row(row_id: str) -> Row:
    """The row called `row_id`; raises UserError with the nearest name."""
    for name in _files_with(row_id):
        for candidate in source(name).rows:
            if candidate.id == row_id:
                return candidate
    raise _unknown(f"reference row {row_id!r}", row_id, [row.id for row in rows()])


def named(name: str) -> tuple[Row, ...]:
    """Rows of a source (file), table or row by its name; raises UserError with the nearest name.

    They may lack a throughput (out of memory, node schedules) and belong to several recipes.
    """
    return located(name)[1]


def located(name: str) -> tuple[Source, tuple[Row, ...]]:
    """The source that holds what `name` names, and those of its rows; raises as `named` does.

    Only files that contain the name are read.
    """
    if name in _files():
        return source(name), source(name).rows
    for file in _files_with(name):
        holder = source(file)
        for table in holder.tables:
            if table.id == name:
                return holder, table.rows
        for candidate in holder.rows:
            if candidate.id == name:
                return holder, (candidate,)
    groups = [*source_names(), *(t.id for t in tables()), *(r.id for r in rows())]
    raise _unknown(f"reference {name!r}", name, groups)


def for_recipe(recipe: str) -> tuple[Row, ...]:
    """Rows of `recipe` with a measured throughput, in the order of the tables."""
    candidates = [row for name in _files_with(recipe) for row in source(name).rows]
    return tuple(r for r in candidates if r.recipe == recipe and r.step_time_s is not None)


@cache
def _files() -> dict[str, Path]:
    folder = resources.files("paceline.files") / "references"
    paths = [Path(str(entry)) for entry in folder.iterdir()]
    return {path.stem: path for path in paths if path.suffix == ".yaml"}


def _files_with(name: str) -> Iterator[str]:
    """Files in whose text `name` stands as a whole, so that no other needs to be parsed."""
    whole = re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")
    for file in source_names():
        if whole.search(_files()[file].read_text(encoding="utf-8")):
            yield file


def _unknown(where: str, word: str, choices: list[str]) -> UserError:
    allowed = ", ".join(source_names())
    hint = did_you_mean(word, choices) or None
    return UserError(
        where, "is unknown", allowed=f"{allowed}, or their tables and rows", remedy=hint
    )


def _with_filled_rows(table: dict[str, Any], common: dict[str, Any]) -> dict[str, Any]:
    filled = dict(table)
    shared = _merged(_merged(common, {"table": table.get("id")}), _taken_common(filled))
    compact, listed = filled.pop("rows_csv", None), filled.get("rows") or []
    if compact is not None and isinstance(listed, list):
        filled["rows"] = [*listed, *_expanded(str(compact), str(table.get("id")))]
    return _each(filled, "rows", lambda row: _merged(shared, row))


def _taken_common(document: dict[str, Any]) -> dict[str, Any]:
    """Takes out what is stated once for all; raises ValueError if that is no mapping."""
    common = document.pop("common", None) or {}
    if not isinstance(common, dict):
        raise ValueError(f"common must be a mapping, not {common!r}")
    return cast(dict[str, Any], common)


def _each(
    document: dict[str, Any], name: str, fill: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """The document with its list of mappings filled; anything else is left for the validation."""
    entries = document.get(name)
    if isinstance(entries, list):
        document[name] = [
            fill(cast(dict[str, Any], entry)) if isinstance(entry, dict) else entry
            for entry in cast(list[Any], entries)
        ]
    return document


def _expanded(text: str, table: str) -> Iterator[dict[str, Any]]:
    """Rows of CSV with dotted column names; raises ValueError for a line of another length."""
    lines = csv.reader(text.splitlines())
    names = next(lines, [])
    for number, cells in enumerate(lines, start=2):
        if len(cells) != len(names):
            raise ValueError(
                f"rows_csv of {table}, line {number}: {counted(len(cells), 'cell')}, "
                f"{counted(len(names), 'column')}"
            )
        row: dict[str, Any] = {}
        for name, cell in zip(names, cells, strict=True):
            if cell:
                _put(row, name, cell)
        yield row


def _put(row: dict[str, Any], name: str, cell: str) -> None:
    """Sets `a.b` to the cell: text under `printed`, else a number or truth value if it is one."""
    *above, last = name.split(".")
    for part in above:
        row = row.setdefault(part, {})
        if not isinstance(row, dict):
            raise ValueError(f"rows_csv: {part} is a column of its own, so {name} cannot be one")
    row[last] = cell if above[:1] == ["printed"] else _scalar(cell)


def _scalar(cell: str) -> bool | int | float | str:
    if cell in ("true", "false"):
        return cell == "true"
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            continue
    return cell


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`: mappings merge, anything else is replaced."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            result[key] = _merged(cast(dict[str, Any], below), cast(dict[str, Any], value))
        else:
            result[key] = value
    return result
