"""Records of the generic reader: a line has the same one alone and after lines like it."""

from __future__ import annotations

import random
import re

from paceline.engines.log_reading import generic
from paceline.engines.log_reading.generic_records import MAX_SHAPES, named_records
from paceline.engines.log_reading.log_content import LogContent

HEAD = b"starting\nloading\n"
PIECES = (
    *("step", "iter ", "loss", "time", "a1", "a2", "epoch", "tok/s", "it/s", " s/it", "ms", "s"),
    *("[", "]", "(", ")", ": ", "=", " ", " ", "/", "|", ",", ".", "-", "1", "22", "333", "4,567"),
    *("0.5", "0", "1e3", "nan", "%", "k", "eval", "\u00e9", "\x1b[31m", "{", "}", '"x": 1', "12K"),
    *("2026-01-31 12:00:00 ", "Epoch: [0][ 10/500] Time 0.3 (0.4)", "100 tok/s", "0.5 s/step"),
    "12/30 [00:12<00:18,  1.02s/it]",
)


def other_digits(line: str, draw: random.Random) -> str:
    return re.sub("[0-9]", lambda _: draw.choice("0123456789"), line)


def records_of(*lines: str) -> list[str]:
    (groups,) = named_records([HEAD + "\n".join(lines).encode()])
    records = [
        (place, repr(dict(zip(group.names, values, strict=True))))
        for group in groups
        for place, *values in zip(group.places, *group.columns, strict=True)
    ]
    return [record for _, record in sorted(records)]


def test_a_line_has_the_same_record_alone_and_after_lines_like_it():
    draw = random.Random(7)
    num_records = 0
    for _ in range(400):
        shapes = ["".join(draw.choices(PIECES, k=draw.randint(3, 14))) for _ in range(3)]
        lines = [other_digits(draw.choice(shapes), draw) for _ in range(12)]
        records = [record for line in lines for record in records_of(line)]
        num_records += len(records)

        assert records_of(*lines) == records
    assert num_records > 200


def test_names_with_digits_are_those_of_each_line():
    lines = [f"step: {n} | layer{n}: 0.{n}" for n in (1, 2, 3)]
    assert records_of(*lines) == [f"{{'step': {n}.0, 'layer{n}': 0.{n}}}" for n in (1, 2, 3)]
    assert records_of("a1=1 a1=2", "a1=1 a2=2") == ["{'a1': 1.0, 'a2': 2.0}"]


def test_lines_of_more_kinds_than_are_stored_are_read():
    num_lines = MAX_SHAPES + 100
    lines = [f"{'y' * (n % 80)} step: {n} {'z' * (n // 80)} loss: 0.5" for n in range(num_lines)]
    assert len(records_of(*lines)) == num_lines


def test_records_are_read_up_to_a_limit_in_the_order_of_the_lines(monkeypatch):
    monkeypatch.setattr(generic, "MAX_RECORDS", 7)
    lines = [
        f"step: {n} | step_time: 0.5{' | lr: 1.0' * (n % 2 == 0)}\n".encode() for n in range(1, 13)
    ]
    log = LogContent()
    generic.read(generic.ColumnChoice(), [b"".join(lines[:4]), b"".join(lines[4:])], log)

    assert log.steps().index.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert "only the first 7 records are read" in log.remarks
