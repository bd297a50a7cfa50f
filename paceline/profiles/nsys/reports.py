"""Conversion of Nsight Systems files to SQLite: .qdstrm by its importer, .nsys-rep by `nsys`."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from paceline.core.errors import SystemFaultError, UserError
from paceline.machines.programs import run_program

STREAM, REPORT, DATABASE = ".qdstrm", ".nsys-rep", ".sqlite"
ENDINGS = (DATABASE, REPORT, STREAM)
"""Endings that can be read, in order of preference."""
LIMIT_S = 1800.0
IMPORTER = "QdstrmImporter"


def nsys_program() -> Path | None:
    """Return `nsys` from PATH or next to the interpreter, or None."""
    sibling = Path(sys.executable).with_name("nsys")
    path = shutil.which("nsys") or (str(sibling) if sibling.exists() else None)
    return Path(path) if path else None


def importer_program(nsys: Path) -> Path | None:
    """Return the importer of an `nsys`; Debian installs host and target parts separately."""
    target = nsys.resolve().parent
    hosts = [folder / "host-linux-x64" for folder in (target.parent, *target.parents)]
    hosts += [folder / "nsight-systems/host-linux-x64" for folder in target.parents]
    return next((host / IMPORTER for host in hosts if (host / IMPORTER).is_file()), None)


def reports_of(folder: Path) -> list[Path]:
    """Return the reports of a folder in order, one per rank."""
    report_by_stem: dict[str, Path] = {}
    for ending in reversed(ENDINGS):
        report_by_stem |= {path.stem: path for path in folder.glob(f"*{ending}")}
    return [path for _, path in sorted(report_by_stem.items())]


def database(path: Path, folder: Path) -> Path:
    """Return the SQLite file of a report, exported into `folder` unless it is one already.

    Raises UserError for other files and if `nsys` is missing, SystemFaultError if it fails.
    """
    if path.suffix == DATABASE:
        return path
    if path.suffix not in (STREAM, REPORT):
        raise UserError(str(path), "is not an Nsight Systems report", allowed=", ".join(ENDINGS))
    nsys = nsys_program()
    if nsys is None:
        raise UserError(
            str(path),
            "needs Nsight Systems to be read, but nsys is not in PATH",
            remedy="install it, or read the output of nsys export --type sqlite",
        )
    report = path if path.suffix == REPORT else _import_stream(path, folder, nsys)
    output_file = folder / f"{path.stem}{DATABASE}"
    with _atomic_output(output_file) as part:
        output = f"--output={part}"
        words = ["export", "--type=sqlite", "--force-overwrite=true", output, str(report)]
        _run([str(nsys), *words], report, part)
    return output_file


def _import_stream(path: Path, folder: Path, nsys: Path) -> Path:
    """Return the report of a .qdstrm file, imported into `folder`."""
    importer = importer_program(nsys)
    if importer is None:
        raise UserError(
            str(path),
            f"must be imported, but {IMPORTER} is not next to {nsys}",
            remedy="install the host part of Nsight Systems, or copy the file to a machine with it",
        )
    output_file = folder / f"{path.stem}{REPORT}"
    with _atomic_output(output_file) as part:
        words = ["--force-overwrite", "--input-file", str(path), "--output-file", str(part)]
        _run([str(importer), *words], path, part)
    return output_file


@contextmanager
def _atomic_output(output_file: Path) -> Iterator[Path]:
    """Yield a temporary path that becomes `output_file` when it is complete."""
    try:
        scratch = TemporaryDirectory(prefix=".part-", dir=output_file.parent)
    except OSError as error:
        raise SystemFaultError(str(output_file), f"cannot be written: {error.strerror}") from error
    with scratch as folder:
        part = Path(folder) / output_file.name
        yield part
        part.replace(output_file)


def _run(command: Sequence[str], source: Path, output_file: Path) -> None:
    deadline = time.monotonic() + LIMIT_S

    def check() -> None:
        if time.monotonic() > deadline:
            what = f"took {Path(command[0]).name} more than {LIMIT_S:.0f} s"
            raise SystemFaultError(str(source), what)

    try:
        result = run_program(command, check)
    except OSError as error:
        raise SystemFaultError(command[0], f"cannot be started: {error.strerror}") from error
    if result.returncode or not output_file.is_file():
        lines = (result.stderr or result.stdout).strip().splitlines()
        message = lines[-1] if lines else f"exit code {result.returncode}"
        raise UserError(str(source), f"cannot be read by {Path(command[0]).name}: {message}")
