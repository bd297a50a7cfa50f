"""Scores of MLPerf runs beside published results of the round."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from paceline.core.errors import UserError
from paceline.engines.dialect.mllog import records
from paceline.files.log_file import LogFile
from paceline.logs.parser import as_text
from paceline.mlperf.compare.answer import Beside, Compared, Own, PublishedScaling
from paceline.mlperf.compare.published import (
    RESULTS,
    PublishedScore,
    alike,
    kind_of,
    known_scores,
    of_round,
)
from paceline.mlperf.compare.strong_scaling import (
    Point,
    point_of_published,
    point_of_score,
    scaling_steps,
)
from paceline.mlperf.genuineness import NOT_A_RESULT, is_tiny, not_a_result
from paceline.mlperf.result_logs import run_logs
from paceline.mlperf.score.folder import score
from paceline.mlperf.score.score import Score
from paceline.mlperf.submission.packaging import RefusedError

LARGEST_SCORE_BYTES = 16 * 2**20


def compare(
    places: Sequence[Path],
    table: Path | None = None,
    *,
    ruleset: str | None = None,
    num_devices: Sequence[int] = (),
    accelerator: str | None = None,
) -> Compared:
    """Folders of runs, or scores as `mlperf score --json` prints them, beside published results.

    `num_devices` are those of the places in their order where the logs do not say. Raises RefusedError
    for what is no result, UserError for scores of different benchmarks, rounds or divisions.
    """
    if len(num_devices) not in (0, len(places)):
        raise UserError("--gpus", f"is given {len(num_devices)} times for {len(places)} folders")
    counts = [*num_devices] or [None] * len(places)
    scores = [_score(place, ruleset, n) for place, n in zip(places, counts, strict=True)]
    benchmark = _one("benchmarks", [one.benchmark for one in scores])
    rules = _one("rulesets", [one.ruleset for one in scores])
    division = _one("divisions", [one.division or "closed" for one in scores])
    known = of_round(known_scores(table), benchmark, rules, division)
    own, points = [], []
    for place, one in zip(places, scores, strict=True):
        itself = _published_itself(place, known)
        one = _completed(one, place, itself)
        kind = kind_of(accelerator or one.device or (itself.accelerator if itself else None))
        own.append(_own(one, place, kind, known, itself))
        points.append(point_of_score(one, as_text(str(place))))
    return Compared(
        benchmark=benchmark,
        ruleset=rules,
        division=division,
        source=str(table) if table else f"references/{RESULTS}.yaml",
        own=tuple(own),
        published=tuple(known),
        scaling=tuple(scaling_steps([point for point in points if point])),
        published_scaling=tuple(_published_scaling(known, {one.accelerator for one in own})),
        notes=tuple(_notes(own, known, points)),
    )


def _score(place: Path, ruleset: str | None, num_devices: int | None) -> Score:
    """The score of a folder, or the one in a file of JSON; raises RefusedError for what is no result."""
    if place.suffix == ".json":
        found = _read_score(place)
        if is_tiny(found.system) or is_tiny(found.organisation) or NOT_A_RESULT in found.label:
            raise RefusedError(str(place), f"is {NOT_A_RESULT}: a small sibling of the benchmark",
                               remedy="compare it with runs of the same kind: paceline compare")  # fmt: skip
        return found.model_copy(update={"num_devices": num_devices or found.num_devices})
    for log in run_logs(place):
        reason = None if log.unreadable else not_a_result(records(LogFile(log.path)))
        if reason:
            raise RefusedError(str(log.path), f"is not compared with published results: {reason}",
                               remedy="compare it with runs of the same kind: paceline compare")  # fmt: skip
    return score(place, ruleset, num_devices)


def _read_score(path: Path) -> Score:
    try:
        if path.stat().st_size > LARGEST_SCORE_BYTES:
            raise UserError(str(path), "is no score: it is too large")
        return Score.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(str(path), f"cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise UserError(str(path), f"is no score: {error.errors()[0]['msg']}",
                        allowed="what `paceline mlperf score DIR --json` prints") from error  # fmt: skip


def _one(what: str, values: Sequence[str]) -> str:
    found = list(dict.fromkeys(values))
    if len(found) > 1:
        raise UserError("DIR", f"these are {what} that cannot be compared: {', '.join(found)}")
    return found[0]


def _published_itself(place: Path, known: Sequence[PublishedScore]) -> PublishedScore | None:
    """The published result whose logs lie at `place`: `<submitter>/.../<system>/<benchmark>`."""
    parts = place.resolve().parts
    for one in known:
        if parts[-2:] == (one.system, one.benchmark) and one.submitter in parts[:-2]:
            return one
    return None


def _completed(one: Score, place: Path, itself: PublishedScore | None) -> Score:
    """The score with the accelerators of the submission's description, where the logs have none."""
    changes: dict[str, Any] = {}
    if one.num_devices is None and itself:
        changes["num_devices"] = itself.gpus
    if one.device is None and (name := _described_accelerator(place)):
        changes["device"] = name
    return one.model_copy(update=changes)


