"""Import of archives as runs: a bundle unchanged, any other archive by its training logs."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.core.bundle import Bundle
from paceline.core.errors import SystemFaultError, UserError
from paceline.core.run_report import RunReport
from paceline.core.units import pluralize
from paceline.files.archive import unpack
from paceline.files.documents import read_json
from paceline.files.index import Index
from paceline.files.run_folder import new_folder, run_folders
from paceline.files.temporary import temporary_folder
from paceline.logs.facts import UserSettings
from paceline.logs.parser import log_files, parse_log
from paceline.runs.bundles.verification import BundleContents, open_bundle, refuse_damage
from paceline.runs.bundles.writing import BUNDLE_FILE
from paceline.runs.log_import import import_log
from paceline.runs.logged_run import RUN_STATUS
from paceline.runs.outcome import evaluate


@dataclass(frozen=True)
class ImportedArchive:
    """Result of the import of an archive."""

    reports: tuple[RunReport, ...]
    left_out: tuple[str, ...]
    """Skipped logs and links, each as `file: reason`."""
    passed_over: int
    """Number of files that are not training logs."""


def import_bundle(path: Path, root: Path, reimport: bool) -> RunReport:
    """Store a bundle's run under `root` unchanged, without recomputing its figures.

    Raises UserError for a damaged bundle, and for one that was imported before, unless
    `reimport` is set.
    """
    with open_bundle(path) as contents:
        refuse_damage(contents, path)
        before = None if reimport else _imported_before(root, contents.bundle)
        if before is not None:
            raise UserError(
                str(path),
                f"was imported as {before.name}",
                remedy="import it again with --reimport",
            )
        return _store(contents, root)


def _store(contents: BundleContents, root: Path) -> RunReport:
    """Copy the bundle's run to a new folder under `root`, completely or not at all."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with temporary_folder(root) as hidden:
            copy = shutil.copytree(contents.folder, Path(hidden) / contents.bundle.run)
            folder = new_folder(root, contents.bundle.run)
            try:
                copy.rename(folder)
                report = evaluate(folder)
                Index.open(root).add(folder, report.result)
            except BaseException:  # including an interrupt
                shutil.rmtree(folder, ignore_errors=True)
                raise
        return report
    except OSError as error:
        raise SystemFaultError(str(root), f"cannot be written: {error}") from error


def import_archive(
    path: Path,
    user: UserSettings,
    root: Path,
    command: list[str],
    *,
    tag: str | None,
    reimport: bool,
) -> ImportedArchive:
    """Store every training log of an archive as a run under `root`, as `import_log` does.

    Links in the archive are skipped. Raises UserError for a file that is not an archive, and for
    an archive without a training log.
    """
    user.check()
    reports: list[RunReport] = []
    with temporary_folder() as name:
        place = Path(name)
        archive = unpack(path, place, skip_links=True)
        left_out = [f"{link}: is a link" for link in archive.skipped_links]
        passed_over = 0
        for file in log_files([place]):
            relative_path = file.relative_to(place).as_posix()
            if parse_log(file, user, one_of_many=True).document.status not in RUN_STATUS:
                passed_over += 1
                continue
            try:
                report = import_log(file, user, root, command, tag=tag, reimport=reimport)
                reports.append(replace(report, command=relative_path))
            except UserError as error:
                left_out.append(f"{relative_path}: {error.what}")
    if not reports and len(left_out) == len(archive.skipped_links):
        raise UserError(str(path), f"contains no training log ({pluralize(passed_over, 'file')})")
    return ImportedArchive(tuple(reports), tuple(left_out), passed_over)


def _imported_before(root: Path, bundle: Bundle) -> Path | None:
    return next(
        (f for f in run_folders(root) if read_json(f / BUNDLE_FILE).get("sha256") == bundle.sha256),
        None,
    )
