"""Published figures: tables of printed cells with the configuration of each measurement.

A reference is not an expectation of Paceline. Cells keep the source's characters, even if they
contradict their row; `paceline table audit` reports contradictions with their cause.
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
from paceline.core.errors import UserError, did_you_mean, few_names
from paceline.core.flops import CONVENTIONS, without_recompute
from paceline.core.hardware import Dtype
from paceline.core.layout import Layout
from paceline.core.printed import read_printed
from paceline.core.shape import DecoderShape
from paceline.core.units import GIB, TERA, pluralize
from paceline.core.value import PositiveInt, Value
from paceline.files.yaml_file import read_model, read_shipped

UNIT_SIZES: dict[str, float] = {"%": 0.01, "TFLOP/s": TERA, "GiB": GIB}
"""Size of a printed unit in base units; every other unit is its own base unit."""


class Row(Value):
    """One published measurement and its configuration; None if the source does not state a
    value."""

    id: str
    table: str
    source: str
    where: str
    window: str
    """Steps that the figures are from, for example `last step`; `as printed` if not stated."""
    statement: str | None = None
    """Paraphrase of a claim in the source's text."""
    recipe: str | None = None
    model: str | None = None
    """Model name in the source, for rows without a recipe."""
    shape: DecoderShape | None = None
    """Model shape, for rows without a recipe."""
    experts_per_token: PositiveInt | None = None
    """Active experts per token; `shape.ffn_size` is then the size of one expert."""
    device: str | None = None
    """Name in the device catalog."""
    devices_per_node: PositiveInt | None = None
    num_devices: PositiveInt | None = None
    hosts: str | None = None
    layout: Layout = Layout()
    """Parallel layout; only the fields that are set are stated by the source."""
    dtype: Dtype | None = None
    seq_len: PositiveInt | None = None
    global_batch: PositiveInt | None = None
    convention: str | None = None
    """FLOPs convention of the source; None if it states none or an unknown one."""
    nominal_parameters: PositiveFloat | None = None
    peak_flops_per_s: PositiveFloat | None = None
    """Peak that the source uses for its MFU."""
    flops_per_sample: PositiveFloat | None = None
    """Rounded FLOPs per sample that the source computes with."""
    total_tokens: PositiveFloat | None = None
    base_num_devices: PositiveInt | None = None
    """Devices of the baseline row for speed-ups in the same table."""
    repeats: str | None = None
    """Id of another row of the source with the same configuration."""
    status: Literal["ok", "oom"] = "ok"
    printed: dict[str, str]
    """Cells by metric, as printed in the source."""
    units: dict[str, str]
    resolution: dict[str, PositiveFloat] = {}
    """Step size of a cell by metric, if it is coarser than its last digit."""
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
        """Return the first number of a printed cell in base units (`12.50%` is 0.125), else
        None."""
        number = read_printed(self.printed.get(metric, ""))
        return number and number.value * UNIT_SIZES.get(self.units[metric], 1.0)

    @property
    def step_time_s(self) -> float | None:
        """Seconds per step, printed or derived from samples/s or tokens/s; None without any of
        them."""
        samples_per_s = self.figure("samples_per_s") or self._samples_per_s_of_tokens()
        if samples_per_s and self.global_batch:
            return rates.step_time_s(self.global_batch, samples_per_s)
        return self.figure("step_time_s")

    @property
    def samples_per_s(self) -> float | None:
        """Sequences per second over all devices, from the step time."""
        step_time_s = self.step_time_s
        if not (step_time_s and self.global_batch):
            return None
        return rates.samples_per_s(self.global_batch, step_time_s)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second over all devices, from the step time."""
        step_time_s = self.step_time_s
        if not (step_time_s and self.global_batch and self.seq_len):
            return None
        return rates.tokens_per_s(self.seq_len, self.global_batch, step_time_s)

    def _samples_per_s_of_tokens(self) -> float | None:
        """Return samples/s from printed tokens/s, for rows without a step time."""
        if "step_time_s" in self.printed or not self.seq_len:
            return None
        total = self.figure("tokens_per_s")
        per_device = self.figure("tokens_per_s_per_device")
        tokens_per_s = total or (per_device and self.num_devices and per_device * self.num_devices)
        return tokens_per_s / self.seq_len if tokens_per_s else None


class ReferenceTable(Value):
    """One table of a source; the file's `common` section is copied into each row.

    Rows may be written as `rows_csv`: one line per row, dotted column names (`layout.tp`,
    `printed.step_time_s`), and an empty cell for a value that is not stated.
    """

    id: str
    title: str
    rows: tuple[Row, ...]


class ConvergencePoint(Value):
    """Samples that a benchmark's reference code needed to reach the target, at one batch size."""

    id: str
    benchmark: str
    rulesets: tuple[str, ...]
    """MLPerf Training rounds in which the point is valid."""
    global_batch: PositiveInt
    samples_to_target: tuple[PositiveInt, ...]
    """Samples to the target, one figure per run."""
    hyperparameters: dict[str, float] = {}
    platform: str | None = None


class Source(Value):
    """One file with the tables of one publication."""

    source: str
    where: str
    window: str
    tables: tuple[ReferenceTable, ...] = ()
    convergence: tuple[ConvergencePoint, ...] = ()
    scores_csv: str | None = None
    """Published MLPerf Training results, one per line."""

    @model_validator(mode="before")
    @classmethod
    def _fill_rows(cls, document: dict[str, Any]) -> dict[str, Any]:
        content = dict(document)
        common = _merged(
            {key: document.get(key) for key in ("source", "where", "window")},
            _pop_common(content),
        )
        return _each(content, "tables", lambda table: _with_filled_rows(table, common))

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        duplicates = [name for name, n in Counter(row.id for row in self.rows).items() if n > 1]
        if duplicates:
            raise ValueError(f"two rows are called {duplicates[0]!r}")
        return self

    @property
    def rows(self) -> tuple[Row, ...]:
        """Rows of all tables."""
        return tuple(row for table in self.tables for row in table.rows)


