"""Variables that give a command folders of its own."""

from __future__ import annotations

from pathlib import Path


def own_folders(runs: Path) -> dict[str, str]:
    """Return variables for folders of runs and cache below `runs`."""
    return {"PACELINE_RUNS": str(runs), "XDG_CACHE_HOME": str(runs / "cache")}