def _described_accelerator(place: Path) -> str | None:
    """The accelerator by `<org>/systems/<system>.json` beside `<org>/results/<system>/<benchmark>`."""
    folder = place.resolve()
    if len(folder.parents) < 3:
        return None
    path = folder.parents[2] / "systems" / f"{folder.parent.name}.json"
    try:
        name = json.loads(path.read_text(encoding="utf-8"))["accelerator_model_name"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return name if isinstance(name, str) and name else None


def _own(
    one: Score,
    place: Path,
    kind: str | None,
    known: Sequence[PublishedScore],
    itself: PublishedScore | None,
) -> Own:
    batches = {run.global_batch for run in one.runs if run.part == "counted"}
    same = alike(known, one.num_devices, kind) if one.num_devices and kind else []
    minutes = one.score_minutes
    beside = [_beside(minutes, other, other is itself) for other in same] if minutes else []
    return Own(
        name=as_text(str(place)),
        system=one.system,
        status=one.status,
        reason=one.reason,
        score_minutes=minutes,
        num_devices=one.num_devices,
        accelerator=kind,
        global_batch=batches.pop() if len(batches) == 1 else None,
        mean_samples_to_target=one.mean_samples_to_target,
        samples_per_s=_samples_per_s(one),
        model_flops_per_s_per_device=one.model_flops_per_s_per_device,
        convention=one.convention,
        beside=tuple(beside),
    )


def _samples_per_s(one: Score) -> float | None:
    """As the published results have it: of all converged runs, over the olympic mean."""
    if not (one.mean_samples_to_target and one.olympic_mean_minutes):
        return None
    return one.mean_samples_to_target / (60 * one.olympic_mean_minutes)


def _beside(minutes: float, other: PublishedScore, itself: bool) -> Beside:
    return Beside(
        submitter=other.submitter,
        system=other.system,
        round=other.round,
        availability=other.availability,
        score_minutes=other.score_minutes,
        time_ratio=minutes / other.score_minutes,
        global_batch=other.global_batch_size,
        mean_samples_to_target=other.mean_samples_to_target,
        samples_per_s=other.e2e_samples_per_s,
        itself=itself,
    )


def _published_scaling(
    known: Sequence[PublishedScore], kinds: set[str | None]
) -> list[PublishedScaling]:
    """Of each submitter with two sizes or more on an accelerator that the scores have."""
    groups: dict[tuple[str, str], list[Point]] = {}
    for one in known:
        kind, point = kind_of(one.accelerator), point_of_published(one)
        if kind and kind in kinds and point:
            groups.setdefault((one.submitter, kind), []).append(point)
    found = [(names, scaling_steps(points)) for names, points in sorted(groups.items())]
    return [
        PublishedScaling(submitter=submitter, accelerator=kind, steps=tuple(steps))
        for (submitter, kind), steps in found
        if steps
    ]


def _notes(
    own: Sequence[Own], known: Sequence[PublishedScore], points: Sequence[Point | None]
) -> list[str]:
    """What could not be compared, and why."""
    notes: list[str] = []
    for one in own:
        if one.score_minutes is None:
            notes.append(f"{one.name}: no score, {one.status}: {one.reason}")
        elif one.num_devices is None:
            notes.append(f"{one.name}: nothing says how many accelerators it had; --gpus does")
        elif one.accelerator is None:
            notes.append(f"{one.name}: nothing says which accelerator it had; --accelerator does")
        elif not one.beside:
            sizes = sorted({p.gpus for p in known if kind_of(p.accelerator) == one.accelerator})
            listed = (
                f"known for it: {', '.join(map(str, sizes))}" if sizes else "none on it is known"
            )
            notes.append(
                f"{one.name}: no published result on {one.num_devices} x {one.accelerator} is "
                f"known here ({listed})"
            )
    if len(own) > 1 and len({p.num_devices for p in points if p}) < 2:
        notes.append("scaling needs two sets of runs on different numbers of accelerators")
    return notes
