"""A profile's breakdown of a step, which shows parts that step times alone do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import UserError
from paceline.files.documents import read_value
from paceline.files.run_folder import find_run
from paceline.profiles.profile import PROFILE_FILE, Profile


@dataclass(frozen=True)
class ProfiledStep:
    """A profiled step by part, in shares because profiling itself lengthens the step."""

    shares: Mapping[str, float]
    """Shares of the step by category of the profile."""
    n: int
    """Number of steps times ranks."""
    source: str

    @property
    def host_gap(self) -> float:
        """Share of the step in which the device was idle, known waits excluded."""
        return self.shares.get("host_gap", 0.0)


def load_profiled_step(root: Path, name: str) -> ProfiledStep:
    """Return the profile `name`: a profile.json, or a run that has one.

    Raises UserError if there is none or if it has no breakdown of a step.
    """
    path = Path(name)
    path = path if path.is_file() else find_run(root, name) / PROFILE_FILE
    if not path.exists():
        raise UserError(
            f"--profile {name}", "was not profiled", remedy=f"paceline probe profile {name}"
        )
    step = _step(path)
    if step is None:
        raise UserError(
            str(path), "has no step breakdown", remedy="profile with --tool torch or nsys"
        )
    return step


def own_profiled_step(folder: Path) -> ProfiledStep | None:
    """Return the run's own profile; None without one that breaks a step down."""
    path = folder / PROFILE_FILE
    return _step(path) if path.is_file() else None


def _step(path: Path) -> ProfiledStep | None:
    profile = read_value(path, Profile)
    if not profile.step_time_s or not profile.parts:
        return None
    shares = {name: seconds / profile.step_time_s for name, seconds in profile.parts.items()}
    return ProfiledStep(shares, profile.n, f"profile of {profile.run or path.name}, {profile.tool}")
