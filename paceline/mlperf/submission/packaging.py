"""A submission's folder out of runs, a system description and the code: copied, checked, then put in place."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import EXIT_GATE_FAILED, SystemFaultError, UserError
from paceline.engines.dialect.mllog import records
from paceline.files.log_file import LogFile
from paceline.logs.parser import as_text
from paceline.mlperf.check.findings import ResultLines
from paceline.mlperf.genuineness import is_tiny, not_a_result
from paceline.mlperf.score.folder import score
from paceline.mlperf.score.score import Score
from paceline.mlperf.submission.check import SCALING, check
from paceline.mlperf.submission.description import DIVISIONS, faults, is_placeholder
from paceline.mlperf.submission.package import Package, Packaged
from paceline.mlperf.trial_log import PLACEHOLDER

LEFT_OUT = (".git", "__pycache__", ".venv", ".pytest_cache", "*.pyc")
"""Of the code."""
_NAME = re.compile(r"[A-Za-z0-9][\w.+-]{0,99}")


class RefusedError(UserError):
    """The rules, not the command, stand against a package (exit code 3)."""

    exit_code = EXIT_GATE_FAILED


@dataclass(frozen=True)
class Asked:
    """What is to be packaged."""

    places: tuple[Path, ...]
    organisation: str
    division: str
    system: Path
    code: Mapping[str, Path]
    """By benchmark; what "" names serves all others."""
    out: Path
    ruleset: str | None = None
    placeholders: bool = False
    """Whether placeholders in logs are taken as they are."""


def package(asked: Asked) -> Package:
    """Lay out and check the submission; it is in place only if the official checker passes it.

    Files are copied, never moved or changed, and nothing is overwritten. Raises UserError for input
    that is no submission's, RefusedError for what the rules refuse.
    """
    _check_names(asked)
    target = asked.out / asked.organisation
    if target.exists() or target.is_symlink():
        raise UserError(str(target), "exists, and nothing is overwritten",
                        remedy="give another --out")  # fmt: skip
    _check_description(asked)
    scores = [_taken(place, asked) for place in asked.places]
    _check_distinct(scores)
    try:
        asked.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=asked.out, prefix=".paceline-") as scratch:
            made = Path(scratch) / asked.organisation
            results = [
                _laid_out(made, place, one, asked)
                for place, one in zip(asked.places, scores, strict=True)
            ]
            _copied(asked.system, made / "systems" / asked.system.name)
            found = check(made, asked.ruleset or scores[0].ruleset)
            if found.status == "passed":
                made.rename(target)
    except OSError as error:
        raise SystemFaultError(str(error.filename or asked.out), f"cannot be written: {error.strerror}") from error  # fmt: skip
    written = found.status == "passed"
    return Package(
        folder=str(target) if written else None,
        organisation=asked.organisation,
        division=asked.division,
        system=asked.system.stem,
        results=tuple(results),
        warnings=tuple(text for one in scores for text in _doubts(one, asked)),
        check=found.model_copy(update={"place": as_text(str(target))}),
    )


def _check_names(asked: Asked) -> None:
    """Raises UserError for names that no folder can have, or that only hold a place."""
    if is_placeholder(asked.organisation):
        raise RefusedError(f"--org {asked.organisation}", "is a placeholder, not an organisation")
    for option, name in (("--org", asked.organisation), ("--system", asked.system.stem)):
        if not _NAME.fullmatch(name):
            raise UserError(f"{option} {name}", "cannot be the name of a folder in a submission",
                            allowed="letters, digits, _ . + -")  # fmt: skip
    if asked.division not in DIVISIONS:
        raise UserError(f"--division {asked.division}", "is unknown", allowed=", ".join(DIVISIONS))
    for place in (*asked.places, *asked.code.values()):
        if not place.is_dir():
            raise UserError(str(place), "is no folder")
    for code in asked.code.values():
        if asked.out.resolve().is_relative_to(code.resolve()):
            raise UserError(f"--out {asked.out}", f"lies in the code {code} that is copied into it")


def _check_description(asked: Asked) -> None:
    """Raises RefusedError for a description with open or wrong fields, or of another submission."""
    try:
        text = asked.system.read_text(encoding="utf-8")
        known = json.loads(text)
    except OSError as error:
        raise UserError(str(asked.system), f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(str(asked.system), f"is no JSON: {error}") from error
    if not isinstance(known, dict):
        raise UserError(str(asked.system), "is no system description: no JSON object")
    for name in (asked.system.stem, str(known.get("system_name"))):
        if is_tiny(name):
            raise RefusedError(
                str(asked.system), f"its system {name[:60]!r} is that of small siblings"
            )
    wrong = faults(text, known)
    for field, wanted in (("submitter", asked.organisation), ("division", asked.division)):
        if not wrong and known[field] != wanted:
            raise RefusedError(
                str(asked.system), f"its {field} is {known[field]!r}, not {wanted!r}"
            )
    if wrong:
        said = "; ".join(one.message for one in wrong[:5])
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise RefusedError(f"{asked.system}:{wrong[0].line or 1}", f"{said}{more}",
                           remedy="fill it in, and see `paceline mlperf check FILE`")  # fmt: skip


def _taken(place: Path, asked: Asked) -> Score:
    """The score of the runs at `place`; raises RefusedError where they cannot be submitted."""
    found = score(place, asked.ruleset)
    open_to_convergence = asked.division == "open" and found.status != "incomplete"
    if found.status != "ok" and not open_to_convergence:
        raise RefusedError(str(place), f"has no score: {found.reason}")
    if found.benchmark not in asked.code and "" not in asked.code:
        raise UserError("--code", f"names no code for {found.benchmark}",
                        remedy="the rules want the code that made a result")  # fmt: skip
    for name in _files(found):
        _check_log(place / name, asked)
    return found


def _check_log(log: Path, asked: Asked) -> None:
    """Raises RefusedError for a log that is no result, or of another submission."""
    if not log.is_file():
        raise RefusedError(str(log), "a file holds several trials; a submission has one a file",
                           remedy="put each trial into a file of its own")  # fmt: skip
    if reason := not_a_result(records(LogFile(log))):
        raise RefusedError(str(log), f"is not an MLPerf result: {reason}")
    lines = ResultLines.of(b"".join(LogFile(log)))
    wanted = {"submission_org": asked.organisation, "submission_division": asked.division}
    for at, number in enumerate(lines.numbers):
        record = lines.record(at)
        key, value = record.get("key"), str(record.get("value"))
        if key not in wanted or value == wanted[key]:
            continue
        if PLACEHOLDER not in value:
            raise RefusedError(f"{log}:{number}", f"{key} is {value[:60]!r}, not {wanted[key]!r}")
        if not asked.placeholders:
            raise RefusedError(
                f"{log}:{number}", f"{key} was never filled in: {value[:60]!r}",
                remedy="logs are not changed: run with the name set, or take them as they are with "
                       "--allow-placeholders and answer for it in the review",
            )  # fmt: skip


def _check_distinct(scores: Sequence[Score]) -> None:
    names = [one.benchmark for one in scores]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError("DIR", f"two folders hold {twice}", remedy="a system has one result each")
    rulesets = sorted({one.ruleset for one in scores})
    if len(rulesets) > 1:
        raise UserError("DIR", f"the folders are of different rounds: {', '.join(rulesets)}",
                        remedy="--ruleset names one")  # fmt: skip


def _laid_out(made: Path, place: Path, found: Score, asked: Asked) -> Packaged:
    """The runs of one benchmark and its code, copied below `made`."""
    folder = made / "results" / asked.system.stem / found.benchmark
    folder.mkdir(parents=True)
    names = {f"result_{number}.txt": name for number, name in enumerate(_files(found))}
    for name, source in names.items():
        with (folder / name).open("wb") as opened:
            opened.writelines(LogFile(place / source))
    factor = found.scaling_factor if asked.division == "closed" else None
    if factor and factor > 1:
        (folder / SCALING).write_text(json.dumps({"scaling_factor": factor}), encoding="utf-8")
    code = asked.code.get(found.benchmark) or asked.code[""]
    implementation = made / "benchmarks" / found.benchmark / "implementations" / code.resolve().name
    shutil.copytree(
        code,
        implementation,
        ignore=shutil.ignore_patterns(*LEFT_OUT),
        ignore_dangling_symlinks=True,
    )
    return Packaged(
        benchmark=found.benchmark,
        source=as_text(str(place)),
        files=names,
        score_minutes=found.score_minutes,
        scaling_factor=found.scaling_factor,
    )


def _files(found: Score) -> tuple[str, ...]:
    """The logs of the window that counts, in the order of their start."""
    return next((window.files for window in found.windows if window.chosen), ())


def _doubts(found: Score, asked: Asked) -> Iterable[str]:
    """What a review would ask about, that is no reason to refuse."""
    yield from (f"{found.benchmark}: {warning}" for warning in found.warnings)
    known = json.loads(asked.system.read_text(encoding="utf-8"))
    described = int(known["number_of_nodes"]) * int(known["accelerators_per_node"])
    if found.num_devices and described and found.num_devices != described:
        yield (
            f"{found.benchmark}: the logs speak of {found.num_devices} accelerators, the "
            f"description of {described}"
        )


def _copied(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)
