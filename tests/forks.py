"""Programs started as forks of a process that has imported what they need.

    python -m tests.forks MODULE

imports MODULE, calls its `prepare`, and then runs an order after the other from standard input.
New interpreters spend most of their time with the same imports.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# No thread may be there to be forked.
SERVER_ENV = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "200",
    "NO_COLOR": "1",
}
_idle: defaultdict[str, list[subprocess.Popen[str]]] = defaultdict(list)
"""Servers that wait for an order, by the module that they have imported."""


def run(
    prepared: str,
    words: Sequence[str],
    envs: Sequence[Mapping[str, str]],
    cwd: Path,
    streams: Sequence[str],
    limit_s: int,
) -> int:
    """Start `words` once for each environment; 0, or the code of the first that failed.

    The first word is a module or the path of a program; `streams` are files for standard input,
    output and errors. When one fails the others are terminated, as launchers do it. Orders of
    several threads run at the same time, each by a server of its own.
    """
    server = _idle[prepared].pop() if _idle[prepared] else _server(prepared)
    assert server.stdin and server.stdout
    order = {"words": list(words), "cwd": str(cwd), "envs": [dict(env) for env in envs],
             "streams": list(streams), "limit_s": limit_s}  # fmt: skip
    server.stdin.write(json.dumps(order) + "\n")
    server.stdin.flush()
    code = int(server.stdout.readline())
    _idle[prepared].append(server)
    return code


def _server(prepared: str) -> subprocess.Popen[str]:
    """The process that has imported everything; it ends with this one."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.forks", prepared], cwd=ROOT, text=True,
        env={**os.environ, **SERVER_ENV}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    atexit.register(server.communicate)
    return server


def _serve(prepared: str) -> None:
    """Fork for every order, and say its exit code."""
    importlib.import_module(prepared).prepare()
    gc.freeze()
    for line in sys.stdin:
        order = json.loads(line)
        children: list[int] = []
        for env in order["envs"]:
            children.append(os.fork())
            if children[-1] == 0:
                _become(order, env)
        print(_wait(children), flush=True)


def _wait(children: list[int]) -> int:
    """Wait for all; the first exit code that is not 0, a signal as a negative one."""
    first = 0
    while children:
        child, status = os.wait()
        children.remove(child)
        code = os.waitstatus_to_exitcode(status)
        if code and not first:
            first = code
            for other in children:
                os.kill(other, signal.SIGTERM)
    return first


def _become(order: dict[str, Any], env: dict[str, str]) -> None:
    """Be the program, and end without coming back."""
    signal.alarm(order["limit_s"])
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(env)
    for number, path in enumerate(order["streams"]):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND if number else os.O_RDONLY)
        os.dup2(file, number)
        os.close(file)
    program, *sys.argv[1:] = order["words"]
    sys.argv[0] = program
    if program.endswith(".py"):
        sys.path[0] = str(Path(program).parent)
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    _serve(sys.argv[1])
