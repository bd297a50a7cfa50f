"""A missing environment skips tests only if frameworks are not required (PACELINE_REQUIRE)."""

from __future__ import annotations

import os

import pytest

from paceline.engines import engine_names, engine_requirements
from paceline.engines.launch.environments import installed


@pytest.fixture(scope="session", autouse=True)
def environments() -> None:
    """Fails when frameworks are required and one of them has no environment."""
    if "frameworks" not in os.environ.get("PACELINE_REQUIRE", "").split(","):
        return
    named = [name for name in engine_names() if engine_requirements(name).requirements]
    absent = [name for name in named if installed(name) is None]
    assert not absent, f"`make frameworks` has not made: {', '.join(absent)}"
