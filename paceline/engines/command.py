"""Any program of the user's own: started as it was typed, read by its log or its event lines.

`paceline run [RECIPE] -- PROGRAM [ARGUMENT ...]` starts it once on every node, in the folder that
`paceline` was called in; `--launch-per device` starts it once for each device, as torchrun would.
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
from paceline.engines.support import Support

SETTINGS = ("per", "devices")
PER = ("node", "device")
SUPPORT: Mapping[str, Support] = {"": {}}
"""What a user's own program does with a recipe is its own matter."""
SECRET_ARGUMENT = "PACELINE_SECRET_"
"""Variables that hold words of the command which no script may show."""


def unsupported(spec: RunSpec) -> list[str]:
    """That there is no program, or that an option of this engine is not understood."""
    problems = unknown_settings(spec, SETTINGS)
    if not spec.command:
        problems.append(
            "engine command starts a program of yours: `paceline run [RECIPE] -- PROGRAM`"
        )
    if REDACTED in spec.command:
        problems.append(
            "its command holds a secret, which was not stored: give the command once more"
        )
    if spec.engine_settings.get("per", "node") not in PER:
        problems.append(f"engine_settings.per must be {' or '.join(PER)}")
    return problems


def missing(spec: RunSpec) -> str | None:
    """The program itself where it is sought on this machine and cannot be found, or torch."""
    elsewhere = spec.cluster.python is not None or spec.cluster.in_container
    # What starts it is torch's launcher, here and on nodes.
    if not elsewhere and importlib.util.find_spec("torch") is None:
        return "torch is not installed beside Paceline; pip install 'paceline[native]'"
    program = spec.command[0] if spec.command else ""
    if not spec.cluster.runs_here or "{" in program or not program:
        return None
    path = spec.cluster.env.get("PATH", os.environ.get("PATH"))
    if shutil.which(program, path=path) is not None:
        return None
    is_file = Path(program).is_file()
    why = "may not be executed" if is_file else "is not a program here"
    remedy = f"python {program}" if is_file else "check its name, or give its path"
    return f"{program} {why}; {remedy}"


def settings(spec: RunSpec) -> dict[str, Any]:
    """What is started, secrets left out, and how often."""
    return {"command": [*redacted_words(spec.command, os.environ)], "per": _per(spec)}


def job(spec: RunSpec, name: str) -> Job:
    """The Job that starts the command; secrets in it travel as variables, not in the script."""
    secret = secret_words(spec.command, os.environ)
    words = [
        f"{{{SECRET_ARGUMENT}{at}}}" if at in secret else word
        for at, word in enumerate(spec.command)
    ]
    per = _per(spec)
    # As it was typed: how many threads a program takes that starts its ranks itself is its matter.
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
