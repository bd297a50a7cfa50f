"""The step time of a row: what it prints, and what its other figures agree on against that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.audit.cells.causes import Options, explains, other_inputs
from paceline.audit.cells.derivation import (
    SPEEDS,
    Cell,
    Inputs,
    Relation,
    RowSpeed,
    implied,
    judge,
    relation,
    speed_of,
)
from paceline.core.printed import Interval, exactly, like

Pair = tuple[Cell, Relation]
COUNT_FLOPS = frozenset({"flops_per_s_per_device", "mfu"})
"""Columns that share the FLOPs of a sequence: alone they may speak against those, not the speed."""
SOUND = 0.8
"""Share of a table's rows whose FLOPs follow, from which on their count is beyond doubt."""


@dataclass(frozen=True)
class AuditLine:
    """One published row under audit."""

    name: str
    table: str
    cells: Mapping[str, Cell]
    inputs: Inputs
    options: Options = field(default_factory=Options)
    twin: AuditLine | None = None
    """A row of the same configuration: speeds must agree, a missing one is taken from it."""


@dataclass(frozen=True)
class TimedLine:
    """A line with the step time by which its cells are judged."""

    line: AuditLine
    column: str | None = None
    """The column that gives the speed; None when it is the twin's."""
    speed: RowSpeed | None = None
    meant: Interval | None = None
    """The step times on which the other cells agree, where they contradict the printed speed."""
    agreeing: tuple[str, ...] = ()

    def derived(self) -> Iterator[Pair]:
        """The cells that follow from the step time or the settings, with how."""
        for column, cell in self.line.cells.items():
            how = relation(column, self.line.inputs)
            if how and column != self.column and (how.power == 0 or self.speed):
                yield cell, how

    @property
    def step_time_s(self) -> float | None:
        """As printed; or as the other cells have it, at the printed precision."""
        if self.speed is None or self.meant is None or self.column != "step_time_s":
            return self.meant.middle if self.meant else self.speed and self.speed.step_time_s
        printed = self.line.cells["step_time_s"].printed
        rounded = float(like(self.meant.middle, printed).replace(",", ""))
        return rounded if self.meant.meets(exactly(rounded)) else self.meant.middle


def timed(lines: Iterable[AuditLine]) -> list[TimedLine]:
    """Every line with its step time; where the other cells contradict it together, with theirs.

    Step times that another row prints are no contradiction of the speed: there the other cells were
    taken from that row.
    """
    printed = [_printed_speed(line) for line in lines]
    sound = _sound_tables(printed)
    rows = [_with_agreement(row, row.line.table in sound) for row in printed]
    return [_settled(row, rows) for row in rows]


def other_step_times(row: TimedLine, rows: Sequence[TimedLine]) -> dict[str, float]:
    """Step times of the other rows by their names, the same table's and the nearest rows first.

    Of rows above it also the step time that their cells agree on, for which another is printed.
    """
    places = {other.line.name: at for at, other in enumerate(rows)}
    place = places[row.line.name]
    others = sorted(
        (other for other in rows if other.column and other.line.name != row.line.name),
        key=lambda o: (o.line.table != row.line.table, abs(places[o.line.name] - place)),
    )
    names: dict[float, str] = {}
    for other in others:
        above = places[other.line.name] < place
        t = other.step_time_s if above else other.speed and other.speed.step_time_s
        if t:
            names.setdefault(t, other.line.name)
    return {name: t for t, name in names.items()}


def _sound_tables(rows: Sequence[TimedLine]) -> set[str]:
    """Tables in which nearly all rows, and at least three, have FLOPs that follow."""
    follow: dict[str, list[bool]] = {}
    for row in rows:
        counted = [pair for pair in row.derived() if pair[0].column in COUNT_FLOPS]
        if counted:
            states = [judge(*pair, row.speed) for pair in counted]
            follow.setdefault(row.line.table, []).append("fails" not in states)
    return {table for table, f in follow.items() if len(f) > 2 and sum(f) >= SOUND * len(f)}


def _printed_speed(line: AuditLine) -> TimedLine:
    printed = speed_of(line.cells, line.inputs)
    if printed and (line.twin is None or printed[0] in SPEEDS):
        return TimedLine(line, *printed)
    lent = speed_of(line.twin.cells, line.twin.inputs) if line.twin else None
    return TimedLine(line, None, lent[1] if lent else None)


def _with_agreement(row: TimedLine, flops_are_sound: bool) -> TimedLine:
    speed = row.speed
    if row.column is None or speed is None:
        return row
    pairs = [pair for pair in row.derived() if pair[1].power]
    failing = [pair for pair in pairs if judge(*pair, speed) == "fails"]
    meant, agreeing = _largest_agreement(failing)
    if meant is None:
        return row
    names = tuple(cell.column for cell, _ in agreeing)
    against = [p for p in pairs if p not in failing and not _allows(p, meant)]
    doubtful_count = COUNT_FLOPS.issuperset(names) and not flops_are_sound
    if against or doubtful_count or _otherwise(row.line, speed, agreeing, flops_are_sound):
        return row
    return replace(row, meant=meant, agreeing=names)


def _largest_agreement(failing: Sequence[Pair]) -> tuple[Interval | None, list[Pair]]:
    """The step times from which most of the failing cells follow, if two or more do."""
    best: tuple[Interval | None, list[Pair]] = (None, [])
    for start in failing:
        meant, agreeing = implied(*start), list[Pair]()
        for pair in failing:
            span = implied(*pair)
            both = meant.common(span) if meant and span else None
            if both:
                meant = both
                agreeing.append(pair)
        if len(agreeing) >= 2 and len(agreeing) > len(best[1]):
            best = meant, agreeing
    return best


def _allows(pair: Pair, meant: Interval) -> bool:
    span = implied(*pair)
    return span is not None and span.meets(meant)


def _otherwise(
    line: AuditLine, speed: RowSpeed, agreeing: Sequence[Pair], flops_are_sound: bool
) -> bool:
    """True when one input other than the step time explains all the agreeing cells."""
    return any(
        all(explains(change, cell, how) for cell, how in agreeing)
        for change in other_inputs(line.inputs, speed, line.options)
        if not (change.of_column and flops_are_sound)
    )


def _settled(row: TimedLine, rows: Sequence[TimedLine]) -> TimedLine:
    """The row judged by what its cells agree on, unless that is another row's step time."""
    meant = row.meant
    if meant is None:
        return row
    if any(meant.meets(exactly(t)) for t in other_step_times(row, rows).values()):
        return replace(row, meant=None, agreeing=())
    t, cell = row.step_time_s, row.line.cells[row.column or ""]
    if t is None or not meant.meets(exactly(t)):
        return row
    # What the cell should print leaves as much open as what it does print.
    how = relation(cell.column, row.line.inputs)
    half = cell.printed.step * cell.unit / 2
    value = how.at(t) if how else t
    allowed = how.step_times(Interval(value - half, value + half)) if how else None
    return replace(row, speed=RowSpeed(t, allowed or meant))
