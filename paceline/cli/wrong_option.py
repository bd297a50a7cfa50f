"""Messages for wrong command lines: unknown commands and options, wrong values, empty paths."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import PurePath
from typing import Any

import typer
from pydantic import ValidationError

from paceline.core.errors import UserError
from paceline.core.problem import problem_of

MIN_WORD = 4
"""Length from which a word is searched for in the descriptions of the verbs."""


def unknown_command(word: str, path: str, verbs: Mapping[str, Any]) -> UserError:
    """Return the error for a command that `path` (`paceline`, `paceline runs`) does not have."""
    suggestion = _similar_command(word, path, verbs)
    remedy = f"did you mean `{suggestion}`?" if suggestion else f"`{path} --help` lists them"
    return UserError(f"{path} {word}", "is not a command", remedy=remedy)


def _similar_command(word: str, path: str, verbs: Mapping[str, Any]) -> str | None:
    """Return the command that a wrong word most likely means.

    It has the same name in another group, or a similar name, or the word in its description.
    Commands of the group that was typed come first.
    """
    paths = sorted(verbs, key=lambda full: not full.startswith(f"{path} "))
    names = {full: verbs[full].name for full in paths} | {"paceline --version": "version"}
    same = [full for full, name in names.items() if name == word]
    if same:
        return same[0]
    for cutoff in (0.75, 0.6):
        close = difflib.get_close_matches(word, names.values(), n=1, cutoff=cutoff)
        if close:
            return next(full for full, name in names.items() if name == close[0])
        matches = [
            full
            for full in sorted(paths, key=lambda full: verbs[full].source == "group")
            if len(word) >= MIN_WORD and re.search(rf"(?i)\b{re.escape(word)}", verbs[full].line)
        ]
        if matches:
            return matches[0]
    return None


def usage_error(error: Any, ctx: Any, words: Sequence[str] = ()) -> UserError:
    """Return typer's error for a wrong command line in the form of all other errors.

    An option is named as in the `words` of the command line.
    """
    kind, param = type(error).__name__, getattr(error, "param", None)
    help_remedy = f"`{ctx.command_path} --help` shows what it takes"
    if kind == "NoSuchOption":
        close = [name for name in error.possibilities or () if name.startswith("-")][:3]
        remedy = f"did you mean {' or '.join(close)}?" if close else help_remedy
        return UserError(
            error.option_name, f"is not an option of {ctx.command_path}", remedy=remedy
        )
    if param is not None:
        option = param.param_type_name == "option"
        typed_names = {word.partition("=")[0] for word in words}
        name = (
            next((name for name in param.opts if name in typed_names), max(param.opts, key=len))
            if option
            else str(param.metavar or param.name).upper()
        )
        if kind == "MissingParameter":
            return UserError(name, "is missing", remedy=help_remedy)
        return UserError(name, _own_words(error).strip().rstrip("."))
    message = error.format_message().strip().rstrip(".")
    return UserError(ctx.command_path, message[:1].lower() + message[1:], remedy=help_remedy)


def _own_words(error: typer.BadParameter) -> str:
    """Return a pydantic message in the words of recipe errors, other messages unchanged.

    Checks of the option itself include the value where it matters.
    """
    if not isinstance(error.__cause__, ValidationError):
        return error.message
    first = error.__cause__.errors()[0]
    return str(problem_of(first, hidden=first["type"] == "value_error"))


def refuse_empty_paths(
    params: Sequence[Any], values: Mapping[str, Any], words: Sequence[str]
) -> None:
    """Raise UserError for an empty path, which would mean the working folder.

    `params` are a verb's options and arguments, `values` their values by name, `words` the command
    line, because the value of an empty path is `.`.
    """
    options = {name for param in params if _takes_a_value(param) for name in param.opts}
    empty = {word[:-1] for word in words if word[-1:] == "="}
    empty |= {
        before if before in options else "" for before, word in pairwise(("", *words)) if not word
    }
    for param in params:
        value = values.get(param.name or "")
        is_option = param.param_type_name == "option"
        if empty.isdisjoint(param.opts if is_option else [""]):
            continue
        if PurePath() in (value if isinstance(value, list | tuple) else [value]):
            raise UserError(
                max(param.opts, key=len)
                if is_option
                else (param.metavar or str(param.name)).upper(),
                "is empty",
                allowed="a path, `.` for this folder",
                remedy="check whether a shell variable is unset",
            )


def _takes_a_value(param: Any) -> bool:
    return param.param_type_name == "option" and not param.is_flag
