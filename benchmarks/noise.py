"""Measured reliability of the verdicts under independent noise, promise by promise.

    python benchmarks/noise.py [--quick] [--jobs 2] [--only pairs]
                                               (ten minutes of one core; quick: 30 s)

The noise comes from generators of their own (_noise_steps.py, _noise_runs.py, _noise_clusters.py),
goes through the public functions behind `parse`, `compare`, `scale` and `history`, and is counted
for each kind. Stores all cells and writes the table into docs/dev/evidence/statistics.md. A promise
that is missed in a cell is an error unless LIMITS lists it with the message to the user. `--only`
measures some parts and keeps the other cells; the result notes the commit of each part.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from _noise_measures import MEASURES, QUICK, SEED, WHOLE, Cell, Size
from _noise_promises import LIMITS, PROMISES, Promise
from _result import FOLDER, Surroundings, keep

from paceline.files.documents import write_text

DOCS = Path(__file__).parents[1] / "docs" / "dev" / "evidence" / "statistics.md"
MARKS = ("<!-- from benchmarks/noise.py -->\n", "<!-- end -->")
TOGETHER = "all settings together"
STANDARD_ERRORS = 3.0
QUICK_ERRORS = 4.0
"""Slack for the luck of the simulation: of a thousand cells one is beyond three by chance, and more
where a cell has few trials."""


@dataclass(frozen=True)
class PromiseCells:
    """Promise with the cells that it was checked with."""

    promise: Promise
    cells: tuple[Cell, ...]

    @property
    def n(self) -> int:
        """Trials of all cells."""
        return sum(cell.n for cell in self.cells)

    @property
    def rate(self) -> float:
        """Share of all trials."""
        return sum(cell.hits for cell in self.cells) / self.n

    @property
    def worst(self) -> Cell:
        """The cell that is furthest on the wrong side."""
        return max(self.cells, key=self.promise.distance)

    @property
    def worst_kind(self) -> Cell:
        """The kind of noise that is furthest on the wrong side, with all its settings together."""
        return max(self.kinds or self.cells, key=self.promise.distance)

    def missed(self, errors: float) -> list[Cell]:
        """Cells, and kinds of noise with all their cells together, that are on the wrong side by
        more than `errors` standard errors of the simulation.
        """
        cells = [*self.cells, *self.kinds]
        return [cell for cell in cells if self.promise.is_missed(cell, errors)]

    @property
    def kinds(self) -> list[Cell]:
        """Every kind of noise that has several cells as one."""
        of_kind = [
            [c for c in self.cells if c.kind == kind]
            for kind in dict.fromkeys(c.kind for c in self.cells)
        ]
        return [
            replace(
                cells[0],
                setting=TOGETHER,
                hits=sum(c.hits for c in cells),
                n=sum(c.n for c in cells),
                num_warned=None,
            )
            for cells in of_kind
            if len(cells) > 1
        ]


def checked_promises(cells: Sequence[Cell]) -> list[PromiseCells]:
    """Every promise that has cells."""
    return [
        PromiseCells(promise, mine)
        for promise in PROMISES
        if (mine := tuple(cell for cell in cells if promise.covers(cell)))
    ]


def limit_message(entry: PromiseCells, cell: Cell) -> str | None:
    """Return the message to the user if the promise cannot be kept, or None."""
    return next((limit.message for limit in LIMITS if limit.covers(entry.promise, cell)), None)


def show(promises: Sequence[PromiseCells], errors: float) -> list[str]:
    """Print a line a promise and one a missed cell; the misses that nothing excuses."""
    faults: list[str] = []
    for entry in promises:
        worst, kind = entry.worst, entry.worst_kind
        print(
            f"{entry.promise.text}: promised {entry.promise.bound}, measured {entry.rate:.1%} "
            f"(n {entry.n:,}), worst kind {kind.rate:.1%} of {kind.n} "
            f"({kind.kind}, noticed from {_noticed_text(entry)}), "
            f"worst cell {worst.rate:.1%} of {worst.n} ({worst.kind}, {worst.setting})"
        )
        for cell in entry.missed(errors):
            message = limit_message(entry, cell)
            warnings = "" if cell.num_warned is None else f", with a warning {cell.num_warned}"
            print(
                f"  {'limit ' if message else 'MISSED'} {cell.kind}, {cell.setting}: "
                f"{cell.rate:.1%} of {cell.n}{warnings}" + (f"; {message}" if message else "")
            )
            if not message:
                faults.append(f"{entry.promise.text}: {cell.kind}, {cell.setting}")
    return faults


def table(promises: Sequence[PromiseCells]) -> str:
    """The promises as docs/dev/evidence/statistics.md has them, with the limits below."""
    rows = [
        "| promise | bound | mean | n | worst kind | noticed from | worst cell |",
        "| --- | --- | ---: | ---: | --- | ---: | --- |",
    ]
    for entry in promises:
        worst, kind = entry.worst, entry.worst_kind
        rows.append(
            f"| {entry.promise.text} | {entry.promise.bound} | {100 * entry.rate:.1f}% | "
            f"{entry.n:,} | {100 * kind.rate:.1f}% of {kind.n}: {kind.kind} | "
            f"{_noticed_text(entry)} | {100 * worst.rate:.0f}% of {worst.n}: "
            f"{worst.kind}, {worst.setting} |"
        )
    limits = [
        f"- {entry.promise.text}, {kind}: {_span(cells)}. {message}"
        for entry in promises
        for (kind, message), cells in _limits(entry).items()
    ]
    text = "\n".join(rows)
    if limits:
        text += "\n\nKnown exceptions:\n" + "\n".join(limits)
    return text + "\n"


def _detectable_rate(entry: PromiseCells) -> float | None:
    return entry.promise.detectable_rate(entry.worst_kind.n, STANDARD_ERRORS)


def _noticed_text(entry: PromiseCells) -> str:
    """Return the rate that the trials of the worst kind notice in 8 of 10 benchmarks; "-" if none.

    A kind with a worse rate is noticed more often.
    """
    rate = _detectable_rate(entry)
    return "-" if rate is None else f"{100 * rate:.1f}%"


def _limits(entry: PromiseCells) -> dict[tuple[str, str], list[Cell]]:
    """Return missed cells by kind and message."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in entry.missed(STANDARD_ERRORS):
        groups.setdefault((cell.kind, limit_message(entry, cell) or "Not kept."), []).append(cell)
    return groups


