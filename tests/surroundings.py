"""Variables that give a command folders of its own."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

from paceline.report.vega import bundle_file

MAKE_BUNDLE = "from paceline.report.vega import vega_bundle; vega_bundle()"


def own_folders(runs: Path) -> dict[str, str]:
    """Its runs and its cache, in which only the script of the charts is there already.

    Bundling the script takes as long as many a run of a test.
    """
    kept = runs / "cache" / "paceline" / bundle().name
    with suppress(OSError):  # it is there already, or a test put a file in the folder's place
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.symlink_to(bundle())
    return {"PACELINE_RUNS": str(runs), "XDG_CACHE_HOME": str(runs / "cache")}


@cache
def bundle() -> Path:
    """The script in this user's cache, made by another process, whose threads end with it."""
    path = bundle_file()
    assert path
    if not path.exists():
        subprocess.run([sys.executable, "-c", MAKE_BUNDLE], check=True)
    return path
