"""Everything that is known of one run when it is reported."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.core.result import Result
from paceline.core.run import RunSettings, RunSpec
from paceline.core.steps import Steps
from paceline.core.waterfall import WaterfallLevel


@dataclass(frozen=True)
class RunReport:
    """Everything that a report of one run shows."""

    result: Result
    steps: Steps
    """All steps, ranks merged."""
    spec: RunSpec | None
    """None when only logs are known."""
    facts: RunSettings
    command: str
    job_script: str
    inventory: dict[str, Any] = field(default_factory=dict[str, Any])
    folder: str = ""
    files: tuple[str, ...] = ()
    """Paths inside `folder`."""
    stacks: dict[str, str] = field(default_factory=dict[str, str])
    """What the ranks did when they were ended, by the file's path inside `folder`."""
    waterfall: tuple[WaterfallLevel, ...] = ()
    """From the peak over the estimate to the measured step; empty where nobody asked for it."""
    expected: str = ""
    """The measured step beside the expected one, or why there is none, in a sentence."""
