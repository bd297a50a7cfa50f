"""Tables of sub-clusters that were measured elsewhere."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import UserError, did_you_mean
from paceline.core.hosts import expand
from paceline.core.node_groups import GroupThroughput, Purpose, ScalingKind
from paceline.core.units import pluralize
from paceline.files.csv_table import csv_lines

LINE = "line"
"""Column that every row has: its line number in the file."""
COLUMNS: dict[str, tuple[str, ...]] = {
    "hosts": ("hosts", "hostnames", "host_names", "host", "hostname", "nodelist", "node_list"),
    "first_host": ("first_host", "first"),
    "last_host": ("last_host", "last"),
    "nodes": ("nodes", "num_nodes", "n_nodes", "subcluster_nodes", "n_hosts", "size"),
    "samples_per_s": (
        "samples_per_s",
        "samples/s",
        "samples/sec",
        "samples_per_sec",
        "samples_per_second",
        "throughput",
        "throughput_(samples/sec)",
        "throughput_(samples/s)",
    ),
    "status": ("status",),
    "series": ("hostfile", "hostfile_group", "campaign", "series"),
    "scaling": ("scaling",),
    "purpose": ("purpose",),
}
"""Accepted names of each column, in lower case and with _ for a space."""
ONE_VALUE = (
    "benchmark",
    "model",
    "recipe",
    "workload",
    "variant",
    "scaling",
    "dtype",
    "gpus_per_node",
)
"""Columns that must have a single value over all rows of an analysis."""
FAILED_STATUSES = {"oom", "timeout", "nan", "failed", "incomplete", "cancelled", "error"}
"""Statuses of a failed group. `Fail` is not one: next to a throughput it means "below a
threshold"."""
PURPOSES: Mapping[str, Purpose] = {"second pass": "second pass", "bisection": "bisection"}
"""Purposes in a scaling test's own table; every other group is planned."""
SCALING_KINDS: Mapping[str, ScalingKind | None] = {"": None, "weak": "weak", "strong": "strong"}
FAILED = -1
MIN_SAMPLES_PER_S = 1e-9
MAX_SAMPLES_PER_S = 1e15
MAX_SHOWN_VALUES = 6
Row = Mapping[str, str]


@dataclass(frozen=True)
class MeasuredTable:
    """Measured groups, and the properties that their table gives for all of them."""

    measured: tuple[GroupThroughput, ...]
    resolution: float
    """Rounding step of the printed samples/s."""
    scaling: ScalingKind | None


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file by column name, with their line number.

    Raises UserError with the place of a fault.
    """
    lines = list(csv_lines(path))
    if not lines:
        raise UserError(str(path), "is empty", allowed="a header line and rows")
    (number, names), *rows = lines
    if len(names) == 1 and re.search("[;\t|]", names[0]):
        raise UserError(
            f"{path}:{number}",
            "has a single column",
            remedy="separate the cells by commas, and write decimals with a point",
        )
    names = [re.sub(r"\s+", "_", name.lower()) for name in names]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{path}:{number}", f"two columns are called {twice!r}")
    for line, cells in rows:
        if len(cells) != len(names):
            raise UserError(
                f"{path}:{line}", f"has {pluralize(len(cells), 'cell')}, the header {len(names)}"
            )
    if not rows:
        raise UserError(str(path), "has a header and no rows")
    return [{LINE: str(line), **dict(zip(names, cells, strict=True))} for line, cells in rows]


def measured_table(rows: Sequence[Row], where: str) -> MeasuredTable:
    """Return the groups in `rows` of the file `where`.

    Hosts come from a list column or from first_host and last_host. Raises UserError for a missing
    column, an invalid cell, and rows of several benchmarks or kinds of scaling.
    """
    if not rows:
        raise UserError(where, "no row is selected", remedy="widen --where")
    columns = _find_columns(rows[0], where)
    _refuse_mixtures(rows, where)
    measured = tuple(_measured(row, columns, f"{where}:{row[LINE]}") for row in rows)
    texts = [row[columns["samples_per_s"]] for row in rows]
    plain = [text for text in texts if "e" not in text.lower()]
    decimals = max((len(text.partition(".")[2]) for text in plain), default=0)
    return MeasuredTable(measured, 10.0**-decimals if plain else 0.0, _scaling(rows[0], where))


def node_history(rows: Sequence[Row], where: str) -> dict[str, list[float]]:
    """Return each host's single-node values in the rows of an earlier table, in samples/s."""
    values: dict[str, list[float]] = {}
    for group in measured_table(rows, where).measured:
        if group.nodes == 1 and group.samples_per_s is not None:
            values.setdefault(group.hosts[0], []).append(group.samples_per_s)
    return values


