"""Python environments of frameworks: one per framework, since their requirements conflict.

By default, an environment also sees the packages of the interpreter that runs Paceline, after its
own. This avoids a second installation of several GB of torch.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from paceline.core.errors import PacelineError, SystemFaultError, UserError
from paceline.core.run import RunSpec
from paceline.core.value import NonNegativeInt, Value
from paceline.files.documents import parse_json, read_value, write_text, write_value
from paceline.files.home import home_path
from paceline.files.programs import run_program

VARIABLE = "PACELINE_ENGINES"
MANIFEST = "paceline.json"
"""Manifest file: the folder is ours. It is completed last; until then it is an empty object."""
SHARED_PACKAGES_FILE = "paceline-shared.pth"
# setuptools' finder would take a question about pip for pip itself, and leave distutils to the
# standard library: torch.compile, which imports setuptools, then fails in this process.
HAS_PIP = PathFinder.find_spec("pip") is not None
"""True if this interpreter has pip; copying pip into each environment takes seconds."""
INSTALL_LIMIT_S = 3600.0
CHECK_LIMIT_S = 300.0
_IMPORT = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
_FREEZE = """
import importlib.metadata as m, json, sys
names = sys.argv[1:]
print(json.dumps({n: m.version(n) for n in names}))
"""


@dataclass(frozen=True)
class Environment:
    """Installed environment of a framework."""

    folder: Path
    versions: dict[str, str]
    """Version by distribution name, for the requested packages."""
    size_bytes: int
    requirements: tuple[str, ...] = ()
    """Pip pins that the environment was created with."""
    isolated: bool = False

    @property
    def python(self) -> Path:
        """Path of the environment's interpreter."""
        return _python(self.folder)


class _Manifest(Value):
    """The manifest of an environment."""

    versions: dict[str, str]
    size_bytes: NonNegativeInt
    requirements: tuple[str, ...]
    isolated: bool


def environments_root() -> Path:
    """Return the folder of all environments: $PACELINE_ENGINES, else in the user's data folder."""
    if folder := os.environ.get(VARIABLE):
        return home_path(VARIABLE, folder).absolute()
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return home_path("XDG_DATA_HOME", data) / "paceline" / "engines"


def own_interpreter() -> str:
    """Return the path of the interpreter that runs Paceline."""
    return sys.executable


def installed(name: str) -> Environment | None:
    """Return the complete environment of an engine, or None."""
    folder = environments_root() / name
    try:
        return Environment(folder, **dict(read_value(folder / MANIFEST, _Manifest)))
    except PacelineError:
        return None


def interpreter(spec: RunSpec) -> str:
    """Return the interpreter for programs of the run's engine.

    The cluster's setting comes first, then the engine's environment, then Paceline's interpreter.
    """
    cluster = spec.cluster
    if cluster.python is None and not cluster.in_container:
        environment = installed(spec.engine)
        if environment is not None:
            return str(environment.python)
    return cluster.interpreter


def not_installed(spec: RunSpec, imports: Sequence[str]) -> str | None:
    """Return what is missing, as `what; remedy`; None if the cluster sets the interpreter."""
    cluster = spec.cluster
    if cluster.python is not None or cluster.in_container or installed(spec.engine):
        return None
    absent = absent_modules(Path(sys.executable), imports)
    if not absent:
        return None
    return (
        f"{', '.join(absent)} cannot be imported; run `paceline recipes engines install "
        f"{spec.engine}`, or set `python` in a cluster file to an interpreter that has it"
    )


def absent_modules(python: Path, imports: Sequence[str]) -> list[str]:
    """Return those of `imports` that the interpreter cannot find, without importing them."""
    program = (
        "import importlib.util as u, sys\n"
        "print('\\n'.join(n for n in sys.argv[1:] if u.find_spec(n.split('.')[0]) is None))"
    )
    output = _query(python, program, *imports)
    return list(imports) if output is None else output.split()


def package_version(python: Path, name: str) -> tuple[int, ...] | None:
    """Return major and minor version of a package of an interpreter; None if it has none."""
    program = "import importlib.metadata as m, sys\nprint(m.version(sys.argv[1]))"
    match = re.match(r"(\d+)\.(\d+)", _query(python, program, name) or "")
    return (int(match[1]), int(match[2])) if match else None


