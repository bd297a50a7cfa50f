"""Published results of MLPerf Training, and which of them stand beside a score."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import PositiveFloat, PositiveInt, ValidationError

from paceline.core.errors import UserError
from paceline.core.value import Value
from paceline.files.catalog import find_device
from paceline.files.references import source

RESULTS = "mlperf-results"


class PublishedScore(Value):
    """One published MLPerf Training result: its score, and what it was reached with."""

    official: Literal[True] = True
    """Own scores never are."""
    round: str
    submitter: str
    system: str
    benchmark: str
    division: str
    availability: str | None = None
    nodes: PositiveInt | None = None
    gpus_per_node: PositiveInt | None = None
    gpus: PositiveInt
    accelerator: str
    framework: str | None = None
    runs: PositiveInt | None = None
    succeeded: PositiveInt | None = None
    min_minutes: PositiveFloat | None = None
    max_minutes: PositiveFloat | None = None
    olympic_mean_minutes: PositiveFloat | None = None
    rcp_scaling_factor: PositiveFloat | None = None
    score_minutes: PositiveFloat
    global_batch_size: PositiveInt | None = None
    mean_samples_to_target: PositiveFloat | None = None
    median_throughput_samples_s: PositiveFloat | None = None
    e2e_samples_per_s: PositiveFloat | None = None
    """Samples to the target over run time, evaluations included."""


COLUMNS = tuple(name for name in PublishedScore.model_fields if name != "official")
"""Of a table of published results."""


def scores_of_csv(text: str, where: str) -> tuple[PublishedScore, ...]:
    """Published results in a table with these columns, and others that are passed over.

    Raises UserError with the line of a row that cannot be read.
    """
    found: list[PublishedScore] = []
    for number, row in enumerate(csv.DictReader(text.splitlines()), start=2):
        known = {name: row[name] for name in COLUMNS if row.get(name)}
        try:
            found.append(PublishedScore.model_validate(known))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise UserError(f"{where}:{number}", f"{place}: {first['msg']}") from error
    return tuple(found)


def known_scores(table: Path | None = None) -> tuple[PublishedScore, ...]:
    """The published results that come with Paceline, or those of a CSV file.

    Raises UserError for a file that cannot be read or is no such table.
    """
    if table is None:
        return _own_scores()
    try:
        text = table.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(str(table), f"cannot be read: {error}") from error
    found = scores_of_csv(text, str(table))
    if not found:
        raise UserError(str(table), "holds no result",
                        allowed=f"CSV with the columns {', '.join(COLUMNS)}")  # fmt: skip
    return found


def kind_of(accelerator: str | None) -> str | None:
    """The catalog's name of an accelerator, its own where the catalog does not know it."""
    if accelerator is None:
        return None
    try:
        return find_device(accelerator).device.name
    except UserError:
        return " ".join(accelerator.split())


def of_round(
    scores: Iterable[PublishedScore], benchmark: str, ruleset: str, division: str
) -> list[PublishedScore]:
    """The results of one benchmark, round and division, by the number of accelerators."""
    name = "v" + ruleset.rpartition(".")[0]
    found = [
        one
        for one in scores
        if (one.round, one.benchmark, one.division) == (name, benchmark, division)
    ]
    return sorted(found, key=lambda one: (one.gpus, one.score_minutes))


def alike(scores: Sequence[PublishedScore], num_devices: int, kind: str) -> list[PublishedScore]:
    """Those on the same number and kind of accelerators, the fastest first."""
    return [one for one in scores if one.gpus == num_devices and kind_of(one.accelerator) == kind]


@cache
def _own_scores() -> tuple[PublishedScore, ...]:
    found = source(RESULTS)
    return scores_of_csv(found.scores_csv or "", RESULTS)
