"""A published table checked against itself: which cells follow from their row, and why not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from paceline.audit.derivation import (
    COLUMNS,
    SPEEDS,
    Cell,
    Change,
    Inputs,
    Options,
    Relation,
    RowSpeed,
    State,
    explains,
    implied,
    judge,
    missing,
    other_inputs,
    other_speeds,
    relation,
    rounded_speeds,
    slip_of_digits,
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


UNEXPLAINED = "no other value of a single input gives it"
ALONE = "nothing else in its row gives it"
NO_SPEED = "its row prints no speed"
CUT = "follows only if its further digits were cut, not rounded"
ROUNDING = "follows alone within the rounding of the step time, not beside the row's other figures"
LACKS = {
    "flops_per_sample": "known count of FLOPs (model shape, sequence length, convention)",
    "peak_flops_per_s": "declared peak",
    "total_tokens": "declared number of tokens",
    "base_samples_per_s": "base for speed-ups",
}
WHOLE_JOB = frozenset({"tokens_per_s", "samples_per_s", "days"})
"""Columns of the whole job, which scale with its devices from row to row."""


@dataclass(frozen=True)
class CellVerdict:
    """One cell: whether it follows, what it should be, and why it is not that."""

    line: AuditLine
    cell: Cell
    state: State | Literal["strained", "speed", "unchecked"]
    """`strained`: it follows, yet not from the step time that the row's other cells leave open."""
    recomputed: float | None = None
    """In base units."""
    resolution: float | None = None
    """The smallest relative change of the cell that is surely noticed."""
    cause: str | None = None

    @property
    def difference(self) -> float | None:
        """Printed over recomputed, minus 1."""
        return self.cell.value / self.recomputed - 1 if self.recomputed else None


Words = Mapping[tuple[str, str], list[str]]
"""By row and column: the words of every change that explains the cell, the most plausible first."""


def check(lines: Sequence[AuditLine]) -> list[CellVerdict]:
    """A verdict on every cell of the lines of one source, in their order."""
    rows = timed(lines)
    words = {
        (row.line.name, cell.column): _words(row, cell, how, rows)
        for row in rows
        for cell, how in row.derived()
        if _doubtful(row, cell, how)
    }
    votes = Counter(
        vote
        for row in rows
        for cell in row.line.cells.values()
        for word in words.get((row.line.name, cell.column), [])
        for vote in _ballots(row, cell, word)
    )
    return [verdict for row in rows for verdict in _verdicts(row, words, votes)]


def _doubtful(row: TimedLine, cell: Cell, how: Relation) -> bool:
    state = judge(cell, how, row.speed)
    return state != "follows" or _is_strained(row, cell, how)


def _is_strained(row: TimedLine, cell: Cell, how: Relation) -> bool:
    """True when the cell needs a step time that another cell of the row excludes."""
    needed = implied(cell, how)
    if row.speed is None or needed is None or needed.meets(exactly(row.speed.step_time_s)):
        return False
    others = [implied(*pair) for pair in row.derived() if pair[0] is not cell]
    return any(o and o.meets(row.speed.interval) and not o.meets(needed) for o in others)


def _words(row: TimedLine, cell: Cell, how: Relation, rows: Sequence[TimedLine]) -> list[str]:
    """What explains the cell exactly; if it fails, else within the rounding of the step time."""
    fails = judge(cell, how, row.speed) == "fails"
    for within_rounding in (False, True) if fails else (False,):
        words = [
            change.words
            for change in _changes(row, rows)
            if explains(change, cell, how, within_rounding) and _borne(change, row, cell, rows)
        ]
        if how.power and not within_rounding:
            words += _multiples(row, cell, rows)
        if words:
            return list(dict.fromkeys(words))
    return []


def _borne(change: Change, row: TimedLine, cell: Cell, rows: Sequence[TimedLine]) -> bool:
    """True unless the cells that share the changed input follow without the change only."""
    if change.of_row:
        return not any(
            _only_without(change, row, *pair) for pair in row.derived() if pair[0] != cell
        )
    if not change.of_column:
        return True
    for_it = against = 0
    for other in rows:
        stated, mine = other.line.inputs, row.line.inputs
        peer, how = other.line.cells.get(cell.column), relation(cell.column, stated)
        same = (stated.flops_per_sample, stated.peak_flops_per_s) == (
            mine.flops_per_sample,
            mine.peak_flops_per_s,
        )
        if other.line.table != row.line.table or not same or not (peer and how and other.speed):
            continue
        same_change = (c for c in _own_changes(other) if c.words == change.words)
        fits = any(explains(c, peer, how, within_rounding=True) for c in same_change)
        follows = judge(peer, how, other.speed) != "fails"
        for_it += fits and not follows
        against += follows and not fits
    return for_it >= against


def _only_without(change: Change, row: TimedLine, cell: Cell, how: Relation) -> bool:
    """True when the change would break a cell that follows."""
    changed = relation(cell.column, change.inputs)
    if changed is None or changed == how or judge(cell, how, row.speed) == "fails":
        return False
    return judge(cell, changed, row.speed) == "fails"