def source_names() -> list[str]:
    """Return the names of the shipped files, without `.yaml`."""
    return sorted(_files())


@cache
def source(name: str) -> Source:
    """Return the shipped source `name`; raise KeyError for an unknown one."""
    return Source.model_validate(read_shipped(_files()[name]))


def read_source(path: Path) -> Source:
    """Return a user's file of references; raise UserError with the line of an error."""
    return read_model(Source, path)[0]


def sources() -> dict[str, Source]:
    """Return all shipped sources by name."""
    return {name: source(name) for name in source_names()}


def tables() -> tuple[ReferenceTable, ...]:
    """Return every table of every source."""
    return tuple(table for source in sources().values() for table in source.tables)


def rows() -> tuple[Row, ...]:
    """Return every row of every table."""
    return tuple(row for table in tables() for row in table.rows)


def row(row_id: str) -> Row:
    """Return the row with this id; raise UserError that suggests the nearest id."""
    for name in _files_with(row_id):
        for candidate in source(name).rows:
            if candidate.id == row_id:
                return candidate
    raise _unknown(f"reference row {row_id!r}", row_id, [row.id for row in rows()])


def find_rows(name: str) -> tuple[Row, ...]:
    """Return the rows of a source, table or row by name; raise UserError that suggests a name.

    Rows may lack a throughput (out of memory, node schedules) and belong to several recipes.
    """
    return find_source_and_rows(name)[1]


def find_source_and_rows(name: str) -> tuple[Source, tuple[Row, ...]]:
    """Return the source that contains `name` and the matching rows; raise the errors of
    `find_rows`.

    Only files that contain the name are parsed.
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


def rows_of_recipe(recipe: str) -> tuple[Row, ...]:
    """Return the rows of a recipe with a measured throughput, in the order of the tables."""
    candidates = [row for name in _files_with(recipe) for row in source(name).rows]
    return tuple(r for r in candidates if r.recipe == recipe and r.step_time_s is not None)


@cache
def _files() -> dict[str, Path]:
    folder = resources.files("paceline.files") / "references"
    paths = [Path(str(entry)) for entry in folder.iterdir()]
    return {path.stem: path for path in paths if path.suffix == ".yaml"}


def _files_with(name: str) -> Iterator[str]:
    """Yield the files whose text contains the whole word `name`, so that no other is parsed."""
    whole = re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")
    for file in source_names():
        if whole.search(_files()[file].read_text(encoding="utf-8")):
            yield file


def _unknown(where: str, word: str, choices: list[str]) -> UserError:
    allowed = few_names(source_names(), word)
    same_start = [name for name in source_names() if name.startswith(word)]
    hint = f"did you mean {' or '.join(same_start)}?" if len(same_start) > 1 else None
    hint = hint or did_you_mean(word, choices) or None
    return UserError(
        where, "is unknown", allowed=f"{allowed}, or one of their tables or rows", remedy=hint
    )


def _with_filled_rows(table: dict[str, Any], common: dict[str, Any]) -> dict[str, Any]:
    document = dict(table)
    shared = _merged(_merged(common, {"table": table.get("id")}), _pop_common(document))
    compact, rows = document.pop("rows_csv", None), document.get("rows") or []
    if compact is not None and isinstance(rows, list):
        document["rows"] = [*rows, *_rows_from_csv(str(compact), str(table.get("id")))]
    return _each(document, "rows", lambda row: _merged(shared, row))


def _pop_common(document: dict[str, Any]) -> dict[str, Any]:
    """Remove and return the `common` section; raise ValueError if it is not a mapping."""
    common = document.pop("common", None) or {}
    if not isinstance(common, dict):
        raise ValueError(f"common must be a mapping, not {common!r}")
    return cast(dict[str, Any], common)


def _each(
    document: dict[str, Any], name: str, fill: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """Apply `fill` to each mapping of a list; anything else is left for the validation."""
    entries = document.get(name)
    if isinstance(entries, list):
        document[name] = [
            fill(cast(dict[str, Any], entry)) if isinstance(entry, dict) else entry
            for entry in cast(list[Any], entries)
        ]
    return document


def _rows_from_csv(text: str, table: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of CSV with dotted column names; raise ValueError for a line of another
    length."""
    lines = csv.reader(text.splitlines())
    names = next(lines, [])
    for number, cells in enumerate(lines, start=2):
        if len(cells) != len(names):
            raise ValueError(
                f"rows_csv of {table}, line {number}: {pluralize(len(cells), 'cell')}, "
                f"{pluralize(len(names), 'column')}"
            )
        row: dict[str, Any] = {}
        for name, cell in zip(names, cells, strict=True):
            if cell:
                _set_dotted(row, name, cell)
        yield row


def _set_dotted(row: dict[str, Any], name: str, cell: str) -> None:
    """Set `a.b` to the cell, as text under `printed`, else as a number or a Boolean if possible."""
    *above, last = name.split(".")
    for part in above:
        row = row.setdefault(part, {})
        if not isinstance(row, dict):
            raise ValueError(f"rows_csv: the columns {part} and {name} exclude each other")
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
    """Return `base` updated by `over`; mappings are merged recursively."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            result[key] = _merged(cast(dict[str, Any], below), cast(dict[str, Any], value))
        else:
            result[key] = value
    return result
