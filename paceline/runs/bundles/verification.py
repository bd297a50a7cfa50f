"""Verification of a bundle: its files by their digests, and its figures by its files."""

from __future__ import annotations

import hashlib
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
from paceline.files.temporary import temporary_folder
from paceline.runs.bundles.writing import BUNDLE_FILE
from paceline.runs.outcome import evaluate

TOLERANCE = 1e-9
"""Relative tolerance; another CPU may round the last digits of a sum differently."""

FileFault = Literal["changed", "missing", "extra"]


class BundleFault(Value):
    """File that differs from the bundle's file list."""

    path: str
    fault: FileFault


class ChangedFigure(Value):
    """Stored figure that cannot be reproduced from the raw files."""

    name: str
    stored_value: str
    recomputed_value: str


class BundleCheck(Value):
    """Result of the verification of a bundle."""

    bundle: str
    run: str
    sha256: str
    """SHA-256 of all paths and file digests, to compare with the one of the bundle's author."""
    verdict: Literal["intact", "damaged", "figures differ", "no figures"]
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
class BundleContents:
    """Files of a bundle in a temporary folder, which exists while the bundle is open."""

    bundle: Bundle
    folder: Path


@contextmanager
def open_bundle(path: Path) -> Iterator[BundleContents]:
    """Unpack a bundle into its own folder, after checking that no path leads out of it.

    Raises UserError for a file that is not a bundle, or a malicious one.
    """
    with temporary_folder() as name:
        place = Path(name)
        archive = unpack(path, place)
        roots = {file.partition("/")[0] for file in archive.files}
        root = roots.pop() if len(roots) == 1 else ""
        if f"{root}/{BUNDLE_FILE}" not in archive.files:
            raise UserError(
                str(path),
                f"contains no {BUNDLE_FILE}",
                remedy="create one with `paceline runs bundle RUN`",
            )
        bundle = read_value(place / root / BUNDLE_FILE, Bundle)
        if bundle.run != root:
            raise UserError(
                str(path), f"describes the run {bundle.run[:99]!r} but contains {root!r}"
            )
        _check_log(place / root)
        yield BundleContents(bundle, place / root)


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
    with open_bundle(path) as contents:
        return check_contents(contents, path)


def check_contents(contents: BundleContents, path: Path) -> BundleCheck:
    """Check an open bundle, read from `path`, as `check_bundle` does."""
    bundle = contents.bundle
    faults = tuple(_faults(contents))
    result, figures = (None, ()) if faults else _figures(contents.folder)
    num_figures = len(result.metrics) if result else 0
    verdict = "damaged" if faults else "figures differ" if figures else "intact"
    return BundleCheck(
        bundle=str(path),
        run=bundle.run,
        sha256=bundle.sha256,
        verdict="no figures" if verdict == "intact" and not num_figures else verdict,
        n_files=len(bundle.files),
        bytes=sum(file.bytes for file in bundle.files),
        faults=faults,
        n_figures=num_figures,
        figures=figures,
        measured_by=bundle.paceline_version,
        checked_by=__version__,
    )


def _faults(contents: BundleContents) -> Iterator[BundleFault]:
    bundle, folder = contents.bundle, contents.folder
    paths = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    for file in bundle.files:
        if file.path not in paths:
            yield BundleFault(path=file.path, fault="missing")
        elif _digest(folder / file.path) != file.sha256:
            yield BundleFault(path=file.path, fault="changed")
    for name in sorted(paths - {file.path for file in bundle.files} - {BUNDLE_FILE}):
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
    stored_result = read_value(file, Result)
    try:
        recomputed_result = evaluate(folder).result
    except PacelineError as error:
        missing_result = ChangedFigure(
            name="result", stored_value=stored_result.status, recomputed_value=str(error)
        )
        return stored_result, (missing_result,)
    figures = list(_changed_figures(stored_result.metrics, recomputed_result.metrics))
    if record.status in FINAL and stored_result.status != recomputed_result.status:
        figure = ChangedFigure(
            name="status",
            stored_value=stored_result.status,
            recomputed_value=recomputed_result.status,
        )
        figures.insert(0, figure)
    return stored_result, tuple(figures)


def _changed_figures(
    stored_metrics: Mapping[str, Metric], recomputed_metrics: Mapping[str, Metric]
) -> Iterator[ChangedFigure]:
    for name in {**stored_metrics, **recomputed_metrics}:
        ours, theirs = _numbers(stored_metrics.get(name)), _numbers(recomputed_metrics.get(name))
        if not all(map(_equal, ours, theirs)):
            yield ChangedFigure(name=name, stored_value=_text(ours), recomputed_value=_text(theirs))


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
    value, *others = ("-" if number is None else f"{number:.12g}" for number in numbers)
    return f"{value} (n {others[0]}, spread {others[1]}, {others[2]} to {others[3]})"
