"""Settings of a training's outputs other than event lines."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MlperfConfig:
    """Submission data of an MLPerf log, and the number of untimed warm-up steps."""

    benchmark: str
    org: str
    platform: str
    division: str
    status: str
    warmup_steps: int
    cache_cleared: bool | None


@dataclass(frozen=True)
class ProfileConfig:
    """The profiler, the ranks it runs on, and its steps, including the last one."""

    tool: str
    ranks: list[int]
    first_step: int
    last_step: int
