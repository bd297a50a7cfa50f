"""Engine for any user program: started as typed, read by its log or event lines.

`paceline run [RECIPE] -- PROGRAM [ARGUMENT ...]` starts it once on every node, in the current
folder; `--launch-per device` starts it once per device, as torchrun would.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from paceline.core.job import Job
from paceline.core.run import RunSpec
from paceline.core.secrets import REDACTED, redacted_words, secret_words
from paceline.engines.launch.programs import launch, unknown_settings
from paceline.engines.support import Support, TestedProgram

SETTINGS = ("per", "devices")
PER = ("node", "device")
SUPPORT: Mapping[str, Support] = {"": {}}
"""No field is refused: a user program may interpret the recipe as it likes."""
SECRET_ARGUMENT = "PACELINE_SECRET_"
"""Prefix of the variables for words of the command that must not appear in a script."""
TESTED_PROGRAMS = (TestedProgram("PyTorch loops, torchrun", "two SSH hosts"),)


def unsupported(spec: RunSpec) -> list[str]:
    """Return a sentence each for a missing program and for unknown options of this engine."""
    problems = unknown_settings(spec, SETTINGS)
    if not spec.command:
        problems.append(
            "engine command needs a program to start: `paceline run [RECIPE] -- PROGRAM`"
        )
    if REDACTED in spec.command:
        problems.append("the stored command has no secrets: enter the whole command again")
    if spec.engine_settings.get("per", "node") not in PER:
        problems.append(f"engine_settings.per must be {' or '.join(PER)}")
    return problems


def missing(spec: RunSpec) -> str | None:
    """Return a problem if torch, or the program on this machine, is missing."""
    elsewhere = spec.cluster.python is not None or spec.cluster.in_container
    # Torch's launcher starts the program, both locally and on nodes.
    if not elsewhere and importlib.util.find_spec("torch") is None:
        return "torch is not installed; pip install 'paceline[native]'"
    program = spec.command[0] if spec.command else ""
    if not spec.cluster.runs_here or "{" in program or not program:
        return None
    path = spec.cluster.env.get("PATH", os.environ.get("PATH"))
    if shutil.which(program, path=path) is not None:
        return None
    is_file = Path(program).is_file()
    why = "is not executable" if is_file else "was not found on this machine"
    remedy = f"use `python {program}`" if is_file else "check its name, or give its path"
    return f"{program} {why}; {remedy}"


def settings(spec: RunSpec) -> dict[str, Any]:
    """Return the command without its secrets and how often it starts."""
    return {"command": [*redacted_words(spec.command, os.environ)], "per": _per(spec)}


def job(spec: RunSpec, name: str) -> Job:
    """Return the Job that starts the command; secrets become variables, not script text."""
    secret = secret_words(spec.command, os.environ)
    words = [
        f"{{{SECRET_ARGUMENT}{at}}}" if at in secret else word
        for at, word in enumerate(spec.command)
    ]
    per = _per(spec)
    # Thread counts stay as typed: a program that starts its own ranks sets them itself.
    cluster = spec.cluster.model_copy(update={"threads_per_device": None})
    return launch(
        spec if per == "device" else spec.model_copy(update={"cluster": cluster}),
        name,
        words,
        python=spec.cluster.interpreter,
        env={f"{SECRET_ARGUMENT}{at}": spec.command[at] for at in sorted(secret)},
        per=per,
        folder=None if spec.cluster.in_container else Path.cwd(),
        writes_steps=True,
    )


def _per(spec: RunSpec) -> Literal["device", "node"]:
    per = spec.engine_settings.get("per", "node")
    return "device" if per == "device" else "node"
