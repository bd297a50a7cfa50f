"""Check which cells of a published table follow from their row, and why others do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from paceline.audit.derivation import (
    COLUMNS,
    PER_DEVICE,
    SPEEDS,
    WHOLE_JOB,
    AlternativeInputs,
    Cell,
    Change,
    Inputs,
    Relation,
    RowSpeed,
    State,
    explains,
    implied_step_times,
    judge,
    missing,
    other_divisors,
    other_inputs,
    other_speeds,
    relation,
    rounded_speeds,
    slip_of_digits,
    speed_of,
)
from paceline.core.printed import Interval, exactly, like

Pair = tuple[Cell, Relation]
FLOPS_COLUMN_SET = frozenset({"flops_per_s_per_device", "mfu"})
"""Columns that share the FLOPs per sequence.

Alone they can contradict that FLOPs count, but not the speed of the row.
"""
MIN_SOUND_SHARE = 0.8
"""Fraction of a table's rows whose FLOPs must follow before its FLOPs count is trusted."""


@dataclass(frozen=True)
class AuditLine:
    """One published row under audit."""

    name: str
    table: str
    cells: Mapping[str, Cell]
    inputs: Inputs
    options: AlternativeInputs = field(default_factory=AlternativeInputs)
    twin: AuditLine | None = None
    """A row of the same configuration. Its speed must agree, and replaces a missing one."""


@dataclass(frozen=True)
class TimedLine:
    """A line with the step time against which its cells are checked."""

    line: AuditLine
    column: str | None = None
    """Column that gives the speed; None if the twin gives it."""
    speed: RowSpeed | None = None
    consistent_step_times: Interval | None = None
    """Step times on which the other cells agree if they contradict the printed speed."""
    agreeing_columns: tuple[str, ...] = ()

    def derived_cells(self) -> Iterator[Pair]:
        """Yield each cell that follows from the step time or the settings, with its relation."""
        for column, cell in self.line.cells.items():
            how = relation(column, self.line.inputs)
            if how and column != self.column and (how.power == 0 or self.speed):
                yield cell, how

    @property
    def step_time_s(self) -> float | None:
        """Step time as printed, or as implied by the other cells at the printed precision."""
        if self.speed is None or self.consistent_step_times is None or self.column != "step_time_s":
            return (
                self.consistent_step_times.middle
                if self.consistent_step_times
                else self.speed and self.speed.step_time_s
            )
        printed_text = self.line.cells["step_time_s"].printed
        rounded_value = float(
            like(self.consistent_step_times.middle, printed_text).replace(",", "")
        )
        return (
            rounded_value
            if self.consistent_step_times.meets(exactly(rounded_value))
            else self.consistent_step_times.middle
        )


def with_step_times(lines: Iterable[AuditLine]) -> list[TimedLine]:
    """Return every line with its step time, or with the one on which its other cells agree.

    If that agreed step time is printed by another row, the printed speed is kept: the cells were
    copied from that row.
    """
    with_printed_speed = [_printed_speed(line) for line in lines]
    sound_tables = _sound_tables(with_printed_speed)
    rows = [_with_agreement(row, row.line.table in sound_tables) for row in with_printed_speed]
    return [_with_consistent_speed(row, rows) for row in rows]


