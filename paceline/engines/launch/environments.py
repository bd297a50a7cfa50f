"""Environments of frameworks: each has its own, since what they require conflicts.

By default an environment sees the packages of the interpreter that runs Paceline behind its own:
a torch of several GB is not installed a second time.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.core.errors import SystemFaultError
from paceline.core.run import RunSpec
from paceline.files.documents import write_text
from paceline.files.home import home_path

VARIABLE = "PACELINE_ENGINES"
MANIFEST = "paceline.json"
"""Written last: an environment without it was never finished."""
SHARED = "paceline-shared.pth"
OWN_PIP = importlib.util.find_spec("pip") is not None
"""Whether this interpreter has a pip; copying one into each environment takes seconds."""
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
    """An installed environment."""

    folder: Path
    versions: dict[str, str]
    """What was asked for, by the name of its distribution."""
    size_bytes: int
    requirements: tuple[str, ...] = ()
    """The pins of pip that it was made by."""
    isolated: bool = False

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return _python(self.folder)


def environments_root() -> Path:
    """Where environments lie: $PACELINE_ENGINES, else in the user's data folder."""
    if named := os.environ.get(VARIABLE):
        return home_path(VARIABLE, named).absolute()
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return home_path("XDG_DATA_HOME", data) / "paceline" / "engines"


def own_interpreter() -> str:
    """The interpreter that runs Paceline."""
    return sys.executable


def installed(name: str) -> Environment | None:
    """The finished environment of an engine, None where there is none."""
    folder = environments_root() / name
    try:
        document = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return Environment(
            folder,
            dict(document["versions"]),
            int(document["size_bytes"]),
            tuple(document["requirements"]),
            bool(document["isolated"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def interpreter(spec: RunSpec) -> str:
    """What runs the programs of the run's engine.

    The cluster's own word first, then the engine's environment, else what runs Paceline.
    """
    cluster = spec.cluster
    if cluster.python is None and not cluster.in_container:
        environment = installed(spec.engine)
        if environment is not None:
            return str(environment.python)
    return cluster.interpreter


def not_installed(spec: RunSpec, imports: Sequence[str]) -> str | None:
    """What a start would lack, as `what; remedy`; None where the cluster says what runs there."""
    cluster = spec.cluster
    if cluster.python is not None or cluster.in_container or installed(spec.engine):
        return None
    absent = absent_modules(Path(sys.executable), imports)
    if not absent:
        return None
    return (
        f"{', '.join(absent)} cannot be imported; `paceline engines install {spec.engine}` makes "
        "an environment that has it, and `python` of a cluster file names another interpreter"
    )


def absent_modules(python: Path, imports: Sequence[str]) -> list[str]:
    """Those of `imports` that the interpreter cannot find, without importing them."""
    program = (
        "import importlib.util as u, sys\n"
        "print('\\n'.join(n for n in sys.argv[1:] if u.find_spec(n.split('.')[0]) is None))"
    )
    done = subprocess.run(
        [str(python), "-c", program, *imports],
        capture_output=True,
        text=True,
        timeout=CHECK_LIMIT_S,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout.split() if done.returncode == 0 else list(imports)


def install(
    name: str,
    requirements: Sequence[str],
    imports: Sequence[str],
    tell: Callable[[str], None],
    *,
    extra_arguments: Sequence[str] = (),
    isolated: bool = False,
) -> Environment:
    """Make the environment and check it, unless it is there as asked for.

    Nothing half-made is ever taken for one: its manifest is written last. Raises SystemFaultError
    with what pip said.
    """
    folder, before = environments_root() / name, installed(name)
    if before and (before.requirements, before.isolated) == (tuple(requirements), isolated):
        return before
    with _locked(folder):
        now = installed(name)
        if now and now != before and now.requirements == tuple(requirements):
            return now  # another process has just made it
        try:
            return _made(folder, requirements, imports, tell, extra_arguments, isolated)
        except BaseException:  # an interrupt too must leave no half-made environment behind
            shutil.rmtree(folder, ignore_errors=True)
            raise


def _made(
    folder: Path,
    requirements: Sequence[str],
    imports: Sequence[str],
    tell: Callable[[str], None],
    extra_arguments: Sequence[str],
    isolated: bool,
) -> Environment:
    _clear(folder)
    tell(f"making {folder}")
    try:
        venv.create(folder, with_pip=not OWN_PIP, symlinks=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemFaultError(str(folder), f"cannot be made: {error}") from error
    if not isolated:
        _share_packages(folder)
    tell(f"installing {' '.join(requirements)}")
    _call([*_pip(folder), "install", *extra_arguments, *requirements], folder, INSTALL_LIMIT_S)
    tell(f"importing {', '.join(imports)}")
    _call([str(_python(folder)), "-c", _IMPORT, *imports], folder, CHECK_LIMIT_S)
    names = [requirement.partition("==")[0].partition("[")[0] for requirement in requirements]
    versions = json.loads(_call([str(_python(folder)), "-c", _FREEZE, *names], folder, 60.0))
    made = Environment(folder, versions, _size_bytes(folder), tuple(requirements), isolated)
    document = {name: value for name, value in asdict(made).items() if name != "folder"}
    write_text(folder / MANIFEST, json.dumps(document, indent=2) + "\n")
    return made


def remove(name: str) -> bool:
    """Take an environment away, half-made ones too; whether there was any.

    Raises SystemFaultError where it cannot be taken away.
    """
    folder = environments_root() / name
    if not folder.exists():
        return False
    with _locked(folder):
        _clear(folder)
    return True


def _clear(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        raise SystemFaultError(str(folder), f"cannot be removed: {error.strerror}") from error


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    """One process at a time makes or removes an environment; the others wait."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = (folder.parent / f".{folder.name}.lock").open("w")
    except OSError as error:
        raise SystemFaultError(str(folder), f"cannot be made: {error.strerror}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _pip(folder: Path) -> list[str]:
    """The pip that installs into an environment: this interpreter's, else one of its own."""
    own = [sys.executable, "-m", "pip", "--python", str(_python(folder))]
    return [
        *(own if OWN_PIP else [str(_python(folder)), "-m", "pip"]),
        "--disable-pip-version-check",
    ]


def _share_packages(folder: Path) -> None:
    """Let the environment see this interpreter's packages, behind its own."""
    here = sysconfig.get_paths()["purelib"]
    major, minor = sys.version_info[:2]
    packages = folder / "lib" / f"python{major}.{minor}" / "site-packages"
    write_text(packages / SHARED, f"{here}\n")


def _call(command: list[str], folder: Path, limit_s: float) -> str:
    """What a command prints; raises SystemFaultError with the end of what it said."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=limit_s,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SystemFaultError(str(folder), f"`{' '.join(command)[:200]}`: {error}") from error
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-3:]
        raise SystemFaultError(
            str(folder),
            f"`{' '.join(command)[:200]}` failed: {' | '.join(errors)[:500]}",
        )
    return done.stdout


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _size_bytes(folder: Path) -> int:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files)
