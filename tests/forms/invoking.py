"""The command line, called in this process on copies of the recorded inputs."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict

from ruamel.yaml import YAML

from tests.forms.neutral import Neutral, kinds

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
MACHINE = "machine"
"""The group of commands that describe this machine: of their answers only the keys are equal."""


class Form(TypedDict):
    """What a script sees of one command."""

    exit: int
    stdout: Any
    """The document where it is JSON, else the lines."""
    stderr: list[str]


def load_cases() -> dict[str, dict[str, str]]:
    """By group and name, the command lines without the word `paceline`."""
    return YAML(typ="safe").load(FOLDER / "cases.yaml")


def forms(cases: dict[str, dict[str, str]], work: Path) -> dict[str, dict[str, Form]]:
    """What all commands print, by group and name, called one after the other in folder `work`.

    Everything in the environment that could move an answer is replaced, hence for a process that
    does nothing else.
    """
    shutil.copytree(FOLDER / "inputs", work, dirs_exist_ok=True)
    shutil.copytree(FOLDER / "runs", work / "runs")
    os.chdir(work)
    _isolate(work)
    from paceline import __version__

    neutral = Neutral.of_this_machine(work, ROOT, __version__)
    return {
        group: {
            name: form(shlex.split(line), neutral, whole=group != MACHINE)
            for name, line in lines.items()
        }
        for group, lines in cases.items()
    }


def form(argv: list[str], neutral: Neutral, whole: bool = True) -> Form:
    """What one command prints, and its exit code; its keys alone unless `whole`."""
    code, stdout, stderr = _invoke(argv)
    try:
        document = neutral.value(json.loads(stdout))
    except json.JSONDecodeError:
        document = neutral.lines(stdout)
    return {
        "exit": code,
        "stdout": document if whole else kinds(document),
        "stderr": neutral.lines(stderr) if whole else [],
    }


def _isolate(work: Path) -> None:
    """Hides caches, calibrations, schedulers and settings of the user, and all cores but two."""
    show_two_cores()
    kept = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    folders = {name: str(work / name.lower()) for name in ("HOME", "TMPDIR", "PATH")}
    xdg = {f"XDG_{name}_HOME": str(work / name.lower()) for name in ("CACHE", "DATA", "CONFIG")}
    os.environ.clear()
    os.environ.update(kept | folders | xdg)
    os.environ.update(
        COLUMNS="100",
        NO_COLOR="1",
        TERM="dumb",
        TZ="UTC",
        LANG="C.UTF-8",
        PACELINE_RUNS=str(work / "runs"),
        CUDA_VISIBLE_DEVICES="",
    )
    for folder in folders.values():
        Path(folder).mkdir()


def show_two_cores() -> None:
    """Also where this process may use one only: a plan rightly says that its ranks share it."""
    usable = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, usable)
    cores = {*usable, usable[0] + 1} if len(usable) < 2 else set(usable)
    os.sched_getaffinity = lambda pid: cores


def _invoke(argv: list[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `paceline argv`."""
    from paceline.cli import main

    with _streams() as (stdout, stderr):
        sys.argv = ["paceline", *argv]
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        else:
            code = 0
    return code, stdout.getvalue(), stderr.getvalue()


@contextlib.contextmanager
def _streams() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    """Standard output and error for as long as this lasts; standard input is empty."""
    stdin, sys.stdin = sys.stdin, io.StringIO()
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()) as stdout,
            contextlib.redirect_stderr(io.StringIO()) as stderr,
        ):
            yield stdout, stderr
    finally:
        sys.stdin = stdin
