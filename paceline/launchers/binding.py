"""A job whose ranks bind themselves before their program starts, whoever launches them."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path

from paceline.core.binding import parse_bind_file
from paceline.core.run import Job
from paceline.errors import UserError

BIND_PROGRAM, BIND_FILE = "bind.py", "bind.json"


def bound(job: Job) -> Job:
    """`job` with the binding that its cluster asks for; itself without one.

    Raises UserError when the file of the binding cannot be read or has too few ranks.
    """
    if job.cluster is None or job.cluster.bind == "none":
        return job
    program = (resources.files("paceline.launchers") / BIND_PROGRAM).read_text(encoding="utf-8")
    files = {**job.files, BIND_PROGRAM: program}
    wish = "cpu" if job.cluster.device == "cpu" else "cuda"
    if job.cluster.bind != "auto":
        wish = BIND_FILE
        entries = _entries(Path(job.cluster.bind), job.devices_per_node)
        files[BIND_FILE] = json.dumps(entries, indent=2) + "\n"
    return replace(job, program=(BIND_PROGRAM, wish, *job.program), files=files)


def _entries(path: Path, ranks: int) -> list[dict[str, str | None]]:
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--bind {path}", f"cannot be read: {error}") from error
    entries = parse_bind_file(text, str(path))
    if len(entries) < ranks:
        raise UserError(str(path), f"has cores for {len(entries)} local ranks of {ranks}")
    return entries
