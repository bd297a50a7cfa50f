"""Record of a run's environment: the machine and the run's inputs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.compare.over_time.environment import environment_items
from paceline.core.result import Result
from paceline.core.run import RunSpec
from paceline.files.documents import LARGEST_BYTES, open_regular, read_json, write_text, write_value
from paceline.files.inputs import INPUTS_FILE, find_run_inputs
from paceline.files.run_folder import INVENTORY_FILE

PROGRAM_FILES = "*/**/*.py"
"""Python files of the trainer that were copied to the run folder."""


def write_environment(
    folder: Path, spec: RunSpec, inventory: Mapping[str, Any], texts: Mapping[str, Path]
) -> None:
    """Write the machine's inventory and the run's inputs."""
    write_text(folder / INVENTORY_FILE, json.dumps(inventory, indent=2) + "\n")
    if inputs := find_run_inputs(spec, texts):
        write_value(folder / INPUTS_FILE, inputs)


def recorded_environment(folder: Path, result: Result | None = None) -> dict[str, str]:
    """Return the environment of a run by item; its `result` has what its ranks reported."""
    inventory = read_json(folder / INVENTORY_FILE)
    return environment_items(
        inventory,
        result.versions if result else {},
        _program(folder),
        result.fabric if result else None,
    )


def _program(folder: Path) -> str | None:
    """Return eight hex digits of the hash of the trainer's files in the run folder."""
    digest, files = hashlib.sha256(), sorted(folder.glob(PROGRAM_FILES))
    for file in files:
        try:
            with open_regular(file, follow=False) as content:
                digest.update(file.name.encode() + content.read(LARGEST_BYTES))
        except OSError:
            return None
    return digest.hexdigest()[:8] if files else None
