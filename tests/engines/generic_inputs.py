"""Random logs of no known format, and what the generic reader promises for each of them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable

from paceline.engines.log_reading.generic import ColumnChoice, generic_format
from paceline.engines.log_reading.log_content import LogContent
from tests.engines.promises import check_read

STEPS = ("step", "global_step", "Iteration", "iter", "update", "trainer/global_step", "x")
TIMES = (
    "iter_time",
    "step_time (ms)",
    "dt",
    "sec_per_step",
    "time",
    "elapsed",
    "_runtime",
    "data_time",
)
RATES = ("it/s", "tokens/s", "tok/s/gpu", "samples_per_sec", "tps", "imgs/s", "mfu")
OTHERS = (
    "loss",
    "lr",
    "val/loss",
    "grad_norm",
    "epoch",
    "eta",
    "total",
    "eval_time",
    "memory (GB)",
)
VALUES = (
    "nan",
    "inf",
    "-1",
    "0",
    "1e308",
    "1e999",
    "1,234.5",
    "9" * 30,
    "12:34",
    "True",
    "",
    "0x1f",
)
UNITS = ("", "s", "ms", " s", "us", "m", "k", "G", "/100", " sec", "%", "it/s")
HOSTILE = (
    *(
        b"\x00",
        b"\xff\xfe",
        b"\r",
        b"\n\n",
        b"|",
        b"=" * 40,
        b"{" * 200,
        b"[" * 200,
        b'"',
        b"9" * 400,
    ),
    *(b"a:" * 300, b"step: " * 50, b",", b";", b"\t", b"\x1b[31m", b"\xd9\xa3", b" " * 500),
)
SOURCES = {
    "step_time_s": r"step times are (?:differences of )?column",
    "samples_per_s": r"samples/s of all devices are column",
    "tokens_per_s_per_device": r"tokens/s per device are column",
    "tokens": r"tokens/s of all devices are column",
    "loss": r"losses are column",
}
"""Pattern of the sentence that names the source of a column of steps."""


def random_log(rng: random.Random) -> bytes:
    """A log of lines, bars, JSON or CSV with likely and unlikely names, damaged in some places."""
    parts = [rng.choice(FORMS)(rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    content = bytearray("".join(parts).encode())
    for _ in range(rng.choice((0, 0, 1, 3, 10))):
        at = rng.randint(0, len(content))
        content[at : at + rng.choice((0, 1, 5, 60))] = rng.choice(HOSTILE)
    return bytes(content)


def check_generic(content: bytes) -> LogContent:
    """Reads `content` in pieces of several sizes; every figure must name the column it is from."""
    log = check_read(generic_format(ColumnChoice()), content)
    steps = log.steps()
    if not len(steps):
        assert log.refusal
        return log
    sentences = " ".join(text for text in log.remarks if text.startswith("read by the generic"))
    assert re.search(r": steps are column '", sentences), log.remarks
    for name, source in SOURCES.items():
        assert not steps.known(name) or re.search(source, sentences), (name, sentences)
    unnamed = steps.columns.keys() - SOURCES.keys()
    assert not any(steps.known(name) for name in unnamed), unnamed
    assert not log.figures and not log.memory_bytes, (log.figures, log.memory_bytes)
    return log


def _rows(rng: random.Random) -> tuple[list[str], list[list[str]]]:
    """Names, and rows of values of which most behave as the name says."""
    names = [
        rng.choice(group) for group in (STEPS, TIMES, RATES, OTHERS, OTHERS) if rng.random() < 0.8
    ]
    rng.shuffle(names)
    start, every, seconds = (
        rng.choice((0, 1, 10**6)),
        rng.choice((1, 1, 10, 10, -1)),
        rng.uniform(0.001, 50),
    )
    rows: list[list[str]] = []
    for number in range(rng.choice((1, 8, 30))):
        values: list[str] = []
        for name in names:
            if rng.random() < 0.02:
                values.append(rng.choice(VALUES))
            elif name in STEPS:
                values.append(str(start + number * every))
            elif name in ("time", "elapsed", "_runtime"):
                values.append(f"{seconds * number:.3f}")
            else:
                values.append(f"{seconds * rng.uniform(0.9, 1.1):.4g}")
        rows.append(values)
    return names, rows


def _pairs(rng: random.Random) -> str:
    names, rows = _rows(rng)
    equals, between = rng.choice((": ", "=", ":", " = ")), rng.choice((" | ", ", ", " ", " - "))
    units = [rng.choice(UNITS) if rng.random() < 0.3 else "" for _ in names]
    stamped = rng.random() < 0.3
    return "".join(
        f"2026-01-01 10:{n // 6:02}:{n % 6 * 10:02} " * stamped
        + between.join(f"{n}{equals}{v}{u}" for n, v, u in zip(names, row, units, strict=True))
        + "\n"
        for n, row in enumerate(rows)
    )


def _bars(rng: random.Random) -> str:
    unit, name = (
        rng.choice(("it/s", "s/it", "step/s", "x")),
        rng.choice(("", "Training: ", "Validation: ", "Epochs: ", "Epoch {e}: ")),
    )
    total, loss = rng.choice(("100", "?", "9" * 12)), rng.choice(("", ", loss=2.3", ", loss=nan"))
    lines: list[str] = []
    for n in range(rng.choice((2, 20, 60))):
        epoch, n = divmod(n, 15)
        begin, rate = name.format(e=epoch), f"{rng.random():.2f}{unit}"
        clock = f"{rng.choice(('', '1:'))}00:{n:02}"
        forms = (
            f"{n}%|##  | {n}/{total} [{clock}<00:10, {rate}{loss}]",
            f"━━━ {n}/{total} {clock} • 0:00:45 {rate}",
            f"{n}it [{clock}, {rate}]",
        )
        lines.append(begin + forms[rng.choice((0, 0, 0, 1, 2))])
    return rng.choice("\r\n").join(lines)


def _json(rng: random.Random) -> str:
    names, rows = _rows(rng)
    lines: list[str] = []
    for row in rows:
        record: dict[str, object] = {
            name: float(value) if re.fullmatch(r"[\d.]+", value) else value
            for name, value in zip(names, row, strict=True)
        }
        lines.append(json.dumps({"train": record} if rng.random() < 0.2 else record) + "\n")
    return "".join(lines)


def _csv(rng: random.Random) -> str:
    names, rows = _rows(rng)
    delimiter = rng.choice(",;\t")
    return "".join(delimiter.join(row) + "\n" for row in [names, *rows])


FORMS: tuple[Callable[[random.Random], str], ...] = (_pairs, _bars, _json, _csv)
