"""Registry of profilers, and the interface to attach them and read their files."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from paceline.core.job import Job
from paceline.core.run import RunSpec
from paceline.core.training import ToolName
from paceline.profiles.profile import Profile

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
