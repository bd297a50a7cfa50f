"""`paceline reproduce`: repeat a published benchmark from nothing to a result."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated

import typer

from paceline.cli import options
from paceline.cli.host_options import Hosts, Nodes
from paceline.cli.options import Panel
from paceline.cli.output import TableOptions, emit
from paceline.cli.reproduce_report import Reproduction, StepState, reproduction_document
from paceline.cli.terminal import echo
from paceline.core.errors import EXIT_GATE_FAILED, EXIT_INCOMPLETE, EXIT_OK, UserError
from paceline.core.interrupts import deferred_interrupts
from paceline.core.text import one_line
from paceline.core.value import Value
from paceline.files.documents import read_value, write_value
from paceline.files.run_folder import runs_root
from paceline.files.studies import StudyPart, load_study, study_names

LAUNCHES = (("run",), ("sweep",), ("scale",), ("mlperf", "run"))
"""Commands that start training. They get the options for hosts and settings."""
RESUMED_BY_NAME = ("sweep", "scale", "mlperf")
"""Commands that resume what has the same name."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,80}")
DONE = (EXIT_OK, EXIT_GATE_FAILED)
"""Exit codes of a finished step. A run that is slower than the published figure is finished."""


class StudyRecord(Value):
    """Commands of a reproduction that have finished, in reproduce/NAME.json of the runs folder."""

    schema_version: int = 1
    study: str
    finished: tuple[str, ...] = ()


@dataclass(frozen=True)
class LaunchOptions:
    """Options that every command that starts training gets."""

    hosts: str | None
    nodes: int | None
    cluster: str | None
    overrides: Sequence[str]

    def words(self, part: StudyPart) -> Iterator[str]:
        """Yield the options, with the cluster of the published results by default."""
        values = {"--hosts": self.hosts, "--nodes": self.nodes}
        values["--cluster"] = self.cluster or part.cluster
        for name, value in values.items():
            if value is not None:
                yield from (name, str(value))
        for change in self.overrides:
            yield from ("--set", change)


def reproduce(
    study: Annotated[
        str,
        typer.Argument(help=f"Benchmark: {', '.join(study_names())}.", metavar="BENCHMARK"),
    ],
    benchmark: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Benchmark of mlperf; default: llama31-8b."),
    ] = None,
    tiny: Annotated[
        bool,
        typer.Option("--tiny", help="Use small models on this machine."),
    ] = False,
    steps: Annotated[
        str | None,
        typer.Option(
            metavar="1,3-5",
            help="Run only these steps.",
            rich_help_panel=Panel.limits,
        ),
    ] = None,
    hosts: Hosts = None,
    nodes: Nodes = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Cluster; default: the published one.",
            rich_help_panel=Panel.hosts,
        ),
    ] = None,
    overrides: options.Overrides = None,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Name of the results; a new name measures again.",
            rich_help_panel=Panel.output,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="List steps, sizes and manual work."),
    ] = False,
    html: options.Html = None,
    runs_dir: options.RunsDir = None,
    *,
    output: TableOptions,
) -> None:
    """Repeat a published benchmark: stage, launch, and compare with the published figures.

    Each step is a command that could be typed by hand. The same command resumes.

    Examples:

      paceline reproduce lambda --dry-run

      paceline reproduce lambda --hosts hosts.txt

      paceline reproduce mlperf --benchmark llama2-70b-lora
    """
    definition = load_study(study, benchmark)
    part = definition.tiny if tiny else definition.full
    default = next(iter(definition.benchmarks), None)
    part_words = ("reproduce", study, benchmark if benchmark != default else "", "tiny" * tiny)
    name = name or "-".join(filter(None, part_words))
    if not NAME.fullmatch(name):
        raise UserError(f"--name {name}", "is not a name", allowed="letters, digits, . _ and -")
    if nodes is not None and any(
        "--nodes" in words for step in part.steps for words in step.commands
    ):
        raise UserError(
            "--nodes",
            f"has no effect: the steps of {study} state their nodes",
            remedy="use --steps",
        )
    root = runs_root(runs_dir)
    where = LaunchOptions(hosts, nodes, cluster, overrides or ())
    file = root / "reproduce" / f"{name}.json"
    selection = _step_numbers(steps, sum(len([*step.commands]) for step in part.steps))
    failed = None
    with nullcontext() if dry_run else _exclusive_lock(file) as lock:
        record = read_value(file, StudyRecord) if file.is_file() else StudyRecord(study=study)
        states = list(_states(part, where, name, record))
        for state in states:
            if lock is None or state.number not in selection or state.finished:
                continue
            code = _run(state, root, lock)
            if code not in DONE:
                failed = state
                break
            finished = (*record.finished, one_line(state.command))
            record = record.model_copy(update={"finished": finished})
            write_value(file, record)
        states = list(_states(part, where, name, record))
    reproduction = Reproduction(
        study=definition,
        part=part,
        tiny=tiny,
        name=name,
        steps=tuple(states),
        root=root,
        dry_run=dry_run,
    )
    document = reproduction_document(reproduction)
    emit(document, output.output_format, page=html)
    if failed:
        echo(
            f"error: step {failed.number} failed: {failed.command}; the same command resumes",
            err=True,
        )
    if not dry_run and not all(state.finished for state in states):
        raise typer.Exit(EXIT_INCOMPLETE)


