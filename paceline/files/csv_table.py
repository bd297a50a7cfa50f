"""Read a CSV table as published rows, with the line of every error."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from paceline.core.errors import UserError, did_you_mean, few_names
from paceline.core.flops import CONVENTIONS, RECOMPUTE_SUFFIX, without_recompute
from paceline.core.layout import AXIS_FIELDS, Layout
from paceline.core.printed import read_printed
from paceline.core.problem import invalid_input
from paceline.core.shape import DecoderShape
from paceline.core.units import LARGEST_INT, pluralize
from paceline.files import catalog
from paceline.files.documents import read_text
from paceline.files.recipe import recipe_names
from paceline.files.references import Row

PRINTED: dict[str, tuple[str, str]] = {
    "step_time_s": ("step_time_s", "s"),
    "samples_per_s": ("samples_per_s", "samples/s"),
    "tokens_per_s": ("tokens_per_s", "tokens/s"),
    "tokens_per_s_per_gpu": ("tokens_per_s_per_device", "tokens/s/device"),
    "tflops_per_gpu": ("flops_per_s_per_device", "TFLOP/s"),
    "mfu_pct": ("mfu", "%"),
    "mfu": ("mfu", "%"),
    "days": ("days", "days"),
    "mem_gb": ("memory_bytes", "GiB"),
}
"""Columns of printed figures, with their metric and unit."""
COUNTS = {
    "layers": "num_layers",
    "hidden": "hidden_size",
    "ffn": "ffn_size",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "head_size": "head_size",
    "vocab": "vocab_size",
    "seq_len": "seq_len",
    "gpus_per_node": "devices_per_node",
    "num_gpus": "num_devices",
    "gbs": "global_batch",
    "experts_per_token": "experts_per_token",
    **{axis: axis for axis in AXIS_FIELDS},
    "mbs": "micro_batch",
}
"""Columns of whole numbers, with the field that each one sets."""
AMOUNTS = ("peak_tflops", "total_tokens", "nominal_parameters", "flops_per_sample")
WORDS = ("id", "source", "table", "model", "gpu", "dtype", "convention", "recompute", "gated_ffn")
OTHER_NAMES = {
    "table_or_path": "table",
    "device": "gpu",
    "num_devices": "num_gpus",
    "devices_per_node": "gpus_per_node",
    "global_batch": "gbs",
    "micro_batch": "mbs",
    "tokens_per_s_per_device": "tokens_per_s_per_gpu",
    "recipe": "model",
}
UNUSED = {
    "dp",
    "zero",
    "seq_parallel",
    "attention_impl",
    "intra_node_net",
    "inter_node_net",
    "notes",
}
"""Known columns that affect no figure."""
NO_FIGURE = {"", "-", "x", "oom", "n/a"}
NUMBER = re.compile(r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?(?:e[+-]?\d+)?\s*%?", re.IGNORECASE)
MOSTLY_WHOLE = 2 / 3
MAX_CSV_BYTES = 1 << 24
SMALLEST, LARGEST = 1e-9, 1e30
"""Bounds of a plausible training figure."""
SHAPE = ("num_layers", "hidden_size", "ffn_size", "num_heads", "vocab_size")
AXES = (*AXIS_FIELDS, "micro_batch")


@dataclass(frozen=True)
class TableDefaults:
    """Defaults for the whole table from the command line; columns of the table take precedence."""

    model: str | None = None
    device: str | None = None
    dtype: str | None = None
    convention: str | None = None
    peak_flops_per_s: float | None = None
    total_tokens: float | None = None


@dataclass(frozen=True)
class CsvTable:
    """The rows of a file, and notes about its columns."""

    rows: tuple[Row, ...]
    ignored_columns: tuple[str, ...]
    """Unknown columns."""
    gated_is_open: bool
    """True if no column states whether the feed-forward layers are gated."""


def read_csv(path: Path, defaults: TableDefaults) -> CsvTable:
    """Return the rows of a CSV file; raise UserError with the line of the first error."""
    lines = list(csv_lines(path))
    header = _header(path, lines)
    cells = [(line, dict(zip(header, values, strict=True))) for line, values in lines[1:]]
    for line, row in cells:
        for column, text in row.items():
            _check(f"{path}:{line}", column, text)
    whole = _whole_columns([row for _, row in cells])
    rows = tuple(_row(f"{path}:{line}", line, row, defaults, whole) for line, row in cells)
    columns = {*PRINTED, *COUNTS, *AMOUNTS, *WORDS, *UNUSED}
    ids: set[str] = set()
    for row in rows:
        if row.id in ids:
            raise UserError(row.where, f"duplicates the row id {row.id!r}")
        ids.add(row.id)
    return CsvTable(
        rows, tuple(name for name in header if name not in columns), "gated_ffn" not in header
    )


def csv_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and stripped cells of every non-empty line; raise UserError if it is
    not CSV."""
    try:
        text = read_text(path, MAX_CSV_BYTES)
    except OSError as error:
        raise UserError(str(path), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError(f"{path}:{line}", "is not UTF-8 text", remedy="save it as UTF-8") from error
    reader = csv.reader(text.splitlines(keepends=True), strict=True)
    try:
        for values in reader:
            if any(value.strip() for value in values):
                yield reader.line_num, [value.strip() for value in values]
    except csv.Error as error:
        raise UserError(f"{path}:{reader.line_num}", f"is not CSV: {error}") from error


def _header(path: Path, lines: Sequence[tuple[int, list[str]]]) -> list[str]:
    if not lines:
        raise UserError(str(path), "is empty", allowed="a header line and rows")
    line, column_names = lines[0]
    names = [OTHER_NAMES.get(name.lower(), name.lower()) for name in column_names]
    duplicates = [name for name, n in Counter(names).items() if n > 1]
    if duplicates:
        raise UserError(f"{path}:{line}", f"two columns are called {duplicates[0]!r}")
    if not set(names) & set(PRINTED):
        near = did_you_mean(names[0], PRINTED) or None
        if len(names) == 1 and re.search("[;\t|]", names[0]):
            near = "separate the cells by commas, and write decimals with a point"
        raise UserError(
            f"{path}:{line}",
            "has no column of figures",
            allowed=few_names(PRINTED, names[0]),
            remedy=near,
        )
    for number, values in lines[1:]:
        if len(values) != len(names):
            raise UserError(
                f"{path}:{number}", f"has {pluralize(len(values), 'cell')}, the header {len(names)}"
            )
    if len(lines) == 1:
        raise UserError(str(path), "has a header and no rows")
    return names


def _check(where: str, column: str, text: str) -> None:
    """Raise UserError for a cell with an invalid value for its column."""
    number = column in PRINTED or column in COUNTS or column in AMOUNTS
    if not number or (text.lower() in NO_FIGURE):
        return
    value = read_printed(text) if NUMBER.fullmatch(text) else None
    if value is None or not SMALLEST <= value.value <= LARGEST:
        raise UserError(
            where,
            f"{column}: {text!r} is not a positive number",
            allowed="digits, or an empty cell",
        )
    if column in COUNTS and value.value > LARGEST_INT:
        raise UserError(where, f"{column}: {text!r} is too large")
    if column in COUNTS and not value.value.is_integer():
        raise UserError(where, f"{column}: {text!r} is not a whole number")
    if text.endswith("%") and column not in ("mfu", "mfu_pct"):
        raise UserError(where, f"{column}: {text!r} must not be a percentage")
    if column == "mfu" and not text.endswith("%") and value.value > 1:
        raise UserError(where, f"mfu: {text!r} must be a fraction from 0 to 1 or end with %")


def _whole_columns(rows: Iterable[Mapping[str, str]]) -> set[tuple[str, str, str]]:
    """Return the columns in which most figures end with `.0`, an artifact of the writing
    program."""
    ends: dict[tuple[str, str, str], list[bool]] = {}
    for row in rows:
        for column in PRINTED:
            text = row.get(column, "")
            if text.lower() not in NO_FIGURE:
                key = (row.get("source", ""), row.get("table", ""), column)
                ends.setdefault(key, []).append(text.endswith(".0"))
    return {key for key, whole in ends.items() if sum(whole) >= max(2, MOSTLY_WHOLE * len(whole))}


def _row(
    where: str,
    line: int,
    cells: Mapping[str, str],
    defaults: TableDefaults,
    whole: set[tuple[str, str, str]],
) -> Row:
    source, table = cells.get("source", ""), cells.get("table", "")
    counts = {
        field: int(float(cells[column].replace(",", "")))
        for column, field in COUNTS.items()
        if cells.get(column, "").lower() not in NO_FIGURE
    }
    amounts = {
        name: float(cells[name].replace(",", ""))
        for name in AMOUNTS
        if cells.get(name, "").lower() not in NO_FIGURE
    }
    cells_by_metric: dict[str, str] = {}
    units: dict[str, str] = {}
    for column, (metric, unit) in PRINTED.items():
        text = cells.get(column, "")
        if text.lower() not in NO_FIGURE:
            is_whole = (source, table, column) in whole
            cells_by_metric[metric] = text.removesuffix(".0") if is_whole else text
            units[metric] = "1" if column == "mfu" and not text.endswith("%") else unit
    recipe, model = _model(cells.get("model") or defaults.model)
    peak = amounts["peak_tflops"] * 1e12 if "peak_tflops" in amounts else defaults.peak_flops_per_s
    return Row(
        id=cells.get("id") or f"line {line}",
        table=table or source or "table",
        source=source or "the file",
        where=where,
        window="as printed",
        recipe=recipe,
        model=model,
        shape=None if recipe else _shape(where, counts, cells.get("gated_ffn", "")),
        experts_per_token=counts.get("experts_per_token"),
        device=_catalog_name(where, "gpu", cells.get("gpu") or defaults.device),
        devices_per_node=counts.get("devices_per_node"),
        num_devices=counts.get("num_devices"),
        layout=_layout(counts, cells.get("recompute", "")),
        dtype=_catalog_name(where, "dtype", cells.get("dtype") or defaults.dtype),
        seq_len=counts.get("seq_len"),
        global_batch=counts.get("global_batch"),
        convention=_convention(where, cells.get("convention") or defaults.convention),
        nominal_parameters=amounts.get("nominal_parameters"),
        flops_per_sample=amounts.get("flops_per_sample"),
        total_tokens=amounts.get("total_tokens") or defaults.total_tokens,
        peak_flops_per_s=peak,
        printed=cells_by_metric,
        units=units,
    )


def _model(name: str | None) -> tuple[str | None, str | None]:
    """Return (recipe, None) for the name of a recipe, else (None, name)."""
    if name and name.lower() in recipe_names():
        return name.lower(), None
    return None, name or None


def _shape(where: str, counts: Mapping[str, int], gated_ffn: str) -> DecoderShape | None:
    """Return the model's shape if it determines the FLOPs; a missing gate is resolved later."""
    if any(name not in counts for name in SHAPE):
        return None
    fields: dict[str, Any] = {
        name: counts[name] for name in (*SHAPE, "num_kv_heads", "head_size") if name in counts
    }
    flag = gated_ffn.lower() in ("1", "true", "yes")
    try:
        return DecoderShape(**fields, gated_ffn=flag)
    except ValidationError as error:
        raise invalid_input(where, error) from error


def _layout(counts: Mapping[str, int], recompute: str) -> Layout:
    fields: dict[str, Any] = {name: counts[name] for name in AXES if name in counts}
    word = re.match(r"none|selective|full", recompute.lower())
    if word:
        fields["recompute"] = word[0]
    return Layout(**fields)


def _catalog_name(where: str, column: str, name: str | None) -> Any:
    """Return the catalog's name of a device or dtype; raise UserError with the line."""
    if not name:
        return None
    try:
        return catalog.device(name).name if column == "gpu" else catalog.dtype(name)
    except UserError as error:
        what = f"{error.where} {error.what}"
        raise UserError(where, what, allowed=error.allowed, remedy=error.remedy) from error


def _convention(where: str, name: str | None) -> str | None:
    if name and without_recompute(name) not in CONVENTIONS:
        near = did_you_mean(name, CONVENTIONS) or None
        allowed = f"{', '.join(CONVENTIONS)}, each with {RECOMPUTE_SUFFIX} for hardware FLOPs"
        raise UserError(where, f"convention {name!r} is unknown", allowed=allowed, remedy=near)
    return name or None