def other_step_times(row: TimedLine, rows: Sequence[TimedLine]) -> dict[str, float]:
    """Return step times of the other rows with their names, nearest rows of the table first.

    Rows above contribute the step time on which their cells agree, even if they print another.
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
    """Return the tables with at least three rows of which nearly all have consistent FLOPs."""
    follow: dict[str, list[bool]] = {}
    for row in rows:
        flops_cells = [pair for pair in row.derived_cells() if pair[0].column in FLOPS_COLUMN_SET]
        if flops_cells:
            states = [judge(*pair, row.speed) for pair in flops_cells]
            follow.setdefault(row.line.table, []).append("fails" not in states)
    return {
        table for table, f in follow.items() if len(f) > 2 and sum(f) >= MIN_SOUND_SHARE * len(f)
    }


def _printed_speed(line: AuditLine) -> TimedLine:
    column_and_speed = speed_of(line.cells, line.inputs)
    if column_and_speed and (line.twin is None or column_and_speed[0] in SPEEDS):
        return TimedLine(line, *column_and_speed)
    twin_speed = speed_of(line.twin.cells, line.twin.inputs) if line.twin else None
    return TimedLine(line, None, twin_speed[1] if twin_speed else None)


def _with_agreement(row: TimedLine, flops_are_sound: bool) -> TimedLine:
    speed = row.speed
    if row.column is None or speed is None:
        return row
    pairs = [pair for pair in row.derived_cells() if pair[1].power]
    failing = [pair for pair in pairs if judge(*pair, speed) == "fails"]
    step_times, agreeing = _largest_agreement(failing)
    if step_times is None:
        return row
    names = tuple(cell.column for cell, _ in agreeing)
    against = [p for p in pairs if p not in failing and not _allows(p, step_times)]
    doubtful_count = FLOPS_COLUMN_SET.issuperset(names) and not flops_are_sound
    if (
        against
        or doubtful_count
        or _another_input_explains(row.line, row.column, speed, agreeing, flops_are_sound)
    ):
        return row
    return replace(row, consistent_step_times=step_times, agreeing_columns=names)


def _largest_agreement(failing: Sequence[Pair]) -> tuple[Interval | None, list[Pair]]:
    """Return the step times from which most failing cells follow, if at least two do."""
    best: tuple[Interval | None, list[Pair]] = (None, [])
    for start in failing:
        step_times, agreeing = implied_step_times(*start), list[Pair]()
        for pair in failing:
            span = implied_step_times(*pair)
            both = step_times.common(span) if step_times and span else None
            if both:
                step_times = both
                agreeing.append(pair)
        if len(agreeing) >= 2 and len(agreeing) > len(best[1]):
            best = step_times, agreeing
    return best


def _allows(pair: Pair, step_times: Interval) -> bool:
    span = implied_step_times(*pair)
    return span is not None and span.meets(step_times)


def _another_input_explains(
    line: AuditLine, column: str, speed: RowSpeed, agreeing: Sequence[Pair], flops_are_sound: bool
) -> bool:
    """Return whether one input other than the step time explains all agreeing cells."""
    return any(
        all(explains(change, cell, how) for cell, how in agreeing)
        for change in _own_changes(line, column, speed)
        if not (change.of_column and flops_are_sound)
    )


def _with_consistent_speed(row: TimedLine, rows: Sequence[TimedLine]) -> TimedLine:
    """Return the row with the speed its cells agree on, unless another row prints that speed."""
    step_times = row.consistent_step_times
    if step_times is None:
        return row
    if any(step_times.meets(exactly(t)) for t in other_step_times(row, rows).values()):
        return replace(row, consistent_step_times=None, agreeing_columns=())
    t, cell = row.step_time_s, row.line.cells[row.column or ""]
    if t is None or not step_times.meets(exactly(t)):
        return row
    # The corrected cell has the same rounding interval as the printed one.
    how = relation(cell.column, row.line.inputs)
    half = cell.printed.step * cell.unit / 2
    value = how.at(t) if how else t
    cell_step_times = how.step_times(Interval(value - half, value + half)) if how else None
    return replace(row, speed=RowSpeed(t, cell_step_times or step_times))


UNEXPLAINED = "no change of a single input explains it"
ALONE = "no other cell of its row determines it"
NO_SPEED = "its row prints no speed"
CUT = "follows only if its digits were truncated instead of rounded"
ROUNDING = (
    "follows within the rounding of the step time, but not together with the row's other cells"
)
LACKS = {
    "flops_per_sample": "FLOPs count (needs model shape, sequence length and convention)",
    "peak_flops_per_s": "declared peak",
    "total_tokens": "declared number of tokens",
    "base_samples_per_s": "base for speed-ups",
}


@dataclass(frozen=True)
class CellVerdict:
    """Verdict on one cell: whether it follows, the expected value, and why it differs."""

    line: AuditLine
    cell: Cell
    state: State | Literal["strained", "speed", "unchecked"]
    """`strained`: it follows, but not from a step time that the row's other cells allow."""
    recomputed: float | None = None
    """In base units."""
    resolution: float | None = None
    """Smallest relative change of the cell that is certainly detected."""
    cause: str | None = None

    @property
    def difference(self) -> float | None:
        """Printed over recomputed, minus 1."""
        return self.cell.value / self.recomputed - 1 if self.recomputed else None


Words = Mapping[tuple[str, str], list[str]]
"""Explanations of each cell by row and column, the most plausible first."""


