"""Where a profile's breakdown of a step enters: parts that steps alone do not tell."""

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
    """A profiled step by part; its own length is no figure, for profiling takes time."""

    shares: Mapping[str, float]
    """Of the step, by the profile's categories."""
    n: int
    """Steps times ranks."""
    source: str

    @property
    def host_gap(self) -> float:
        """Share of the step in which nothing ran, beyond named waits."""
        return self.shares.get("host_gap", 0.0)


def profiled_step(root: Path, name: str) -> ProfiledStep:
    """The profile that `name` stands for: a profile.json, or a run that has one.

    Raises UserError where there is none, or none that takes a step apart.
    """
    path = Path(name)
    path = path if path.is_file() else find_run(root, name) / PROFILE_FILE
    if not path.exists():
        raise UserError(f"--profile {name}", "was not profiled", remedy=f"paceline profile {name}")
    step = _step(path)
    if step is None:
        raise UserError(
            str(path), "takes no step apart", remedy="--tool torch or nsys tells a step by part"
        )
    return step


def profile_of_run(folder: Path) -> ProfiledStep | None:
    """The run's own profile, None where it was not profiled or its tool takes no step apart."""
    path = folder / PROFILE_FILE
    return _step(path) if path.is_file() else None


def _step(path: Path) -> ProfiledStep | None:
    profile = read_value(path, Profile)
    if not profile.step_time_s or not profile.parts:
        return None
    shares = {name: seconds / profile.step_time_s for name, seconds in profile.parts.items()}
    return ProfiledStep(shares, profile.n, f"profile of {profile.run or path.name}, {profile.tool}")