def _find_columns(row: Row, where: str) -> dict[str, str]:
    """Return the table's column for each kind of content."""
    columns = {
        what: column
        for what, names in COLUMNS.items()
        if (column := next((name for name in names if name in row), None))
    }
    if "samples_per_s" not in columns:
        _refuse_column(row, where, "samples_per_s", "no column of samples/s")
    if "hosts" not in columns and not {"first_host", "last_host"} <= set(columns):
        _refuse_column(
            row, where, "hosts", "no column of host names", ", or first_host and last_host"
        )
    return columns


def _refuse_column(row: Row, where: str, what: str, fault: str, more: str = "") -> None:
    has = [name for name in row if name != LINE]
    near = next((hint for name in has if (hint := did_you_mean(name, COLUMNS[what]))), None)
    raise UserError(
        where,
        f"has {fault}, but {', '.join(has)}",
        remedy=near,
        allowed=", ".join(COLUMNS[what]) + more,
    )


def _refuse_mixtures(rows: Sequence[Row], where: str) -> None:
    for column in ONE_VALUE:
        values = list(dict.fromkeys(row[column] for row in rows if column in row))
        if len(values) > 1:
            examples = ", ".join(values[:MAX_SHOWN_VALUES])
            raise UserError(
                where,
                f"column {column} has {len(values)} values: {examples}",
                remedy=f"choose one: --where {column}={values[0]}",
            )


def _measured(row: Row, columns: Mapping[str, str], where: str) -> GroupThroughput:
    hosts = _hosts(row, columns, where)
    if len(set(hosts)) != len(hosts):
        twice = next(host for host in hosts if hosts.count(host) > 1)
        raise UserError(where, f"{twice} is listed twice")
    nodes = row.get(columns.get("nodes", ""), "")
    if nodes and nodes != str(len(hosts)):
        raise UserError(
            where,
            f"{columns['nodes']} is {nodes}, but {pluralize(len(hosts), 'host', 'are')} listed",
        )
    series = row.get(columns.get("series", ""), "")
    purpose = PURPOSES.get(row.get("purpose", "").lower(), "plan")
    return GroupThroughput(tuple(hosts), _samples_per_s(row, columns, where), series, purpose)


def _hosts(row: Row, columns: Mapping[str, str], where: str) -> list[str]:
    if "hosts" in columns and row[columns["hosts"]]:
        # Names are separated by commas, semicolons or spaces; a comma may also be inside a range.
        return expand(re.sub(r"[;\s]+", ",", row[columns["hosts"]]), where)
    ends = [row.get(columns.get(end, ""), "") for end in ("first_host", "last_host")]
    if not all(ends):
        raise UserError(where, "lists no hosts")
    (head, low), (other, high) = (_TAIL.fullmatch(end).groups() for end in ends)  # type: ignore[union-attr]
    if ends[0] == ends[1]:
        return expand(ends[0], where)
    if head != other or not low or not high or int(high) < int(low):
        raise UserError(
            where,
            f"{ends[0]} to {ends[1]} is not a range of hosts",
            allowed="names that end in an increasing number",
        )
    return expand(f"{head}[{low}-{high}]", where)


_THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+(\.\d*)?")
"""Numbers such as 1,234.5; any other comma may be a decimal one."""
_TAIL = re.compile(r"(.*?)(\d*)", re.DOTALL)


def _samples_per_s(row: Row, columns: Mapping[str, str], where: str) -> float | None:
    """Return the value, or None for a failed group: an empty cell, -1, or a status of failure."""
    text = row[columns["samples_per_s"]]
    status = row.get(columns.get("status", ""), "").lower()
    if text in ("", "-") or status in FAILED_STATUSES:
        return None
    try:
        value = float(text.replace(",", "") if _THOUSANDS.fullmatch(text) else text)
    except ValueError:
        value = math.nan
    if value == FAILED:
        return None
    if not MIN_SAMPLES_PER_S < value < MAX_SAMPLES_PER_S:
        raise UserError(
            where,
            f"{columns['samples_per_s']}: {text!r} is not a positive number",
            allowed=f"digits, or {FAILED} for a group that failed",
        )
    return value


def _scaling(row: Row, where: str) -> ScalingKind | None:
    word = row.get("scaling", "").lower()
    if word not in SCALING_KINDS:
        allowed = ", ".join(filter(None, SCALING_KINDS))
        raise UserError(where, f"scaling {word!r} is unknown", allowed=allowed)
    return SCALING_KINDS[word]
