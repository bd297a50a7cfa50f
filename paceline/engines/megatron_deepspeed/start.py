"""How Megatron-DeepSpeed is started: its own program, and DeepSpeed's settings beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.core.job import Job
from paceline.core.run import RunSpec
from paceline.engines.launch.environments import interpreter
from paceline.engines.launch.programs import launch, unknown_settings
from paceline.engines.megatron.arguments import words
from paceline.engines.megatron.refusals import refused_paths
from paceline.engines.megatron.start import ENTRY, missing_entry, readable
from paceline.engines.megatron_deepspeed.arguments import CONFIG_FILE, arguments, deepspeed_config
from paceline.engines.megatron_deepspeed.refusals import refused

SETTINGS = ("checkout", "spelling", "split", "tokenizer", "vocab_file", "merge_file")
NO_CHECKOUT = (
    "engine_settings.checkout is not set: name the folder of a checkout of Megatron-DeepSpeed, as "
    "the nodes see it"
)


def unsupported(spec: RunSpec) -> list[str]:
    """What Megatron-DeepSpeed cannot do of `spec`, one sentence each."""
    without = [] if spec.engine_settings.get("checkout") else [NO_CHECKOUT]
    return unknown_settings(spec, SETTINGS) + without + refused_paths(spec) + refused(spec)


def missing(spec: RunSpec) -> str | None:
    """The checkout's program, where this machine would start it."""
    return missing_entry(spec, str(spec.engine_settings.get("checkout")))


def settings(spec: RunSpec) -> dict[str, Any]:
    """The arguments by their names, and DeepSpeed's settings."""
    told = readable(arguments(spec, CONFIG_FILE))
    return {"arguments": told, CONFIG_FILE: json.loads(deepspeed_config(spec))}


def job(spec: RunSpec, name: str) -> Job:
    """One process a device, in the folder of the checkout; the settings lie in the run's."""
    checkout = str(spec.engine_settings.get("checkout"))
    argv = words(arguments(spec, f"{{output}}/{CONFIG_FILE}"))
    return launch(
        spec,
        name,
        ["{python}", "-u", ENTRY, *argv],
        python=interpreter(spec),
        files={CONFIG_FILE: deepspeed_config(spec)},
        folder=Path(checkout),
    )
