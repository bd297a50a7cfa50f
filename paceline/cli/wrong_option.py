"""What is wrong with an option's value, said as of a recipe's field, or with an empty path."""

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
    """The message of an option's type in words of ours, or as it is where it is none of pydantic's.

    A check of the option itself names the value where it matters.
    """
    if not isinstance(error.__cause__, ValidationError):
        return error.message
    first = error.__cause__.errors()[0]
    return str(problem_of(first, hidden=first["type"] == "value_error"))


def refuse_empty_paths(
    params: Sequence[Any], values: Mapping[str, Any], words: Sequence[str]
) -> None:
    """Raise UserError for a path of no characters, which would mean the working folder.

    `params` are a verb's options and arguments, `values` theirs by name, `words` what was typed: by
    its value a path of no characters is `.`.
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
                remedy="look whether a variable of the shell is unset",
            )


def _takes_a_value(param: Any) -> bool:
    return param.param_type_name == "option" and not param.is_flag