def _states(
    part: StudyPart, where: LaunchOptions, name: str, record: StudyRecord
) -> Iterator[StepState]:
    """Yield every command of a study with its options and whether it has finished."""
    number = 0
    for step in part.steps:
        for words in step.commands:
            number += 1
            words = [*words, *_options(words, part, where, f"{name}-{number}", name)]
            state = StepState(number, step.about, tuple(words), step.size)
            yield state.with_end(one_line(state.command) in record.finished)


def _options(
    words: list[str], part: StudyPart, where: LaunchOptions, name: str, tag: str
) -> Iterator[str]:
    """Yield the options of hosts, settings and names that a command gets."""
    if not any(tuple(words[: len(launch)]) == launch for launch in LAUNCHES):
        return
    yield from where.words(part)
    if words[0] in RESUMED_BY_NAME:
        yield from ("--name", name)
    if words[0] != "mlperf":
        yield from ("--tag", tag)


def _step_numbers(text: str | None, count: int) -> set[int]:
    """Return the numbers in `1,3-5`, or all."""
    if text is None:
        return set(range(1, count + 1))
    numbers: set[int] = set()
    for word in text.split(","):
        first, dash, last = word.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()) or int(first) > int(last):
            raise UserError(f"--steps {text}", "is not a list of numbers", allowed="1,3-5")
        for number in (int(first), int(last)):
            if not 1 <= number <= count:
                raise UserError(f"--steps {text}", f"has no step {number}", allowed=f"1 to {count}")
        numbers |= set(range(int(first), int(last) + 1))
    return numbers


@contextmanager
def _exclusive_lock(file: Path) -> Generator[IO[str]]:
    """Hold the lock of a reproduction; raise UserError if another process does.

    The commands inherit it, so that one which outlives this process is not started again.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                file.stem,
                "is being reproduced by another process",
                remedy="wait until it ends, or choose another --name",
            ) from error
        yield lock


def _run(state: StepState, root: Path, lock: IO[str]) -> int:
    """Run a command as a process of its own; its output goes to standard error.

    It is in a process group of its own and gets each interrupt once, also one that was sent to
    this process alone.
    """
    echo(f"\n[{state.number}] {state.command}", err=True)
    sys.stderr.flush()
    process: subprocess.Popen[bytes] | None = None
    try:
        with deferred_interrupts():
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "paceline", *state.words],
                env={**os.environ, "PACELINE_RUNS": str(root.absolute())},
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                process_group=0,
                pass_fds=(lock.fileno(),),
            )
        return process.wait()
    except KeyboardInterrupt:
        if process is not None:
            process.send_signal(signal.SIGINT)
            process.wait()
        raise
