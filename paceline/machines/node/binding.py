"""CPU binding of a job: ranks bind themselves before their program starts, under any launcher."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path

from paceline.core.binding import parse_bind_file
from paceline.core.errors import UserError, unreadable
from paceline.core.job import Job
from paceline.core.units import pluralize
from paceline.files.home import home_path
from paceline.machines.node.bind import Core, cpu_text

BIND_PROGRAM, BIND_FILE = "bind.py", "bind.json"


def with_binding(job: Job) -> Job:
    """Return `job` with the binding that its cluster requests; unchanged if it requests none.

    Raises UserError if the binding file cannot be read or has too few ranks.
    """
    if job.cluster is None or job.cluster.bind == "none":
        return job
    if job.cluster.bind != "auto":
        return _with_bind_file(job, _entries(Path(job.cluster.bind), job.ranks_per_node))
    return _with_bind(job, "cpu" if job.cluster.device == "cpu" else "cuda", {})


def bind_to_cores(job: Job, shares: Sequence[Sequence[Core]]) -> Job:
    """Return `job` with its local ranks bound to these cores, whatever its cluster requests."""
    entries = [
        {"cores": cpu_text(thread for core in share for thread in core), "nic": None}
        for share in shares
    ]
    return _with_bind_file(job, entries)


def _with_bind_file(job: Job, entries: Sequence[Mapping[str, str | None]]) -> Job:
    return _with_bind(job, BIND_FILE, {BIND_FILE: json.dumps(entries, indent=2) + "\n"})


def _with_bind(job: Job, mode: str, extra_files: Mapping[str, str]) -> Job:
    program = (resources.files("paceline.machines.node") / BIND_PROGRAM).read_text(encoding="utf-8")
    files = {**job.files, BIND_PROGRAM: program, **extra_files}
    earlier = job.program[2:] if job.program[0] == BIND_PROGRAM else job.program
    return replace(job, program=(BIND_PROGRAM, mode, *earlier), files=files)


def _entries(path: Path, ranks: int) -> list[dict[str, str | None]]:
    try:
        text = home_path("--bind", str(path)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(f"--bind {path}", error) from error
    entries = parse_bind_file(text, str(path))
    if len(entries) < ranks:
        raise UserError(
            str(path), f"has cores for {pluralize(len(entries), 'local rank')} of {ranks}"
        )
    return entries
