"""Profilers by name: how each is attached to a run's program, and how its files are read."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from paceline.core.job import Job
from paceline.core.profiling import ToolName
from paceline.core.run import RunSpec
from paceline.profiles.profile import Profile

TOOLS: dict[ToolName, str] = {
    "torch": "torch_traces",
    "nsys": "nsys.tool",
    "nccl": "nccl_logs",
    "memory": "memory_curves",
}
"""Each with its module in this folder; runs have one tool, for each disturbs the others."""


class Tool(Protocol):
    """What the module of a tool offers. A spec that it is given has its `profile` set."""

    def unsupported(self, spec: RunSpec) -> str | None:
        """Why the tool cannot be attached to such a run, in a sentence, or None."""
        ...

    def attached(self, job: Job, spec: RunSpec) -> Job:
        """The job with the tool: its environment, its files, its program behind the tool's.

        The tool leaves its files in PROFILES_FOLDER, on the ranks `spec.profile.ranks` alone. The
        native trainer has been given `spec.profile` by its settings.
        """
        ...

    def read(self, folder: Path) -> Profile:
        """What the tool left in a run folder; raises UserError where that cannot be read."""
        ...

    def read_file(self, path: Path) -> Profile:
        """The same of a file or a folder from elsewhere."""
        ...


def tool(name: ToolName) -> Tool:
    """The tool called `name`, which is one of TOOLS."""
    return cast(Tool, import_module(f"{__package__}.{TOOLS[name]}"))
