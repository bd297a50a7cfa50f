"""Registry of profilers, and the interface to attach them to a job and read their files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from paceline.core.job import Job
from paceline.core.run import RunSpec
from paceline.core.training import PROFILES_FOLDER, ToolName
from paceline.profiles.profile import Profile

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


TOOLS: dict[ToolName, str] = {
    "torch": "torch_traces",
    "nsys": "nsys.tool",
    "nccl": "nccl_logs",
    "memory": "memory_curves",
}
"""Modules of the tools in this folder. A run has one tool, because they disturb each other."""


class Tool(Protocol):
    """Interface of a tool's module. The `profile` of each spec is set."""

    def unsupported(self, spec: RunSpec) -> str | None:
        """Return why the tool cannot be attach to such a run, or None."""
        ...

    def attach(self, job: Job, spec: RunSpec) -> Job:
        """Return the job with the tool's environment, files and command around the program.

        The tool writes its files to PROFILES_FOLDER on the ranks `spec.profile.ranks`. The native
        trainer gets `spec.profile` through its settings.
        """
        ...

    def read(self, folder: Path) -> Profile:
        """Return the profile of a run folder; raises UserError if files cannot be read."""
        ...

    def read_file(self, path: Path) -> Profile:
        """Return the profile of a file or a folder from elsewhere."""
        ...


def tool(name: ToolName) -> Tool:
    """Return the tool called `name`, one of TOOLS."""
    return cast(Tool, import_module(f"{__package__}.{TOOLS[name]}"))
