"""Plain descriptions of pydantic validation errors: what is wrong and what is allowed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from paceline.core.errors import UserError
from paceline.core.secrets import redact
from paceline.core.units import LARGEST_INT, pluralize

LONGEST_SHOWN = 60
"""Maximum number of characters of a value in a message."""
LONGEST_MESSAGE = 300
"""Maximum number of characters of another check's message."""
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
"""Description of the required kind and allowed values, by the first word of the error type."""
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
    """Description of a wrong value, and the allowed values unless the description has them."""

    what: str
    allowed: str | None = None

    def __str__(self) -> str:
        return f"{self.what}; allowed: {self.allowed}" if self.allowed else self.what


def problem_of(error: ErrorDetails, hidden: bool = False) -> Problem:
    """Describe one error in a sentence; `hidden` leaves the value out."""
    kind, value, facts = error["type"], error["input"], error.get("ctx", {})
    first, _, rest = kind.partition("_")
    if kind in _SENTENCES:
        return Problem(_SENTENCES[kind])
    if kind in ("literal_error", "enum"):
        choices = str(facts.get("expected", "")).replace(" or ", ", ")
        return Problem(_of(value, "is not one of the choices", hidden), choices)
    if kind in _BOUNDS:
        what, key, allowed = _BOUNDS[kind]
        # Values from options are still text at this point.
        shown = "" if hidden else f"{_shown(value, str)} "
        return Problem(f"{shown}{what}", allowed.format(_bound(facts[key])))
    if kind == "int_parsing_size":
        return Problem("is too large", f"{LARGEST_INT:,} or less")
    if first in _KINDS and rest.endswith(_WRONG_KIND):
        noun, allowed = _KINDS[first]
        return Problem(_of(value, f"is {noun}", hidden), allowed)
    return _size_problem(error, hidden) or Problem(_told(error, hidden))


def problem_of_union(errors: Sequence[ErrorDetails], hidden: bool = False) -> Problem:
    """Describe a value that fits none of several kinds, with all allowed values.

    `errors` has one error per kind.
    """
    if len(errors) == 1:
        return problem_of(errors[0], hidden)
    allowed = filter(None, (problem_of(error).allowed for error in errors))
    what = _of(errors[0]["input"], "does not fit", hidden)
    return Problem(what, ", or ".join(dict.fromkeys(allowed)) or None)


def invalid_input(where: str, error: ValidationError) -> UserError:
    """Return the error for a document or row, based on its first invalid field.

    Values under `env` are not shown, because any of them may be a secret.
    """
    first = error.errors()[0]
    problem = problem_of(first, hidden="env" in first["loc"])
    field = ".".join(map(str, first["loc"]))
    return UserError(
        where, f"{field}: {problem.what}" if field else problem.what, allowed=problem.allowed
    )


def _of(value: object, what: str, hidden: bool) -> str:
    """Return `what` after the value that it describes."""
    if value is None:
        return "is empty"
    return what if hidden else f"{_shown(value)} {what}"


def _bound(bound: float) -> str:
    """Format a bound with all digits. Years have no thousands separator."""
    number = Decimal(str(bound)).normalize()
    return f"{number:,f}" if abs(number) >= 10_000 else f"{number:f}"


def _size_problem(error: ErrorDetails, hidden: bool) -> Problem | None:
    """Describe texts and lists that are too short, too long or in the wrong format."""
    kind, value, facts = error["type"], error["input"], error.get("ctx", {})
    if kind == "string_pattern_mismatch":
        form = f"text that matches {facts['pattern']}"
        return Problem(_of(value, "has another form", hidden), form)
    thing = "character" if kind.startswith("string") else "value"
    if kind.endswith("too_short"):
        least = pluralize(facts["min_length"], thing)
        return Problem(_of(value, "is too short", hidden), f"{least} or more")
    if kind.endswith("too_long"):
        most = pluralize(facts["max_length"], thing)
        return Problem(_of(value, "is too long", hidden), f"{most} or fewer")
    return None


def _told(error: ErrorDetails, hidden: bool) -> str:
    """Return the message of another check, with the value if there is only one."""
    message = redact(error["msg"], os.environ)
    message = message.removeprefix("Value error, ").replace("Invalid JSON: ", "is no JSON: ")
    message = _shortened(f"{message[:1].lower()}{message[1:]}")
    if hidden or not _is_single(error):
        return message
    value = error["input"]
    return f"{message}, but is empty" if value is None else f"{message}, not {_shown(value)}"


def _is_single(error: ErrorDetails) -> bool:
    """Return whether an error concerns a single value.

    The input of a JSON syntax error is the whole text, which does not count as one.
    """
    several = isinstance(error["input"], dict | list | tuple | BaseModel)
    return not several and error["type"] != "json_invalid"


def _shortened(message: str) -> str:
    """Truncate a long message at a word boundary."""
    if len(message) <= LONGEST_MESSAGE:
        return message
    return f"{message[: LONGEST_MESSAGE - 4].rsplit(' ', 1)[0]} ..."


def _shown(value: object, form: Callable[[object], str] = repr) -> str:
    """Format a value, truncated. Secrets are redacted before the value is truncated."""
    if isinstance(value, dict):
        return "a group of fields"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, str):
        # Redact first: after escaping, the start and end of a secret would no longer be found.
        text = form(redact(value, os.environ))
    else:
        text = redact(_written(value, form), os.environ)
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 4]} ..."


def _written(value: object, form: Callable[[object], str]) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    try:
        return form(value)
    except ValueError:  # Python refuses to format larger integers.
        return f"a number of more than {sys.get_int_max_str_digits():,} digits"
