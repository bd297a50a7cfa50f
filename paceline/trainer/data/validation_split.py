"""Validation part of a text source: its end, the same for every seed.

For the standard library it is the last files of a fixed order. For a text or jsonl file it is the
last bytes, from the start of a record.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.trainer.config import ConfigError, DataConfig, TrainerConfig
from paceline.trainer.data.texts import Extent, paragraphs, stdlib_paths, text_of

FIRST_READ_BYTES = 1 << 16


@dataclass(frozen=True)
class ValidationSize:
    """Amount held out for evaluation: tokens of packed samples, or records."""

    amount: int
    padded: bool

    def measure(self, text: bytes, is_record: bool = False) -> int:
        """Return the amount that a text contributes, in tokens or records."""
        if not self.padded:
            return len(text) + 1 if text else 0
        return bool(text) if is_record else sum(1 for _ in paragraphs(text))


def validation_size(config: TrainerConfig) -> ValidationSize:
    """Return the amount that the evaluation of a training run needs."""
    assert config.training.evaluation is not None
    samples = config.training.evaluation.samples
    if config.data.packing == "padded":
        return ValidationSize(samples, padded=True)
    return ValidationSize(samples * config.training.seq_len + 1, padded=False)


def split_off(data: DataConfig, need: ValidationSize) -> tuple[Extent, Extent]:
    """Return (training part, held-out part) of a text source.

    Raises ConfigError when nothing is left to train on.
    """
    if data.source == "stdlib":
        return _split_files(stdlib_paths(), need)
    assert data.path is not None, "other sources have a file"
    size = Path(data.path).stat().st_size
    start = _start_of_end(data, size, need)
    if start <= 0:
        raise nothing_left_error(data.path)
    return Extent(end=start), Extent(start=start)


def nothing_left_error(where: str) -> ConfigError:
    """Return the error for an evaluation that leaves nothing to train on."""
    return ConfigError(
        f"data: training.evaluation.samples leaves nothing of {where} to train on; "
        "use fewer samples, or set evaluation.path"
    )


def _split_files(paths: Sequence[Path], need: ValidationSize) -> tuple[Extent, Extent]:
    order = list(paths)
    random.Random(0).shuffle(order)
    amount = 0
    while order and amount < need.amount:
        amount += need.measure(order.pop().read_bytes())
    if not order:
        raise nothing_left_error("the standard library")
    train_files = set(order)
    train = tuple(path for path in paths if path in train_files)
    return Extent(files=train), Extent(files=tuple(p for p in paths if p not in train_files))


def _start_of_end(data: DataConfig, size: int, need: ValidationSize) -> int:
    """Return the start of the shortest sufficient end, or 0 if there is none.

    The search reads the end of the file in lengths that double.
    """
    if data.source == "text" and not need.padded:
        return max(0, size - need.amount)
    length = FIRST_READ_BYTES
    while length < size:
        start = _shortest_end(data, size - length, need)
        if start is not None:
            return start
        length *= 2
    return _shortest_end(data, 0, need) or 0


def _shortest_end(data: DataConfig, start: int, need: ValidationSize) -> int | None:
    """Return the start of the last records after `start` that suffice; None if they do not."""
    assert data.path is not None
    with Path(data.path).open("rb") as file:
        file.seek(start)
        tail = file.read()
    split_records = _record_splitter(data)
    places = [*split_records(tail)][1 if start else 0 :]  # the first one may be incomplete
    amount = 0
    for place, record in reversed(places):
        amount += need.measure(record, is_record=True)
        if amount >= need.amount:
            return start + place
    return None


def _record_splitter(data: DataConfig) -> Callable[[bytes], Iterator[tuple[int, bytes]]]:
    """Return the function that splits bytes into (position, text) of their records."""

    def lines(tail: bytes) -> Iterator[tuple[int, bytes]]:
        place = 0
        for number, line in enumerate(tail.splitlines(keepends=True)):
            # The first line may be incomplete; the caller skips it.
            whole = number > 0 and bool(line.strip())
            yield place, text_of(line, data.text_key, str(data.path)) if whole else b""
            place += len(line)

    def parts(tail: bytes) -> Iterator[tuple[int, bytes]]:
        place = 0
        for part in tail.split(b"\n\n"):
            yield place, part.strip()
            place += len(part) + 2

    return lines if data.source == "jsonl" else parts
