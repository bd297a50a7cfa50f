"""The `main.py` of a DeepSpeed-Chat checkout: its arguments, environment and folders.

Lambda's fork stops after `--max_steps` and reads PROJECT_PATH. The fork of deepspeedai trains whole
epochs, and imports `dschat` from the folder above `training`.
"""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path

from paceline.core.run import RunSpec
from paceline.files.documents import read_text

LAMBDA, DEEPSPEEDAI = FORKS = ("lambda", "deepspeedai")
DEEPSPEED_OPTIONS = ("--deepspeed",)
"""Arguments that `deepspeed.add_config_arguments` adds to those of a program."""
REJECTED = {
    LAMBDA: ("--dropout", "--dtype", "--lora_learning_rate"),
    DEEPSPEEDAI: ("--disable_dropout", "--max_steps"),
}
"""Arguments that one fork has and the other rejects, for a program whose source is not readable."""
PROJECT = "PROJECT_PATH"
PREPARATION = "project_program.py"
REPOSITORY = "DeepSpeedExamples"
CHAT_FOLDER = 2
"""Folders between main.py and the folder of `dschat`."""


def program_path(spec: RunSpec) -> Path:
    """Return the path of the checkout's program."""
    return Path(str(spec.engine_settings["program"]))


def source(spec: RunSpec) -> str | None:
    """Return the program's source, None if it is not readable here, as in a container."""
    try:
        return read_text(program_path(spec))
    except (OSError, ValueError):
        return None


def fork(spec: RunSpec) -> str:
    """Return the fork of the program: as set, else by its source, else Lambda's."""
    setting = spec.engine_settings.get("fork")
    text = source(spec)
    if setting is not None or text is None:
        return str(setting or LAMBDA)
    return LAMBDA if PROJECT in text or "--max_steps" in text else DEEPSPEEDAI


def accepts(spec: RunSpec, option: str) -> bool:
    """Return whether the program has an option."""
    text = source(spec)
    if text is None:
        return option not in REJECTED[fork(spec)]
    return option in (*DEEPSPEED_OPTIONS, *re.findall(r"""["'](--\w+)["']""", text))


def has_max_steps(spec: RunSpec) -> bool:
    """Return whether the program can stop before the end of an epoch."""
    return accepts(spec, "--max_steps")


def environment(spec: RunSpec) -> dict[str, str]:
    """Return the variables that the program needs to start."""
    if fork(spec) == LAMBDA:
        project = project_folder(spec)
        return {PROJECT: project} if project else {}
    others = spec.cluster.env.get("PYTHONPATH")
    folder = str(program_path(spec).parents[CHAT_FOLDER])
    return {"PYTHONPATH": f"{folder}:{others}" if others else folder}


def project_folder(spec: RunSpec) -> str | None:
    """Return PROJECT_PATH of Lambda's fork: as set, else above its checkout, where its set-up
    script has it; None for a checkout with another name, whose nodes each prepare one."""
    if project := spec.cluster.env.get(PROJECT):
        return project
    above = (path.parent for path in program_path(spec).parents if path.name == REPOSITORY)
    return next((str(path) for path in above), None)


def preparation(spec: RunSpec, sources: list[str]) -> list[str]:
    """Return the words before the command that prepare a project folder on the node, if needed."""
    if fork(spec) != LAMBDA or project_folder(spec):
        return []
    return ["{python}", PREPARATION, node_folder(sources)]


def node_folder(sources: list[str]) -> str:
    """Return a folder on each node, shared by the runs of one model and its data sets.

    The program writes about 0.35 GB of tokenized data there, from every node at once.
    """
    return f"{{tmp}}/deepspeed_chat-{sha256(' '.join(sources).encode()).hexdigest()[:8]}"
