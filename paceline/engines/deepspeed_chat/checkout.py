"""The `main.py` of a DeepSpeed-Chat checkout: its arguments, environment and folders.

Lambda's fork stops after `--max_steps` and reads PROJECT_PATH. The fork of deepspeedai trains whole
epochs, and imports `dschat` from the folder above `training`.
"""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path

from paceline.core.run import RunSpec
from paceline.engines.launch.extra_settings import extra_environment
from paceline.files.documents import read_text
from paceline.files.staged import staged_repository

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
CONVERTED = "dataset_dict.json"
"""File in every folder that `save_to_disk` wrote."""
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
    if project := {**spec.cluster.env, **extra_environment(spec)}.get(PROJECT):
        return project
    above = (path.parent for path in program_path(spec).parents if path.name == REPOSITORY)
    return next((str(path) for path in above), None)


def preparation(spec: RunSpec, model: str, data: list[str]) -> list[str]:
    """Return the words before the command that prepare a folder on the node, if needed."""
    folder = node_folder(spec, model, data)
    places = zip(data, data_places(spec, model, data), strict=True)
    conversions = [f"{source}={place}" for source, place in places if source != place]
    if not conversions and (fork(spec) != LAMBDA or project_folder(spec)):
        return []
    return ["{python}", PREPARATION, folder, *conversions, "--"]


def data_places(spec: RunSpec, model: str, data: list[str]) -> list[str]:
    """Return the paths or hub ids of data sets as the program reads them.

    The fork of deepspeedai needs folders of data files converted on each node. Their last two
    names choose its reader, as in Dahoas/rm-static.
    """
    if fork(spec) == LAMBDA:
        return data
    folder = node_folder(spec, model, data)
    return [
        f"{folder}/{'/'.join(Path(name).parts[-2:])}" if _is_unconverted(Path(name)) else name
        for name in data
    ]


def _is_unconverted(path: Path) -> bool:
    return path.is_dir() and not (path / CONVERTED).is_file()


def node_folder(spec: RunSpec, model: str, data: list[str]) -> str:
    """Return a folder on each node, shared by the runs of one fork, model and data.

    The program writes about 0.35 GB of tokenized data there, from every node at once, and pickles
    of one fork cannot be read by the other.
    """
    sources = [fork(spec), *map(_identity, (model, *data))]
    return f"{{tmp}}/deepspeed_chat-{sha256(' '.join(sources).encode()).hexdigest()[:8]}"


def _identity(name: str) -> str:
    """Return the real path of a local or staged source, which differs by its revision."""
    path = staged_repository(name) or Path(name)
    return str(path.resolve()) if path.exists() else name
