"""Wrapper that becomes a rank's program, with a tool around it on the chosen ranks.

It is copied into the run folder and imports nothing from Paceline.

    python profiled_rank.py SETTINGS PROGRAM [ARGUMENT ...]

SETTINGS is a JSON file with `ranks` (null for all), `env` and `before` for those ranks, and
`before_first` for the first of them on each host. Placeholders are {rank}, {local}, {node} and
{job}; values of `env` also have {folder} (of the run) and {paths} (of PYTHONPATH). A rank without a
number, which a framework starts itself, counts as chosen.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path


def main(settings_file: str, program: list[str]) -> None:
    """Replace this process by the program."""
    settings = json.loads(Path(settings_file).read_text(encoding="utf-8"))
    rank = os.environ.get("RANK")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    command = [sys.executable, *program]
    if rank is None or settings["ranks"] is None or int(rank) in settings["ranks"]:
        places = {
            "rank": rank or "0",
            "local": str(local),
            "node": os.environ.get("GROUP_RANK", os.environ.get("SLURM_NODEID", "0")),
            "job": os.environ.get("SLURM_JOB_ID", "local"),
        }
        words = settings["before"] + (settings["before_first"] if local == 0 else [])
        # Fill the tool's words only: the name of a recipe may contain braces.
        command = [fill_placeholders(word, places) for word in words] + command
        paths = os.environ.get("PYTHONPATH")
        places |= {"folder": str(Path.cwd()), "paths": f"{os.pathsep}{paths}" if paths else ""}
        for name, value in settings["env"].items():
            os.environ[name] = fill_placeholders(value, places)
    sibling = Path(sys.executable).parent / command[0]
    tool = shutil.which(command[0]) or (str(sibling) if sibling.exists() else None)
    if tool is None:
        sys.exit(f"{command[0]} is not installed on this host, or not in PATH")
    sys.stdout.flush()
    os.execv(tool, command)


def fill_placeholders(word: str, places: dict[str, str]) -> str:
    """Return the word with its placeholders filled in."""
    for name, value in places.items():
        word = word.replace("{" + name + "}", value)
    return word


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
