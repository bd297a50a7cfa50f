"""The command line in a process of its own, forked from one that has its imports behind it.

Tests of what happens before those imports, and of signals, start `python -m paceline` themselves.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LIMIT_S = 900
LIBRARIES = ("numpy", "scipy.stats", "altair", "jinja2", "sqlalchemy", "ruamel.yaml", "rich.table")
WARM_UP = (["devices"], ["recipes"])
"""What reads the files that come with the package, which each process reads once."""
PLAIN = {"COLUMNS": "200", "NO_COLOR": "1"}
ROOT = Path(__file__).parents[1]


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
    words = [str(argument) for argument in arguments]
    with tempfile.TemporaryDirectory() as name:
        given, out, err = streams = [Path(name) / stream for stream in ("in", "out", "err")]
        given.write_text(stdin)
        order = {"words": words, "env": environment, "cwd": str(cwd or Path.cwd()),
                 "streams": [*map(str, streams)]}  # fmt: skip
        server = _server()
        assert server.stdin and server.stdout
        server.stdin.write(json.dumps(order) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())


@functools.cache
def _server() -> subprocess.Popen[str]:
    """The process that has imported everything; it ends with this one."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.command"], cwd=ROOT, text=True,
        env={**os.environ, **PLAIN, "OPENBLAS_NUM_THREADS": "1"},  # no thread may be there to fork
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    atexit.register(server.communicate)
    return server


def _serve() -> None:
    """Fork for every order on standard input, and say each one's exit code."""
    import typer.main

    from paceline import cli

    # Reading the signatures of all verbs takes as long as what most of them do.
    typer.main.get_command = functools.cache(typer.main.get_command)
    verbs = pkgutil.walk_packages(cli.__path__, "paceline.cli.")
    for name in (*LIBRARIES, *(verb.name for verb in verbs)):
        importlib.import_module(name)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # noqa: PTH123
        for words in WARM_UP:
            cli.app(words, standalone_mode=False)
    gc.freeze()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _become(json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _become(order: dict[str, Any]) -> None:
    """Be `python -m paceline`, and end without coming back."""
    signal.alarm(LIMIT_S)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    for number, path in enumerate(order["streams"]):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND if number else os.O_RDONLY)
        os.dup2(file, number)
        os.close(file)
    sys.argv = ["paceline", *order["words"]]
    runpy.run_module("paceline", run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    _serve()