def check(lines: Sequence[AuditLine]) -> list[CellVerdict]:
    """Return a verdict on every cell of the lines of one source, in order."""
    rows = with_step_times(lines)
    words = {
        (row.line.name, cell.column): _words(row, cell, how, rows)
        for row in rows
        for cell, how in row.derived_cells()
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
    """Return whether the cell needs a step time that another cell of the row excludes."""
    required_step_times = implied_step_times(cell, how)
    if (
        row.speed is None
        or required_step_times is None
        or required_step_times.meets(exactly(row.speed.step_time_s))
    ):
        return False
    others = [implied_step_times(*pair) for pair in row.derived_cells() if pair[0] is not cell]
    return any(
        o and o.meets(row.speed.interval) and not o.meets(required_step_times) for o in others
    )


def _words(row: TimedLine, cell: Cell, how: Relation, rows: Sequence[TimedLine]) -> list[str]:
    """Return the exact explanations of a cell.

    For a failing cell, those within the rounding of the step time follow.
    """
    fails = judge(cell, how, row.speed) == "fails"
    explanations: dict[str, None] = {}
    for within_rounding in (False, True) if fails else (False,):
        words = [
            change.words
            for change in _changes(row, rows)
            if explains(change, cell, how, within_rounding)
            and _is_supported(change, row, cell, rows)
        ]
        if how.power and not within_rounding:
            words += _multiples(row, cell, rows)
        explanations |= dict.fromkeys(words)
    return list(explanations)


def _is_supported(change: Change, row: TimedLine, cell: Cell, rows: Sequence[TimedLine]) -> bool:
    """Return False if cells that share the changed input follow only without the change."""
    if change.of_row:
        return not any(
            _only_without(change, row, *pair) for pair in row.derived_cells() if pair[0] != cell
        )
    if not change.of_column:
        return True
    for_it = against = 0
    for other in rows:
        other_row_inputs, own_inputs = other.line.inputs, row.line.inputs
        peer, how = other.line.cells.get(cell.column), relation(cell.column, other_row_inputs)
        same = (other_row_inputs.flops_per_sample, other_row_inputs.peak_flops_per_s) == (
            own_inputs.flops_per_sample,
            own_inputs.peak_flops_per_s,
        )
        if other.line.table != row.line.table or not same or not (peer and how and other.speed):
            continue
        same_change = (
            c
            for c in _own_changes(other.line, other.column, other.speed)
            if c.words == change.words
        )
        fits = any(explains(c, peer, how, within_rounding=True) for c in same_change)
        follows = judge(peer, how, other.speed) != "fails"
        for_it += fits and not follows
        against += follows and not fits
    return for_it >= against


def _only_without(change: Change, row: TimedLine, cell: Cell, how: Relation) -> bool:
    """Return whether the change would break a cell that follows."""
    changed_relation = relation(cell.column, change.inputs)
    if (
        changed_relation is None
        or changed_relation == how
        or judge(cell, how, row.speed) == "fails"
    ):
        return False
    return judge(cell, changed_relation, row.speed) == "fails"


def _changes(row: TimedLine, rows: Sequence[TimedLine]) -> Iterator[Change]:
    inputs, speed = row.line.inputs, row.speed
    if speed:
        yield from other_speeds(inputs, other_step_times(row, rows), row.line.options)
        yield from _speed_of_other_devices(row, speed)
        yield from _own_changes(row.line, row.column, speed)
        yield from rounded_speeds(inputs, speed)


def _speed_of_other_devices(row: TimedLine, speed: RowSpeed) -> Iterator[Change]:
    """Yield the step time if a throughput is a sum, or of one device, contrary to its column."""
    n, column = int(row.line.inputs.num_devices or 1), row.column or ""
    for columns, factor, words in (
        (PER_DEVICE, n, f"summed over all {n:,} devices"),
        (WHOLE_JOB - {"days"}, 1 / n, f"of one of the {n:,} devices"),
    ):
        if n > 1 and column in columns:
            other = RowSpeed(speed.step_time_s * factor, speed.interval.times(factor))
            yield Change(f"follows if {column} is {words}", row.line.inputs, other, True)


def _own_changes(line: AuditLine, column: str | None, speed: RowSpeed | None) -> Iterator[Change]:
    """Yield every change of an input, with the speed that the row then has.

    A throughput gives another step time with another batch: the batch cancels out of FLOP/s.
    """
    cell = line.cells.get(column or "")
    for change in other_inputs(line.inputs, speed, line.options) if speed else ():
        how = relation(cell.column, change.inputs) if cell and change.of_row else None
        if cell and how and how != relation(cell.column, line.inputs):
            exact, allowed = (
                how.step_times(exactly(cell.value)),
                how.step_times(cell.rounding_interval()),
            )
            if exact and allowed:
                change = replace(change, speed=RowSpeed(exact.middle, allowed))
        yield change


def _multiples(row: TimedLine, cell: Cell, rows: Sequence[TimedLine]) -> Iterator[str]:
    """Yield rows of the table whose cell, scaled by the number of devices, equals this one."""
    num_devices = row.line.inputs.num_devices
    for other in rows if cell.column in WHOLE_JOB else ():
        other_num_devices, other_cell = (
            other.line.inputs.num_devices,
            other.line.cells.get(cell.column),
        )
        if (
            other.line.table != row.line.table
            or other is row
            or not (num_devices and other_num_devices and other_cell)
        ):
            continue
        scale = (
            other_num_devices / num_devices
            if cell.column == "days"
            else num_devices / other_num_devices
        )
        if scale != 1 and abs(other_cell.value * scale / cell.value - 1) < 1e-9:
            yield f"is {other_cell.printed.digits} of {other.line.name} times {scale:.4g}"


def _ballots(row: TimedLine, cell: Cell, word: str) -> tuple[tuple[str, str, str], ...]:
    """Return votes: a change that explains more of a row or a column is more likely."""
    return ("row", row.line.name, word), ("column", f"{row.line.table} {cell.column}", word)


def _verdicts(
    row: TimedLine, words: Words, votes: Counter[tuple[str, str, str]]
) -> Iterator[CellVerdict]:
    relations = {cell.column: how for cell, how in row.derived_cells()}
    for column, cell in row.line.cells.items():
        if column == row.column:
            yield _speed_verdict(row, cell, bool(relations))
        elif column in relations:
            likely = sorted(
                words.get((row.line.name, column), []),
                key=lambda word: -sum(votes[ballot] for ballot in _ballots(row, cell, word)),
            )
            yield _derived_verdict(row, cell, relations[column], likely[0] if likely else None)
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
        cause = CUT if cell.truncation_interval().meets(exactly(how.at(t))) else words or CUT
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
    """Check the row's own speed against its other cells and its twin."""
    twin = row.line.twin
    other = twin.cells.get(cell.column) if twin else None
    if row.consistent_step_times and row.speed:
        return _contradicted_verdict(row, cell)
    if twin and other:
        agrees = cell.rounding_interval().meets(other.rounding_interval())
        evidence = ", and the other figures of this row follow from that" if has_derived else ""
        cause = f"{twin.name} prints {other.printed.text} for the same configuration{evidence}"
        state = "follows" if agrees else "fails"
        resolution = cell.printed.resolution + other.printed.resolution
        return CellVerdict(
            row.line, cell, state, other.value, resolution, None if agrees else cause
        )
    if has_derived:
        return CellVerdict(row.line, cell, "speed")
    return CellVerdict(row.line, cell, "unchecked", cause=ALONE)


def _contradicted_verdict(row: TimedLine, cell: Cell) -> CellVerdict:
    how = relation(cell.column, row.line.inputs)
    assert how and row.consistent_step_times and row.speed
    value = how.at(row.speed.step_time_s)
    consistent_value = Relation(how.over(row.consistent_step_times), 0)
    value_text = like(value / cell.unit, cell.printed)
    cause = f"{' and '.join(row.agreeing_columns)} all follow from {value_text}"
    slip = _other_divisor(row, cell, row.consistent_step_times)
    slip = slip or slip_of_digits(cell, consistent_value)
    resolution = cell.printed.resolution + row.consistent_step_times.relative_width
    cause = f"{cause}; {slip}" if slip else cause
    return CellVerdict(row.line, cell, "fails", value, resolution, cause)


def _other_divisor(row: TimedLine, cell: Cell, step_times: Interval) -> str | None:
    """Return how the cell follows from `step_times` as a total or as a figure of one device."""
    assert row.speed
    for change in other_divisors(row.line.inputs, row.speed):
        how = relation(cell.column, change.inputs)
        values = Relation(how.over(step_times), 0) if how else None
        if (
            values
            and cell.column in (change.columns or ())
            and judge(cell, values, None) != "fails"
        ):
            return change.words
    return None


def _why_unchecked(row: TimedLine, column: str) -> str:
    if column not in COLUMNS:
        return ALONE
    lacking = missing(column, row.line.inputs)
    if lacking:
        return "no " + " and no ".join(LACKS.get(name, name.replace("_", " ")) for name in lacking)
    return NO_SPEED
