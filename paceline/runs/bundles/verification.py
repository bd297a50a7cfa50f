"""Verification of a bundle: its files by their digests, and its values by its raw files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline import __version__
from paceline.core.assets import content_digest, plain_path
from paceline.core.bundle import Bundle
from paceline.core.errors import PacelineError, UserError
from paceline.core.value import NonNegativeInt, Value
from paceline.files.archive import first_name, unpack
from paceline.files.documents import open_regular, read_value
from paceline.files.run_folder import RESULT_FILE, current_status, read_record
from paceline.files.temporary import temporary_folder
from paceline.runs.bundles.signature import signer_of
from paceline.runs.bundles.writing import BUNDLE_FILE
from paceline.runs.recomputation import Difference, Recomputation, Unchecked, recompute

FileFault = Literal["changed", "missing", "extra"]


class BundleFault(Value):
    """File that differs from the bundle's file list."""

    path: str
    fault: FileFault


class BundleCheck(Value):
    """Result of the verification of a bundle."""

    bundle: str
    run: str
    sha256: str
    """SHA-256 of all paths and file digests, to compare with the one of the bundle's author."""
    verdict: Literal["intact", "damaged", "values differ", "not signed", "no result"]
    """Result; `no result` means intact files of a run without a result to compare with them."""
    signer: str | None = None
    """Allowed signer who signed the bundle; None if no signature was asked for or found."""
    signature_fault: str | None = None
    """Reason why no allowed signer signed it."""
    n_files: NonNegativeInt
    bytes: NonNegativeInt
    faults: tuple[BundleFault, ...]
    n_values: NonNegativeInt
    """Number of values that were compared with recomputed ones."""
    differences: tuple[Difference, ...]
    unchecked_parts: tuple[Unchecked, ...]
    """Parts that cannot be computed again."""
    raw_files: tuple[str, ...]
    """Files and folders from which everything else follows, taken as they are."""
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


def check_bundle(path: Path, allowed_signers: Path | None = None) -> BundleCheck:
    """Compare the files of a bundle with their digests, and its values with recomputed ones.

    With a file of `allowed_signers`, one of them must have signed it. Raises UserError for a file
    that is not a bundle.
    """
    with open_bundle(path) as contents:
        signer = fault = None
        if allowed_signers:
            with open_regular(contents.folder / BUNDLE_FILE) as file:
                text = file.read().decode("utf-8", "surrogateescape")
            signer, fault = signer_of(text, path, allowed_signers)
        bundle = contents.bundle
        faults = tuple(_damaged_files(contents))
        outcome = Recomputation() if faults else recompute(contents.folder)
        if not faults:
            _compare_file_list(outcome, contents)
        has_result = RESULT_FILE in {file.path for file in bundle.files}
        verdict = "damaged" if faults else "values differ" if outcome.differences else "intact"
        if verdict == "intact":
            verdict = "not signed" if fault else "intact" if has_result else "no result"
        return BundleCheck(
            bundle=str(path),
            run=bundle.run,
            sha256=bundle.sha256,
            verdict=verdict,
            signer=signer,
            signature_fault=fault,
            n_files=len(bundle.files),
            bytes=sum(file.bytes for file in bundle.files),
            faults=faults,
            n_values=outcome.num_values,
            differences=tuple(outcome.differences),
            unchecked_parts=tuple(outcome.unchecked_parts),
            raw_files=outcome.raw_files,
            measured_by=bundle.paceline_version,
            checked_by=__version__,
        )


def _compare_file_list(outcome: Recomputation, contents: BundleContents) -> None:
    """Compare what the file list states about the run with the run's record."""
    try:
        record = read_record(contents.folder)
    except PacelineError:  # The comparison of the run states it.
        return
    file_list = contents.bundle.model_dump(include={"created", "status", "paceline_version"})
    run_fields = {**record.model_dump(include=set(file_list)), "status": current_status(record)}
    outcome.compare(BUNDLE_FILE, file_list, run_fields)


def refuse_damage(contents: BundleContents, path: Path) -> None:
    """Raise UserError if a file of the bundle from `path` differs from the bundle's file list."""
    if any(_damaged_files(contents)):
        remedy = f"list the damaged files with `paceline runs verify {path}`"
        raise UserError(str(path), "is damaged", remedy=remedy)


def _damaged_files(contents: BundleContents) -> Iterator[BundleFault]:
    """Yield the files of an open bundle that differ from its file list."""
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
