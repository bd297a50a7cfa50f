"""How a table counts FLOPs when it does not say: the way that gives most of its own cells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from paceline.audit.cells.derivation import judge, relation, speed_of
from paceline.audit.lines import cells_of, flops_input, inputs_of
from paceline.core.flops import CONVENTIONS, flops_per_sample, with_recompute
from paceline.core.units import counted
from paceline.files import catalog
from paceline.files.references import Row

MIN_ROWS = 3
MIN_SHARE = 2 / 3
FLOPS_COLUMNS = ("flops_per_s_per_device", "mfu")


@dataclass(frozen=True)
class Assumption:
    """What was found for one model of one table, and how well it gives the table's cells."""

    table: str
    model: str
    words: str
    num_given: int
    num_rows: int

    def __str__(self) -> str:
        return (
            f"{self.table}: {self.model} counts as {self.words}: not all declared; it gives "
            f"{self.num_given:,} of {counted(self.num_rows, 'row')}"
        )


def assume(rows: Sequence[Row], gate_is_open: bool) -> tuple[list[Row], list[Assumption]]:
    """The rows with the convention, peak and gate that fit best where they are not declared.

    One way is taken for all rows of a model in a table, and only if it gives at least three of them
    and two thirds; else their FLOPs stay unknown. Where the convention is declared and the peak
    alone is open, the data sheet's is taken however many rows it gives.
    """
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.source, row.table, row.model or row.recipe or ""), []).append(row)
    changed: dict[str, Row] = {}
    assumptions: list[Assumption] = []
    for (_, table, model), members in groups.items():
        counted = [row for row in members if set(FLOPS_COLUMNS) & set(row.printed)]
        best = _best(counted, gate_is_open and not counted[0].recipe) if counted else None
        if best:
            counting, num_given, words = best
            changed |= {row.id: _with(row, counting) for row in members}
            assumptions.append(
                Assumption(table, model or "its model", words, num_given, len(counted))
            )
        elif gate_is_open:
            changed |= {row.id: row.model_copy(update={"shape": None}) for row in members}
    return [changed.get(row.id, row) for row in rows], assumptions


Counting = dict[str, Any]


def _best(rows: Sequence[Row], gate_is_open: bool) -> tuple[Counting, int, str] | None:
    """The way to count that gives most rows, how many, and its words; None when nothing is open."""
    first = rows[0]
    if flops_input(first) is None and not first.flops_per_sample:
        return None
    if not gate_is_open and first.convention and not _peak_is_open(rows):
        return None
    best: tuple[Counting, int] | None = None
    for counting in _countings(first, gate_is_open, _peak_is_open(rows)):
        num_given = sum(_gives(_with(row, counting)) for row in rows)
        if best is None or num_given > best[1]:
            best = counting, num_given
        if num_given == len(rows):
            break
    stated = bool(first.convention) and not gate_is_open and _some_peak_is_known(rows)
    if best is None or not (stated or best[1] >= max(MIN_ROWS, MIN_SHARE * len(rows))):
        return None
    return best[0], best[1], _words(best[0])


def _some_peak_is_known(rows: Sequence[Row]) -> bool:
    return any("mfu" in row.printed and _peak(row, False) for row in rows)


def _peak_is_open(rows: Sequence[Row]) -> bool:
    return any("mfu" in row.printed and row.peak_flops_per_s is None for row in rows)


def _countings(row: Row, gate_is_open: bool, peak_is_open: bool) -> Iterator[Counting]:
    """Every way to count that the table leaves open, the usual ones first."""
    stated = "recompute" in row.layout.model_fields_set
    plain = stated and row.layout.recompute == "none"
    open_fields = {
        "padded": (False, True) if row.shape else (False,),
        "convention": [row.convention] if row.convention else list(_conventions(plain)),
        "gated": (False, True) if gate_is_open else (None,),
        "digits": (None,) if row.flops_per_sample else (None, 3),
        "whole_peak": (False, True) if peak_is_open else (None,),
    }
    for values in product(*open_fields.values()):
        yield dict(zip(open_fields, values, strict=True))


def _conventions(plain: bool) -> Iterator[str]:
    """Names in which tables are printed; nothing is recomputed in a `plain` one."""
    for name, convention in CONVENTIONS.items():
        yield name
        if convention.printed_recomputed and not plain:
            yield with_recompute(name)


def _with(row: Row, counting: Counting) -> Row:
    """The row counted in one way."""
    update: Counting = {"convention": counting["convention"]}
    if row.shape:
        gated = row.shape.gated_ffn if counting["gated"] is None else counting["gated"]
        vocab = _padded(row) if counting["padded"] else row.shape.vocab_size
        update["shape"] = row.shape.model_copy(update={"gated_ffn": gated, "vocab_size": vocab})
    if row.peak_flops_per_s is None and counting["whole_peak"] is not None:
        update["peak_flops_per_s"] = _peak(row, counting["whole_peak"])
    changed = row.model_copy(update=update)
    x = flops_input(changed)
    if x and counting["digits"] and row.flops_per_sample is None:
        rounded = float(f"{flops_per_sample(counting['convention'], x):.{counting['digits'] - 1}e}")
        changed = changed.model_copy(update={"flops_per_sample": rounded})
    return changed


def _padded(row: Row) -> int:
    """The vocabulary as Megatron pads it: to a multiple of 128 x tp."""
    assert row.shape
    padding = row.shape.model_copy(update={"vocab_multiple": 128})
    return padding.padded_vocab(row.layout.tp)


def _peak(row: Row, whole: bool) -> float | None:
    """The dense peak of the row's device and dtype, or its whole TFLOP/s."""
    if row.device is None or row.dtype is None:
        return None
    peak = catalog.device(row.device).peak_flops_per_s(row.dtype)
    return peak // 1e12 * 1e12 if peak and whole else peak


def _gives(row: Row) -> bool:
    """True when all cells of the row that count FLOPs follow."""
    cells, inputs = cells_of(row), inputs_of(row)
    speed = speed_of(cells, inputs)
    counted = [column for column in FLOPS_COLUMNS if column in cells]
    for column in counted:
        how = relation(column, inputs)
        if speed is None or column == speed[0] or how is None:
            return False
        if judge(cells[column], how, speed[1]) == "fails":
            return False
    return bool(counted)


def _words(counting: Counting) -> str:
    words = [str(counting["convention"])]
    if counting["gated"] is not None:
        words.append(
            "gated feed-forward layers"
            if counting["gated"]
            else "feed-forward layers without a gate"
        )
    if counting["digits"]:
        words.append("FLOPs of a sequence in three digits")
    if counting["whole_peak"] is not None:
        whole = " in whole TFLOP/s" if counting["whole_peak"] else ""
        words.append(f"the dense peak of the data sheet{whole}")
    if counting["padded"]:
        words.append("the vocabulary padded to 128 x tp")
    return ", ".join(words)
