"""Read published scores, and the scores to compare with them."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import PositiveFloat, ValidationError

from paceline.core.errors import UserError, unreadable
from paceline.core.problem import invalid_input
from paceline.core.value import PositiveInt, Value
from paceline.engines.log_reading.mllog import records
from paceline.files.catalog import find_device
from paceline.files.documents import read_text
from paceline.files.log_file import LogFile
from paceline.files.references import source
from paceline.mlperf.result_logs import run_logs
from paceline.mlperf.rules import NOT_A_RESULT, RuleViolationError, is_tiny, not_a_result
from paceline.mlperf.score.run_set import score
from paceline.mlperf.score.score import Score, with_model_flops

RESULTS = "mlperf-results"


class PublishedScore(Value):
    """One published MLPerf Training result: its score, system and measurements."""

    official: Literal[True] = True
    """Always true; the user's own scores are never official."""
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
    converged_runs: PositiveInt | None = None
    min_minutes: PositiveFloat | None = None
    max_minutes: PositiveFloat | None = None
    olympic_mean_minutes: PositiveFloat | None = None
    rcp_scaling_factor: PositiveFloat | None = None
    """Factor of the convergence test that is included in the score."""
    score_minutes: PositiveFloat
    global_batch_size: PositiveInt | None = None
    mean_samples_to_target: PositiveFloat | None = None
    median_throughput_samples_s: PositiveFloat | None = None
    e2e_samples_per_s: PositiveFloat | None = None
    """Samples to the target / run time, evaluations included."""


COLUMNS = tuple(name for name in PublishedScore.model_fields if name != "official")
"""Columns of a table of published results."""


def parse_scores_csv(text: str, where: str) -> tuple[PublishedScore, ...]:
    """Read published results from a CSV table; columns not in COLUMNS are ignored.

    Raises UserError with the line of a row that cannot be read.
    """
    scores: list[PublishedScore] = []
    for number, row in enumerate(csv.DictReader(text.splitlines()), start=2):
        cells = {name: row[name] for name in COLUMNS if row.get(name)}
        try:
            scores.append(PublishedScore.model_validate(cells))
        except ValidationError as error:
            raise invalid_input(f"{where}:{number}", error) from error
    return tuple(scores)


def published_scores(table: Path | None = None) -> tuple[PublishedScore, ...]:
    """Return the published results shipped with Paceline, or those of a CSV file.

    Raises UserError for a file that cannot be read or does not have these columns.
    """
    if table is None:
        return _bundled_scores()
    try:
        text = read_text(table)
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(str(table), error) from error
    scores = parse_scores_csv(text, str(table))
    if not scores:
        raise UserError(
            str(table), "holds no result", allowed=f"CSV with the columns {', '.join(COLUMNS)}"
        )
    return scores


def accelerator_kind(accelerator: str | None) -> str | None:
    """Return the catalog name of an accelerator, or its own name if the catalog lacks it."""
    if accelerator is None:
        return None
    try:
        return find_device(accelerator).device.name
    except UserError:
        return " ".join(accelerator.split())


def accelerator_kinds(scores: Iterable[PublishedScore]) -> list[str]:
    """Return the kinds of accelerators in the published results."""
    return sorted({kind for score in scores if (kind := accelerator_kind(score.accelerator))})


def in_catalog(accelerator: str) -> bool:
    """Return whether the catalog lists the accelerator."""
    try:
        return bool(find_device(accelerator))
    except UserError:
        return False


def scores_of_round(
    scores: Iterable[PublishedScore], benchmark: str, ruleset: str, division: str
) -> list[PublishedScore]:
    """Return the results of one benchmark, round and division, by number of accelerators."""
    round_name = "v" + ruleset.rpartition(".")[0]
    matches = [
        score
        for score in scores
        if (score.round, score.benchmark, score.division) == (round_name, benchmark, division)
    ]
    return sorted(matches, key=lambda score: (score.gpus, score.score_minutes))


def on_same_accelerators(
    scores: Sequence[PublishedScore], num_devices: int, kind: str
) -> list[PublishedScore]:
    """Return results on the same number and kind of accelerators, fastest first."""
    return [
        score
        for score in scores
        if score.gpus == num_devices and accelerator_kind(score.accelerator) == kind
    ]


@cache
def _bundled_scores() -> tuple[PublishedScore, ...]:
    return parse_scores_csv(source(RESULTS).scores_csv or "", RESULTS)


MAX_SCORE_BYTES = 16 * 2**20
COMPARE_INSTEAD = "compare such runs with each other: paceline compare"
"""Remedy for runs that are not MLPerf results."""


def read_score(place: Path, ruleset: str | None, num_devices: int | None) -> Score:
    """Return the score of a folder of runs, or the one in a JSON file.

    Raises RuleViolationError for runs that are not results, UserError for an unreadable file.
    """
    if place.suffix == ".json":
        printed = _printed_score(place)
        if (
            is_tiny(printed.system)
            or is_tiny(printed.organization)
            or NOT_A_RESULT in printed.label
        ):
            raise RuleViolationError(
                str(place),
                f"is {NOT_A_RESULT}: a tiny variant of the benchmark",
                remedy=COMPARE_INSTEAD,
            )
        devices = {"num_devices": num_devices or printed.num_devices}
        return with_model_flops(printed.model_copy(update=devices))
    for log in run_logs(place):
        reason = None if log.unreadable else not_a_result(records(LogFile(log.path)))
        if reason:
            raise RuleViolationError(
                str(log.path),
                f"cannot be compared with published results: {reason}",
                remedy=COMPARE_INSTEAD,
            )
    return score(place, ruleset, num_devices)


def _printed_score(path: Path) -> Score:
    try:
        if path.stat().st_size > MAX_SCORE_BYTES:
            raise UserError(str(path), "is too large for a score")
        return Score.model_validate_json(read_text(path, MAX_SCORE_BYTES))
    except OSError as error:
        raise UserError(str(path), f"cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise UserError(
            str(path),
            f"is not a score: {invalid_input(str(path), error).what}",
            allowed="the output of `paceline mlperf score DIR --json`",
        ) from error
