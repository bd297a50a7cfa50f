"""What a check of pydantic found, in words of ours: what is wrong, and what is allowed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from paceline.core.errors import UserError
from paceline.core.secrets import redact
from paceline.core.units import LARGEST_INT, counted

LONGEST_SHOWN = 60
"""Characters of a value in a sentence about it."""
_KINDS = {
    "int": ("no whole number", "a whole number"),
    "float": ("no number", "a number"),
    "finite": ("no finite number", "a finite number"),
    "bool": ("neither true nor false", "true or false"),
    "string": ("no text", "text, in quotes where it reads as something else"),
    "date": ("no date", "a date, as 2026-11-30"),
    "path": ("no path", "a path"),
    **dict.fromkeys(("list", "tuple", "set"), ("no list", "a list, as [a, b]")),
    **dict.fromkeys(("dict", "model"), ("no group of fields", "fields, as {name: value}")),
}
"""By the first word of an error's type: what the value is not, and what is allowed."""
_WRONG_KIND = ("type", "parsing", "number", "from_float", "inexact")
_BOUNDS = {
    "greater_than": ("is too small", "gt", "a number above {}"),
    "greater_than_equal": ("is too small", "ge", "{} or more"),
    "less_than": ("is too large", "lt", "a number below {}"),
    "less_than_equal": ("is too large", "le", "{} or less"),
}
_SENTENCES = {
    "missing": "is required but missing",
    "extra_forbidden": "is not a known field",
}


class Problem(NamedTuple):
    """What is wrong with a value, and what is allowed in its place where that is not said yet."""

    what: str
    allowed: str | None = None

    def __str__(self) -> str:
        return f"{self.what}; allowed: {self.allowed}" if self.allowed else self.what


def problem_of(error: ErrorDetails, hidden: bool = False) -> Problem:
    """One error in a sentence; the value is not repeated where it is to stay `hidden`."""
    kind, value, facts = error["type"], error["input"], error.get("ctx", {})
    shown = "" if hidden else f"{_shown(value)} "
    first, _, rest = kind.partition("_")
    if kind in _SENTENCES:
        return Problem(_SENTENCES[kind])
    if kind in ("literal_error", "enum"):
        choices = str(facts.get("expected", "")).replace(" or ", ", ")
        return Problem(f"{shown}is not one of the choices", choices)
    if kind in _BOUNDS:
        what, key, allowed = _BOUNDS[kind]
        bound = facts[key]
        text = f"{int(bound):,}" if bound == int(bound) else str(bound)
        # What an option was given is still a text.
        shown = "" if hidden else f"{value} "
        return Problem(f"{shown}{what}", allowed.format(text))
    if kind == "int_parsing_size":
        return Problem("is too large", f"{LARGEST_INT:,} or less")
    if first in _KINDS and rest.endswith(_WRONG_KIND):
        noun, allowed = _KINDS[first]
        return Problem("is empty" if value is None else f"{shown}is {noun}", allowed)
    return _size_problem(kind, shown, facts) or Problem(_told(error, hidden))


def problem_of_union(errors: Sequence[ErrorDetails], hidden: bool = False) -> Problem:
    """Of a value that is none of several kinds, one error each: all that is allowed."""
    if len(errors) == 1:
        return problem_of(errors[0], hidden)
    shown = "" if hidden else f"{_shown(errors[0]['input'])} "
    allowed = filter(None, (problem_of(error).allowed for error in errors))
    return Problem(f"{shown}does not fit", ", or ".join(dict.fromkeys(allowed)) or None)


def refusal(where: str, error: ValidationError) -> UserError:
    """The refusal of a document or row by the first field that is wrong.

    What stands under `env` is not repeated: it may be any secret.
    """
    first = error.errors()[0]
    problem = problem_of(first, hidden="env" in first["loc"])
    field = ".".join(map(str, first["loc"]))
    return UserError(
        where, f"{field}: {problem.what}" if field else problem.what, allowed=problem.allowed
    )


def _size_problem(kind: str, shown: str, facts: dict[str, Any]) -> Problem | None:
    """Of texts and lists that are too short, too long or of another form."""
    if kind == "string_pattern_mismatch":
        return Problem(f"{shown}has another form", f"text that matches {facts['pattern']}")
    thing = "character" if kind.startswith("string") else "value"
    if kind.endswith("too_short"):
        return Problem(f"{shown}is too short", f"{counted(facts['min_length'], thing)} or more")
    if kind.endswith("too_long"):
        return Problem(f"{shown}is too long", f"{counted(facts['max_length'], thing)} or less")
    return None


def _told(error: ErrorDetails, hidden: bool) -> str:
    """What a check of ours says, with the value where it is a single one."""
    message = redact(error["msg"], os.environ).removeprefix("Value error, ")
    message = message.replace("Invalid JSON: ", "is no JSON: ")
    single = not hidden and not isinstance(error["input"], dict | list | tuple)
    ending = f", not {_shown(error['input'])}" if single and error["type"] == "value_error" else ""
    return f"{message[:1].lower()}{message[1:]}{ending}"[:300]


def _shown(value: object) -> str:
    """The beginning of a value; a secret is taken out while it is whole."""
    if isinstance(value, dict):
        return "a group of fields"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, str):
        # Escapes would hide where it begins and ends.
        text = repr(redact(value, os.environ))
    else:
        text = str(value).lower() if isinstance(value, bool) else redact(repr(value), os.environ)
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 4]} ..."