def _changes(row: TimedLine, rows: Sequence[TimedLine]) -> Iterator[Change]:
    inputs, speed = row.line.inputs, row.speed
    if speed:
        yield from other_speeds(inputs, other_step_times(row, rows), row.line.options)
        yield from _own_changes(row)
        yield from rounded_speeds(inputs, speed)


def _own_changes(row: TimedLine) -> Iterator[Change]:
    if row.speed:
        yield from other_inputs(row.line.inputs, row.speed, row.line.options)


def _multiples(row: TimedLine, cell: Cell, rows: Sequence[TimedLine]) -> Iterator[str]:
    """Rows of the table whose printed cell, scaled by the number of devices, is this one."""
    mine = row.line.inputs.num_devices
    for other in rows if cell.column in WHOLE_JOB else ():
        theirs, printed = other.line.inputs.num_devices, other.line.cells.get(cell.column)
        if other.line.table != row.line.table or other is row or not (mine and theirs and printed):
            continue
        scale = theirs / mine if cell.column == "days" else mine / theirs
        if scale != 1 and abs(printed.value * scale / cell.value - 1) < 1e-9:
            yield f"is {printed.printed.digits} of {other.line.name} times {scale:.4g}"


def _ballots(row: TimedLine, cell: Cell, word: str) -> tuple[tuple[str, str, str], ...]:
    """A change that explains much of a row or of a table's column is the likelier one."""
    return ("row", row.line.name, word), ("column", f"{row.line.table} {cell.column}", word)


def _verdicts(
    row: TimedLine, words: Words, votes: Counter[tuple[str, str, str]]
) -> Iterator[CellVerdict]:
    derived = {cell.column: how for cell, how in row.derived()}
    for column, cell in row.line.cells.items():
        if column == row.column:
            yield _speed_verdict(row, cell, bool(derived))
        elif column in derived:
            likely = sorted(
                words.get((row.line.name, column), []),
                key=lambda word: -sum(votes[ballot] for ballot in _ballots(row, cell, word)),
            )
            yield _derived_verdict(row, cell, derived[column], likely[0] if likely else None)
        else:
            yield CellVerdict(row.line, cell, "unchecked", cause=_why_unchecked(row, column))


def _derived_verdict(row: TimedLine, cell: Cell, how: Relation, words: str | None) -> CellVerdict:
    state = judge(cell, how, row.speed)
    t = row.speed.step_time_s if row.speed else 1.0
    spread = how.over(row.speed.interval) if row.speed else how.coefficient
    cause = None
    if state == "fails":
        cause = words or slip_of_digits(cell, how, t) or UNEXPLAINED
    elif state == "cut":
        cause = CUT if cell.cut().meets(exactly(how.at(t))) else words or CUT
    elif words:
        cause = f"{ROUNDING}; {words}"
    return CellVerdict(
        row.line,
        cell,
        "strained" if cause and state == "follows" else state,
        how.at(t),
        cell.printed.resolution + spread.relative_width,
        cause,
    )


def _speed_verdict(row: TimedLine, cell: Cell, has_derived: bool) -> CellVerdict:
    """The row's own speed: contradicted by its other cells, by its twin, or taken as it stands."""
    twin = row.line.twin
    other = twin.cells.get(cell.column) if twin else None
    if row.meant and row.speed:
        return _contradicted(row, cell)
    if twin and other:
        agrees = cell.rounded().meets(other.rounded())
        evidence = ", from which the other figures of this row follow" if has_derived else ""
        cause = f"{twin.name} prints {other.printed.text} for the same configuration{evidence}"
        state = "follows" if agrees else "fails"
        resolution = cell.printed.resolution + other.printed.resolution
        return CellVerdict(
            row.line, cell, state, other.value, resolution, None if agrees else cause
        )
    if has_derived:
        return CellVerdict(row.line, cell, "speed")
    return CellVerdict(row.line, cell, "unchecked", cause=ALONE)


def _contradicted(row: TimedLine, cell: Cell) -> CellVerdict:
    how = relation(cell.column, row.line.inputs)
    assert how and row.meant and row.speed
    value = how.at(row.speed.step_time_s)
    meant = Relation(how.over(row.meant), 0)
    shown = like(value / cell.unit, cell.printed)
    cause = f"{' and '.join(row.agreeing)} follow together from {shown}"
    slip = slip_of_digits(cell, meant)
    resolution = cell.printed.resolution + row.meant.relative_width
    cause = f"{cause}; {slip}" if slip else cause
    return CellVerdict(row.line, cell, "fails", value, resolution, cause)


def _why_unchecked(row: TimedLine, column: str) -> str:
    if column not in COLUMNS:
        return ALONE
    lacking = missing(column, row.line.inputs)
    if lacking:
        return "no " + " and no ".join(LACKS.get(name, name.replace("_", " ")) for name in lacking)
    return NO_SPEED
