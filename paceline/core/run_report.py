"""Input of the report of one run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.core.result import Result, WaterfallLevel
from paceline.core.run import RunSettings, RunSpec
from paceline.core.steps import Steps


@dataclass(frozen=True)
class RunReport:
    """All data that the report of one run shows."""

    result: Result
    steps: Steps
    """All steps, merged over ranks."""
    spec: RunSpec | None
    """Resolved run; None if only logs are available."""
    facts: RunSettings
    command: str
    job_script: str
    inventory: dict[str, Any] = field(default_factory=dict[str, Any])
    folder: str = ""
    files: tuple[str, ...] = ()
    """Paths of files, relative to `folder`."""
    stacks: dict[str, str] = field(default_factory=dict[str, str])
    """Stack traces of ranks that were terminated, by path relative to `folder`."""
    waterfall: tuple[WaterfallLevel, ...] = ()
    """MFU waterfall from the peak through the estimate to the measured step; empty if not
    requested."""
    expected: str = ""
    """Sentence that compares the measured with the expected step, or states why there is no
    estimate."""
