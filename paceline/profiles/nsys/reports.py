"""Files of Nsight Systems on their way to SQLite: .qdstrm by its importer, .nsys-rep by `nsys`."""

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
"""What can be read; of one rank's files the first of them that is there."""
LIMIT_S = 1800.0
IMPORTER = "QdstrmImporter"


def nsys_program() -> Path | None:
    """`nsys` in PATH, or beside the interpreter; None without it."""
    beside = Path(sys.executable).with_name("nsys")
    path = shutil.which("nsys") or (str(beside) if beside.exists() else None)
    return Path(path) if path else None


def importer_program(nsys: Path) -> Path | None:
    """The importer that belongs to an `nsys`: Debian splits the host's part from the target's."""
    target = nsys.resolve().parent
    hosts = [folder / "host-linux-x64" for folder in (target.parent, *target.parents)]
    hosts += [folder / "nsight-systems/host-linux-x64" for folder in target.parents]
    return next((host / IMPORTER for host in hosts if (host / IMPORTER).is_file()), None)


def reports_of(folder: Path) -> list[Path]:
    """The files of a folder, one a rank, in order."""
    chosen: dict[str, Path] = {}
    for ending in reversed(ENDINGS):
        chosen |= {path.stem: path for path in folder.glob(f"*{ending}")}
    return [path for _, path in sorted(chosen.items())]


def database(path: Path, folder: Path) -> Path:
    """The SQLite file of a report, made in `folder` where it is none yet.

    Raises UserError for another kind of file and where `nsys` is missing, SystemFaultError where it
    fails.
    """
    if path.suffix == DATABASE:
        return path
    if path.suffix not in (STREAM, REPORT):
        raise UserError(str(path), "is no report of Nsight Systems", allowed=", ".join(ENDINGS))
    nsys = nsys_program()
    if nsys is None:
        raise UserError(
            str(path),
            "takes Nsight Systems to read, and nsys is not in PATH",
            remedy="put it there, or read what `nsys export --type sqlite` makes elsewhere",
        )
    report = path if path.suffix == REPORT else _imported(path, folder, nsys)
    made = folder / f"{path.stem}{DATABASE}"
    with _whole(made) as part:
        output = f"--output={part}"
        words = ["export", "--type=sqlite", "--force-overwrite=true", output, str(report)]
        _run([str(nsys), *words], report, part)
    return made


def _imported(path: Path, folder: Path, nsys: Path) -> Path:
    """What `nsys profile` does by itself where it finds its importer."""
    importer = importer_program(nsys)
    if importer is None:
        raise UserError(
            str(path),
            f"has to be imported, and there is no {IMPORTER} beside {nsys}",
            remedy="install the host's part of Nsight Systems too, or copy the file to where it is",
        )
    made = folder / f"{path.stem}{REPORT}"
    with _whole(made) as part:
        words = ["--force-overwrite", "--input-file", str(path), "--output-file", str(part)]
        _run([str(importer), *words], path, part)
    return made


@contextmanager
def _whole(made: Path) -> Iterator[Path]:
    """Where to write what is to be `made`; it is there whole or not at all."""
    try:
        scratch = TemporaryDirectory(prefix=".part-", dir=made.parent)
    except OSError as error:
        raise SystemFaultError(str(made), f"cannot be written: {error.strerror}") from error
    with scratch as folder:
        part = Path(folder) / made.name
        yield part
        part.replace(made)


def _run(command: Sequence[str], source: Path, made: Path) -> None:
    deadline = time.monotonic() + LIMIT_S

    def check() -> None:
        if time.monotonic() > deadline:
            what = f"took {Path(command[0]).name} more than {LIMIT_S:.0f} s"
            raise SystemFaultError(str(source), what)

    try:
        done = run_program(command, check)
    except OSError as error:
        raise SystemFaultError(command[0], f"cannot be started: {error.strerror}") from error
    if done.returncode or not made.is_file():
        lines = (done.stderr or done.stdout).strip().splitlines()
        said = lines[-1] if lines else f"exit code {done.returncode}"
        raise UserError(str(source), f"cannot be read by {Path(command[0]).name}: {said}")
