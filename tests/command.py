"""The command line in a process of its own, forked from one that has its imports behind it.

Tests of what happens before those imports, and of signals, start `python -m paceline` themselves.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pkgutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests import forks

LIMIT_S = 900
LIBRARIES = ("numpy", "scipy.stats", "altair", "jinja2", "sqlalchemy", "ruamel.yaml", "rich.table")
PROGRAMS = ("paceline.__main__", "paceline.trainer")
"""What is started and never imported."""
WARM_UP = (["recipes"], ["estimate", "llama31-8b", "--device", "H100", "--gpus", "8"])
"""What reads the files that come with the package, which each process reads once."""
PLAIN = {"COLUMNS": "200", "NO_COLOR": "1"}


def paceline(
    *arguments: object,
    runs: Path | None = None,
    cwd: Path | None = None,
    stdin: str = "",
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """What `python -m paceline` printed and its exit code; `env` is added to this process's."""
    environment = {**os.environ, **PLAIN}
    environment.pop("PACELINE_DB", None)
    if runs:
        environment |= {"PACELINE_RUNS": str(runs), "XDG_CACHE_HOME": str(runs / "cache")}
    environment |= env or {}
    words = ["paceline", *map(str, arguments)]
    with tempfile.TemporaryDirectory() as name:
        given, out, err = streams = [Path(name) / stream for stream in ("in", "out", "err")]
        given.write_text(stdin)
        code = forks.run(
            __name__, words, [environment], cwd or Path.cwd(), [*map(str, streams)], LIMIT_S
        )
        return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())


def prepare() -> None:
    """Import all modules, and read what each process reads once."""
    import typer.main

    import paceline as package
    from paceline import cli

    # Reading the signatures of all verbs takes as long as what most of them do.
    typer.main.get_command = functools.cache(typer.main.get_command)
    names = [module.name for module in pkgutil.walk_packages(package.__path__, "paceline.")]
    modules = [name for name in names if not name.endswith("_program")]
    for name in (*LIBRARIES, *(name for name in modules if not name.startswith(PROGRAMS))):
        importlib.import_module(name)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # noqa: PTH123
        for words in WARM_UP:
            cli.app(words, standalone_mode=False)
