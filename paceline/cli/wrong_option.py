"""What is wrong with an option's value, said as of a recipe's field."""

from __future__ import annotations

import typer
from pydantic import ValidationError

from paceline.core.problem import problem_of


def own_words(error: typer.BadParameter) -> str:
    """The message of an option's type in words of ours, or as it is where it is none of pydantic's.

    A check of the option itself names the value where it matters.
    """
    if not isinstance(error.__cause__, ValidationError):
        return error.message
    first = error.__cause__.errors()[0]
    return str(problem_of(first, hidden=first["type"] == "value_error"))
