"""Messages for wrong values of options and for empty paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import PurePath
from typing import Any

import typer
from pydantic import ValidationError

from paceline.core.errors import UserError
from paceline.core.problem import problem_of


def own_words(error: typer.BadParameter) -> str:
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
