"""What a training writes beside its event lines, as its input says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MlperfConfig:
    """What an MLPerf log says of a run that the trainer cannot know, and the untimed steps."""

    benchmark: str
    org: str
    platform: str
    division: str
    status: str
    warmup_steps: int
    cache_cleared: bool | None


@dataclass(frozen=True)
class ProfileConfig:
    """Which tool is attached to which ranks, and for which steps, the last one included."""

    tool: str
    ranks: list[int]
    first_step: int
    last_step: int