def _query(python: Path, program: str, *arguments: str) -> str | None:
    """Return the output of a short program, None if it fails.

    It finds no modules in the working folder. Interpreters before 3.11 do not have -P.
    """
    program = f"import sys\nsys.path[:] = filter(None, sys.path)\n{program}"
    try:
        result = run_program([str(python), "-c", program, *arguments], limit_s=CHECK_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout if result.returncode == 0 else None


def install(
    name: str,
    requirements: Sequence[str],
    imports: Sequence[str],
    report: Callable[[str], None],
    *,
    extra_arguments: Sequence[str] = (),
    isolated: bool = False,
) -> Environment:
    """Create and check the environment, unless it already exists as requested.

    An incomplete environment is never used, because its manifest is completed last. Raises
    UserError if the folder is something else, and SystemFaultError with pip's error.
    """
    folder, before = environments_root() / name, installed(name)
    if before and (before.requirements, before.isolated) == (tuple(requirements), isolated):
        return before
    with _lock(folder):
        now = installed(name)
        if now and now != before and now.requirements == tuple(requirements):
            return now  # created by another process in the meantime
        _clear(folder)
        try:
            return _create(folder, requirements, imports, report, extra_arguments, isolated)
        except BaseException:  # an interrupt must not leave a partial environment
            shutil.rmtree(folder, ignore_errors=True)
            raise


def _create(
    folder: Path,
    requirements: Sequence[str],
    imports: Sequence[str],
    report: Callable[[str], None],
    extra_arguments: Sequence[str],
    isolated: bool,
) -> Environment:
    report(f"creating {folder}")
    try:
        folder.mkdir()
        write_text(folder / MANIFEST, "{}\n")  # marks the folder as ours while it is incomplete
        venv.create(folder, with_pip=not HAS_PIP, symlinks=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemFaultError(str(folder), f"cannot be created: {error}") from error
    if not isolated:
        _share_packages(folder)
    report(f"installing {' '.join(requirements)}")
    _run([*_pip(folder), "install", *extra_arguments, *requirements], folder, INSTALL_LIMIT_S)
    report(f"importing {', '.join(imports)}")
    _run([str(_python(folder)), "-P", "-c", _IMPORT, *imports], folder, CHECK_LIMIT_S)
    names = [requirement.partition("==")[0].partition("[")[0] for requirement in requirements]
    text = _run([str(_python(folder)), "-P", "-c", _FREEZE, *names], folder, 60.0)
    try:
        versions = parse_json(text)
    except ValueError as error:
        raise SystemFaultError(str(folder), f"its interpreter prints no JSON: {error}") from error
    manifest = _Manifest(
        versions=versions,
        size_bytes=_size_bytes(folder),
        requirements=tuple(requirements),
        isolated=isolated,
    )
    write_value(folder / MANIFEST, manifest)
    return Environment(folder, **dict(manifest))


def remove(name: str) -> bool:
    """Remove an environment, even if incomplete; return whether it existed.

    Raises UserError if the folder is something else, and SystemFaultError if it cannot be removed.
    """
    folder = environments_root() / name
    if not folder.exists():
        return False
    with _lock(folder):
        _clear(folder)
    return True


def _clear(folder: Path) -> None:
    """Remove an environment; raise UserError for a folder that was not created as one."""
    is_ours = not folder.is_symlink() and (folder / MANIFEST).is_file()
    if folder.exists() and not is_ours and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            str(folder),
            f"has no {MANIFEST}, so it is not an environment that Paceline installed",
            remedy=f"move it away, or use another folder in {VARIABLE}",
        )
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        raise SystemFaultError(str(folder), f"cannot be removed: {error.strerror}") from error


@contextmanager
def _lock(folder: Path) -> Generator[None]:
    """Let one process at a time create or remove an environment; others wait."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = (folder.parent / f".{folder.name}.lock").open("w")
    except OSError as error:
        raise SystemFaultError(str(folder), f"cannot be created: {error.strerror}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _pip(folder: Path) -> list[str]:
    """Return the pip command for an environment: this interpreter's pip, else its own."""
    outer_pip = [sys.executable, "-P", "-m", "pip", "--python", str(_python(folder))]
    return [
        *(outer_pip if HAS_PIP else [str(_python(folder)), "-P", "-m", "pip"]),
        "--disable-pip-version-check",
    ]


def _share_packages(folder: Path) -> None:
    """Add this interpreter's packages to the environment, after its own."""
    shared_packages = sysconfig.get_paths()["purelib"]
    major, minor = sys.version_info[:2]
    packages = folder / "lib" / f"python{major}.{minor}" / "site-packages"
    write_text(packages / SHARED_PACKAGES_FILE, f"{shared_packages}\n")


def _run(command: list[str], folder: Path, limit_s: float) -> str:
    """Return a command's output; raise SystemFaultError with the end of its error output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        result = run_program(command, env=environment, limit_s=limit_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SystemFaultError(str(folder), f"`{' '.join(command)[:200]}`: {error}") from error
    if result.returncode:
        lines = [line for line in (result.stderr or result.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-3:]
        raise SystemFaultError(
            str(folder),
            f"`{' '.join(command)[:200]}` failed: {' | '.join(errors)[:500]}",
        )
    return result.stdout


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _size_bytes(folder: Path) -> int:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files)
