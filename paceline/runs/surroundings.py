"""What surrounds a run: the machine and what it reads, kept before it starts and read later."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.compare.over_time.environment import environment_items
from paceline.core.run import RunSpec
from paceline.files.documents import read_json, write_text, write_value
from paceline.files.inputs import INPUTS_FILE, find_run_inputs
from paceline.files.run_folder import INVENTORY_FILE

PROGRAM_FILES = "*/**/*.py"
"""Files of the program that travelled with a run."""


def write_surroundings(
    folder: Path, spec: RunSpec, inventory: Mapping[str, Any], texts: Mapping[str, Path]
) -> None:
    """Keep the machine and, where the run reads anything, what that is."""
    write_text(folder / INVENTORY_FILE, json.dumps(inventory, indent=2) + "\n")
    if inputs := find_run_inputs(spec, texts):
        write_value(folder / INPUTS_FILE, inputs)


def recorded_environment(folder: Path, versions: Mapping[str, str]) -> dict[str, str]:
    """The surroundings of a run by named items; `versions` are those that its ranks told."""
    inventory = read_json(folder / INVENTORY_FILE)
    return environment_items(inventory, versions, _program(folder))


def _program(folder: Path) -> str | None:
    """Eight hexadecimal digits of the program's files that travelled with the run."""
    digest, files = hashlib.sha256(), sorted(folder.glob(PROGRAM_FILES))
    for file in files:
        try:
            digest.update(file.name.encode() + file.read_bytes())
        except OSError:
            return None
    return digest.hexdigest()[:8] if files else None
