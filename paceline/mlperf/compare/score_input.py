"""The scores to be compared: of folders of runs, or out of JSON that was printed before."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from paceline.core.errors import UserError
from paceline.core.problem import refusal
from paceline.engines.log_reading.mllog import records
from paceline.files.log_file import LogFile
from paceline.mlperf.eligibility import NOT_A_RESULT, RefusedError, is_tiny, not_a_result
from paceline.mlperf.result_logs import run_logs
from paceline.mlperf.score.run_set import score
from paceline.mlperf.score.score import Score, with_model_flops

LARGEST_SCORE_BYTES = 16 * 2**20
ELSEWHERE = "compare it with runs of the same kind: paceline compare"
"""What to do with runs that are no results."""


def read_score(place: Path, ruleset: str | None, num_devices: int | None) -> Score:
    """The score of a folder, or the one in a file of JSON.

    Raises RefusedError for what is no result, UserError for what cannot be read.
    """
    if place.suffix == ".json":
        printed = _printed_score(place)
        if (
            is_tiny(printed.system)
            or is_tiny(printed.organisation)
            or NOT_A_RESULT in printed.label
        ):
            raise RefusedError(
                str(place), f"is {NOT_A_RESULT}: a small sibling of the benchmark", remedy=ELSEWHERE
            )
        devices = {"num_devices": num_devices or printed.num_devices}
        return with_model_flops(printed.model_copy(update=devices))
    for log in run_logs(place):
        reason = None if log.unreadable else not_a_result(records(LogFile(log.path)))
        if reason:
            raise RefusedError(
                str(log.path),
                f"is not compared with published results: {reason}",
                remedy=ELSEWHERE,
            )
    return score(place, ruleset, num_devices)


def _printed_score(path: Path) -> Score:
    try:
        if path.stat().st_size > LARGEST_SCORE_BYTES:
            raise UserError(str(path), "is no score: it is too large")
        return Score.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(str(path), f"cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise UserError(
            str(path),
            f"is no score: {refusal(str(path), error).what}",
            allowed="what `paceline mlperf score DIR --json` prints",
        ) from error
