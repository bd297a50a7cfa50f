"""Verification of a bundle: its files by their digests, and its figures by its files."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from typing import Literal

from paceline import __version__
from paceline.core.assets import content_digest, plain_path
from paceline.core.bundle import Bundle
from paceline.core.errors import PacelineError, UserError
from paceline.core.result import FINAL, Metric, Result
from paceline.core.value import NonNegativeInt, Value
from paceline.files.archive import first_name, unpack
from paceline.files.documents import read_value
from paceline.files.run_folder import RESULT_FILE, read_record
from paceline.runs.bundles.writing import BUNDLE_FILE
from paceline.runs.outcome import evaluate

TOLERANCE = 1e-9
"""Relative tolerance; another processor may round the last digits of a sum differently."""

FileFault = Literal["changed", "missing", "extra"]


class BundleFault(Value):
    """File that differs from the bundle's file list."""

    path: str
    fault: FileFault


class ChangedFigure(Value):
    """Stored figure that cannot be reproduced from the raw files."""

    name: str
    stored: str
    recomputed: str


class BundleCheck(Value):
    """Result of the verification of a bundle."""

    bundle: str
    run: str
    sha256: str
    """SHA-256 of all paths and file digests, to compare with the one of the bundle's author."""
    verdict: Literal["whole", "damaged", "other figures", "no figures"]
    """Result; `no figures` means intact files of a run without a result to compare with them."""
    n_files: NonNegativeInt
    bytes: NonNegativeInt
    faults: tuple[BundleFault, ...]
    n_figures: NonNegativeInt
    figures: tuple[ChangedFigure, ...]
    measured_by: str
    """Version of Paceline that measured the run."""
    checked_by: str


@dataclass(frozen=True)
class OpenedBundle:
    """Files of a bundle in a temporary folder, which exists while the bundle is open."""

    bundle: Bundle
    folder: Path


@contextmanager
def opened_bundle(path: Path) -> Iterator[OpenedBundle]:
    """Unpack a bundle into its own folder, after checking that no path leads out of it.

    Raises UserError for a file that is not a bundle, or a malicious one.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-bundle-") as name:
        place = Path(name)
        held = unpack(path, place)
        roots = {file.partition("/")[0] for file in held.files}
        root = roots.pop() if len(roots) == 1 else ""
        if f"{root}/{BUNDLE_FILE}" not in held.files:
            raise UserError(
                str(path), f"holds no {BUNDLE_FILE}", remedy="`paceline bundle RUN` writes one"
            )
        bundle = read_value(place / root / BUNDLE_FILE, Bundle)
        if bundle.run != root:
            raise UserError(str(path), f"is of the run {bundle.run[:99]!r} and holds {root!r}")
        _check_log(place / root)
        yield OpenedBundle(bundle, place / root)


def _check_log(folder: Path) -> None:
    """Raise UserError if the path of the run's imported log leads out of the folder."""
    try:
        log = read_record(folder).log
    except PacelineError:  # The digests show a damaged run.json, which is not used otherwise.
        return
    try:
        if log is not None:
            plain_path(log)
    except ValueError as error:
        raise UserError(f"{folder.name}: log {log!r}", str(error)) from error


def is_bundle(path: Path) -> bool:
    """Return whether the first member marks an archive as a bundle; raises UserError."""
    return first_name(path).partition("/")[2] == BUNDLE_FILE


def check_bundle(path: Path) -> BundleCheck:
    """Compare the files of a bundle with their digests, and recompute its figures from them.

    Raises UserError for a file that is not a bundle.
    """
    with opened_bundle(path) as opened:
        return check_opened(opened, path)


def check_opened(opened: OpenedBundle, path: Path) -> BundleCheck:
    """Check an open bundle, read from `path`, as `check_bundle` does."""
    bundle = opened.bundle
    faults = tuple(_faults(opened))
    stored, figures = (None, ()) if faults else _figures(opened.folder)
    named = len(stored.metrics) if stored else 0
    verdict = "damaged" if faults else "other figures" if figures else "whole"
    return BundleCheck(
        bundle=str(path),
        run=bundle.run,
        sha256=bundle.sha256,
        verdict="no figures" if verdict == "whole" and not named else verdict,
        n_files=len(bundle.files),
        bytes=sum(file.bytes for file in bundle.files),
        faults=faults,
        n_figures=named,
        figures=figures,
        measured_by=bundle.paceline_version,
        checked_by=__version__,
    )


def _faults(opened: OpenedBundle) -> Iterator[BundleFault]:
    bundle, folder = opened.bundle, opened.folder
    there = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    for file in bundle.files:
        if file.path not in there:
            yield BundleFault(path=file.path, fault="missing")
        elif _digest(folder / file.path) != file.sha256:
            yield BundleFault(path=file.path, fault="changed")
    for name in sorted(there - {file.path for file in bundle.files} - {BUNDLE_FILE}):
        yield BundleFault(path=name, fault="extra")
    if content_digest(bundle.files) != bundle.sha256:
        yield BundleFault(path=BUNDLE_FILE, fault="changed")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _figures(folder: Path) -> tuple[Result | None, tuple[ChangedFigure, ...]]:
    """Return the stored result, and its figures that the raw files do not reproduce."""
    file = folder / RESULT_FILE
    record = read_record(folder)
    if not file.is_file():
        return None, ()
    stored = read_value(file, Result)
    try:
        computed = evaluate(folder).result
    except PacelineError as error:
        lost = ChangedFigure(name="result", stored=stored.status, recomputed=str(error))
        return stored, (lost,)
    changed = list(_changed(stored.metrics, computed.metrics))
    if record.status in FINAL and stored.status != computed.status:
        figure = ChangedFigure(name="status", stored=stored.status, recomputed=computed.status)
        changed.insert(0, figure)
    return stored, tuple(changed)


def _changed(
    stored: Mapping[str, Metric], computed: Mapping[str, Metric]
) -> Iterator[ChangedFigure]:
    for name in {**stored, **computed}:
        ours, theirs = _numbers(stored.get(name)), _numbers(computed.get(name))
        if not all(map(_equal, ours, theirs)):
            yield ChangedFigure(name=name, stored=_text(ours), recomputed=_text(theirs))


def _numbers(metric: Metric | None) -> tuple[float | None, ...]:
    """Return value, number of steps, spread and interval of a figure."""
    if metric is None:
        return (None,) * 5
    return metric.value, metric.n, metric.spread, metric.low, metric.high


def _equal(ours: float | None, theirs: float | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return isclose(ours, theirs, rel_tol=TOLERANCE, abs_tol=1e-12)


def _text(numbers: tuple[float | None, ...]) -> str:
    """Return the numbers as text, with "-" for missing ones."""
    value, *rest = ("-" if number is None else f"{number:.12g}" for number in numbers)
    return f"{value} (n {rest[0]}, spread {rest[1]}, {rest[2]} to {rest[3]})"
