"""Settings that every engine has: extra arguments and variables for its program.

`engine_settings.arguments` is text in the words of a shell: `--eval-iters 50 --split 98,1,1`.
`engine_settings.environment` is `NAME=VALUE ...`; a NAME alone takes its value from the environment
that Paceline runs in, so that a secret is in no file.

An option that Paceline derives from the run is refused, because figures follow from the run. An
option that changes no figure is replaced by the user's.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from paceline.core.errors import UserError
from paceline.core.hardware import ENVIRONMENT_NAME
from paceline.core.run import RunSpec
from paceline.core.secrets import SecretText, has_secret, is_secret
from paceline.files.recipe import Recipe
from paceline.files.yaml_file import parse_value

ARGUMENTS, ENVIRONMENT = "engine_settings.arguments", "engine_settings.environment"
COMMON_SETTINGS = ("arguments", "environment")
LAUNCH_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
"""Variables by which the ranks of a run find each other."""
RESERVED_PREFIX = "PACELINE_"
_OPTION = re.compile(r"--?[A-Za-z]")
_OVERRIDE = re.compile(r"[+~]{0,2}([A-Za-z_][\w.@/-]*)=")
"""Override in the form of Hydra, such as `++model.seed=1`."""


def common_problems(spec: RunSpec) -> list[str]:
    """Return why the extra arguments or variables of `spec` cannot be used, one sentence each."""
    return [*_argument_problems(spec), *_environment_problems(spec)]


def extra_arguments(spec: RunSpec) -> list[str]:
    """Return the words of engine_settings.arguments."""
    return extra_words(spec, "arguments")


def extra_environment(run: RunSpec | Recipe) -> dict[str, str]:
    """Return the variables of engine_settings.environment; raise UserError for one without value.

    They override all others, those of the cluster included.
    """
    variables: dict[str, str] = {}
    for word in extra_words(run, "environment"):
        name, equals, value = word.partition("=")
        if not equals and name not in os.environ:
            raise UserError(
                ENVIRONMENT,
                f"{name} has no value, and is not set in the environment",
                remedy=f"export {name}, or write {name}=VALUE",
            )
        variables[name] = value if equals else SecretText(os.environ[name])
    return variables


def with_extra_arguments(
    spec: RunSpec,
    command: Sequence[str],
    *,
    replaceable: Collection[str] = (),
    file_options: Collection[str] = (),
    repeatable: Collection[str] = (),
) -> list[str]:
    """Return a command with the extra arguments at its end.

    `replaceable` are the options that an extra argument replaces, `file_options` those that
    Paceline sets in a file, `repeatable` those that may occur several times. Raises UserError for
    any other option that `command` has.
    """
    extra = extra_arguments(spec)
    names = {name for word in extra if (name := option_name(word)) and name not in repeatable}
    present = {name for word in command if (name := option_name(word))}
    allowed = {_normal(name) for name in replaceable}
    conflicts = sorted((names - allowed) & (present | {_normal(name) for name in file_options}))
    if conflicts:
        verb = "is" if len(conflicts) == 1 else "are"
        raise UserError(
            ARGUMENTS,
            f"{', '.join(conflicts)} {verb} set by Paceline from the recipe, layout or cluster",
            remedy="set the field there",
        )
    words: list[str] = []
    is_replaced = False
    for word in command:
        name = option_name(word)
        is_replaced = name in names if name else is_replaced
        words += [] if is_replaced else [word]
    return [*words, *extra]


def with_extra_values(
    spec: RunSpec, values: Mapping[str, Any], replaceable: Collection[str] = ()
) -> dict[str, Any]:
    """Return arguments by name with the extra ones, in YAML's types; a switch is true.

    For a program that reads its arguments from a file. Raises UserError as `with_extra_arguments`.
    """
    with_extra_arguments(spec, (), replaceable=replaceable, file_options=values)
    extra: dict[str, list[str]] = {}
    name = ""
    for word in extra_arguments(spec):
        if option_name(word):
            name, equals, value = word.lstrip("-").partition("=")
            name = name.replace("-", "_")
            extra[name] = [value] if equals else []
        elif name:
            extra[name].append(word)
        else:
            raise UserError(ARGUMENTS, f"{word!r} is not an option", allowed="--NAME VALUE")
    return {
        **values,
        **{
            name: parse_value(" ".join(words), ARGUMENTS) if words else True
            for name, words in extra.items()
        },
    }


def without_extra_arguments(spec: RunSpec) -> RunSpec:
    """Return the run without extra arguments, for a program that reads them from a file."""
    settings = {k: value for k, value in spec.engine_settings.items() if k != "arguments"}
    return spec.model_copy(update={"engine_settings": settings})


def option_name(word: str) -> str | None:
    """Return the option that a word of a command names, or None for a value."""
    if _OPTION.match(word):
        return _normal(word.partition("=")[0].lstrip("-"))
    override = _OVERRIDE.match(word)
    return _normal(override[1]) if override else None


def _normal(name: str) -> str:
    return name.replace("_", "-")


def extra_words(run: RunSpec | Recipe, name: str) -> list[str]:
    """Return the words of a setting; none if it cannot be split, which is a problem of its own."""
    try:
        return shlex.split(str(run.engine_settings.get(name) or ""))
    except ValueError:
        return []


def _split_problem(spec: RunSpec, name: str) -> str | None:
    try:
        shlex.split(str(spec.engine_settings.get(name) or ""))
    except ValueError:
        return f"engine_settings.{name} has a quotation mark or backslash without its end"
    return None


def _argument_problems(spec: RunSpec) -> Iterator[str]:
    if problem := _split_problem(spec, "arguments"):
        yield problem
    elif has_secret(" ".join(extra_arguments(spec))):
        yield f"{ARGUMENTS} contains what looks like a secret: pass it by {ENVIRONMENT}"


def _environment_problems(spec: RunSpec) -> Iterator[str]:
    if problem := _split_problem(spec, "environment"):
        yield problem
        return
    for word in extra_words(spec, "environment"):
        name, equals, value = word.partition("=")
        if not ENVIRONMENT_NAME.fullmatch(name):
            yield f"{ENVIRONMENT}: {name!r} cannot name a variable; write NAME=VALUE, or NAME"
        elif name in LAUNCH_VARIABLES or name.startswith(RESERVED_PREFIX):
            yield f"{ENVIRONMENT}: {name} is set by Paceline; leave it out"
        elif equals and is_secret(name, value):
            yield (
                f"{ENVIRONMENT}: {name} looks like a secret, which no file may contain; write "
                f"{name} alone and export its value"
            )
