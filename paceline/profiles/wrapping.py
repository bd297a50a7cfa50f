"""Jobs with a tool around the program of chosen ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from paceline.core.job import Job
from paceline.core.training import PROFILES_FOLDER

PROGRAM = Path(__file__).with_name("rank_program.py")
PROGRAM_FILE = "profiled_rank.py"
SETTINGS_FILE = f"{PROFILES_FOLDER}/tool.json"


def wrap_ranks(
    job: Job,
    ranks: Sequence[int],
    *,
    env: Mapping[str, str] | None = None,
    before: Sequence[str] = (),
    before_first: Sequence[str] = (),
    files: Mapping[str, str] | None = None,
) -> Job:
    """Return the job with variables and a command before its program on some ranks.

    See `rank_program`. `before_first` are further words on the first rank of each host, `files` the
    files that they need.
    """
    settings = {
        "ranks": None if job.launches_once else sorted(ranks),
        "env": dict(env or {}),
        "before": [*before],
        "before_first": [*before_first],
    }
    wrapper_files = {
        PROGRAM_FILE: PROGRAM.read_text(encoding="utf-8"),
        SETTINGS_FILE: json.dumps(settings, indent=2) + "\n",
    }
    program = (PROGRAM_FILE, SETTINGS_FILE, *job.program)
    return replace(job, program=program, files={**job.files, **(files or {}), **wrapper_files})