def _span(cells: Sequence[Cell]) -> str:
    low, high = (100 * side(cell.rate for cell in cells) for side in (min, max))
    return f"{low:.0f}%" if round(low) == round(high) else f"{low:.0f} to {high:.0f}%"


def with_table(text: str, promises: Sequence[PromiseCells]) -> str:
    """The page with today's table between its marks."""
    before, tail = text.split(MARKS[0])
    return before + MARKS[0] + table(promises) + MARKS[1] + tail.partition(MARKS[1])[2]


def store(
    parts: Mapping[str, Sequence[Cell]],
    promises: Sequence[PromiseCells],
    around: Surroundings,
    commits: Mapping[str, str],
) -> None:
    """Keep every cell and what became of the promises, and write the table into the page."""
    summary = [
        {
            "promise": entry.promise.text,
            "promised": entry.promise.bound,
            "measured": entry.rate,
            "n": entry.n,
            "worst_kind": {**asdict(entry.worst_kind), "rate": entry.worst_kind.rate},
            "noticed_from": _detectable_rate(entry),
            "worst": {**asdict(entry.worst), "rate": entry.worst.rate},
            "missed": [
                {**asdict(cell), "rate": cell.rate, "message": limit_message(entry, cell)}
                for cell in entry.missed(STANDARD_ERRORS)
            ],
        }
        for entry in promises
    ]
    rows = [
        {**asdict(cell), "part": part, "rate": cell.rate}
        for part, cells in parts.items()
        for cell in cells
    ]
    keep(
        "noise", "share of trials", around, commits=commits, seed=SEED, promises=summary, cells=rows
    )
    write_text(DOCS, with_table(DOCS.read_text(encoding="utf-8"), promises))


def main() -> int:
    """Measure, print and keep; 1 when a promise is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="Few trials per cell; nothing is stored."
    )
    parser.add_argument("--jobs", type=int, default=1, help="Number of processes.")
    names = [_part(measure) for measure in MEASURES]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART")
    options = parser.parse_args()
    around, begin = Surroundings(), time.perf_counter()
    size = QUICK if options.quick else WHOLE
    # The cells have seeds of their own, so the number of processes changes none of them.
    tasks = {name: partial(_cells_of, names.index(name), size) for name in options.only}
    if options.jobs > 1:
        with ProcessPoolExecutor(options.jobs) as pool:
            futures = {name: pool.submit(task) for name, task in tasks.items()}
            parts = {name: future.result() for name, future in futures.items()}
    else:
        parts = {name: task() for name, task in tasks.items()}
    commits = dict.fromkeys(parts, _commit())
    if len(parts) < len(names) and not options.quick:
        old_parts, old_commits = stored_parts()
        parts, commits = {**old_parts, **parts}, {**old_commits, **commits}
    cells = [cell for part in parts.values() for cell in part]
    promises = checked_promises(cells)
    faults = show(promises, QUICK_ERRORS if options.quick else STANDARD_ERRORS)
    print(f"{len(cells)} cells, {sum(c.n for c in cells):,} trials, {_since(begin)}")
    print("missed: " + "; ".join(faults) if faults else "every promise is kept, or its limit said")
    if not options.quick:
        store(parts, promises, around, commits)
    return int(bool(faults))


def stored_parts() -> tuple[dict[str, list[Cell]], dict[str, str]]:
    """Return the stored cells and the commits with which they were measured, by part."""
    result = json.loads((FOLDER / "noise.json").read_text(encoding="utf-8"))
    parts: dict[str, list[Cell]] = {}
    names = [field.name for field in fields(Cell)]
    for row in result["cells"]:
        parts.setdefault(row["part"], []).append(Cell(**{name: row[name] for name in names}))
    return parts, result["commits"]


def _commit() -> str:
    """Return the commit of the code, with `-dirty` if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=DOCS.parent
    ).stdout.strip()


def _part(measure: Callable[[Size], Iterator[Cell]]) -> str:
    """Return the name of a part: `pairs` for `pairs_cells`."""
    return measure.__name__.removesuffix("_cells")


def _cells_of(number: int, size: Size) -> list[Cell]:
    begin = time.perf_counter()
    cells = list(MEASURES[number](size))
    print(f"{_part(MEASURES[number])}: {len(cells)} cells, {_since(begin)}", flush=True)
    return cells


def _since(begin: float) -> str:
    return f"{time.perf_counter() - begin:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
