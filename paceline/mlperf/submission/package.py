"""What a package was made of, and what the official checker said of it."""

from __future__ import annotations

from typing import Literal

from paceline.core.value import Value
from paceline.mlperf.check.findings import Check
from paceline.mlperf.rules import UNOFFICIAL


class Packaged(Value):
    """The runs of one benchmark as they were taken."""

    benchmark: str
    source: str
    files: dict[str, str]
    """Name in the package -> name in the source."""
    score_minutes: float | None
    scaling_factor: float | None


class Package(Value):
    """What `paceline mlperf package` answers."""

    folder: str | None
    """None when the official checker objects: then nothing was written."""
    organisation: str
    division: str
    system: str
    results: tuple[Packaged, ...]
    warnings: tuple[str, ...]
    check: Check
    official: Literal[False] = False
    label: str = UNOFFICIAL
