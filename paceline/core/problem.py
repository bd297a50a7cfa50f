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

MAX_VALUE_CHARS = 60
"""Maximum number of characters of a value in a message."""
MAX_MESSAGE_CHARS = 300
"""Maximum number of characters of another check's message."""
_KINDS = {
    "int": ("not a whole number", "a whole number"),
    "float": ("not a number", "a number"),
    "finite": ("not a finite number", "a finite number"),
    "bool": ("not a boolean", "true or false"),
    "string": ("not text", "text, in quotes if it looks like a number or date"),
    "date": ("not a date", "a date, such as 2026-11-30"),
    "path": ("not a path", "a path"),
    **dict.fromkeys(("list", "tuple", "set"), ("not a list", "a list, such as [a, b]")),
    **dict.fromkeys(("dict", "model"), ("not a mapping", "a mapping, such as {name: value}")),
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
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    first, _, suffix = kind.partition("_")
    if kind in _SENTENCES:
        return Problem(_SENTENCES[kind])
    if kind in ("literal_error", "enum"):
        choices = str(context.get("expected", "")).replace(" or ", ", ")
        return Problem(_of(value, "is not one of the choices", hidden), choices)
    if kind in _BOUNDS:
        what, key, allowed = _BOUNDS[kind]
        # Values from options are still text at this point.
        prefix = "" if hidden else f"{_format_value(value, str)} "
        return Problem(f"{prefix}{what}", allowed.format(_bound(context[key])))
    if kind == "int_parsing_size":
        return Problem("is too large", f"{LARGEST_INT:,} or less")
    if first in _KINDS and suffix.endswith(_WRONG_KIND):
        noun, allowed = _KINDS[first]
        return Problem(_of(value, f"is {noun}", hidden), allowed)
    return _size_problem(error, hidden) or Problem(_other_message(error, hidden))


def problem_of_union(errors: Sequence[ErrorDetails], hidden: bool = False) -> Problem:
    """Describe a value that fits none of several kinds, with all allowed values.

    `errors` has one error per kind.
    """
    if len(errors) == 1:
        return problem_of(errors[0], hidden)
    allowed = filter(None, (problem_of(error).allowed for error in errors))
    what = _of(errors[0]["input"], "is not valid", hidden)
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
    return what if hidden else f"{_format_value(value)} {what}"


def _bound(bound: float) -> str:
    """Format a bound with all digits. Years have no thousands separator."""
    number = Decimal(str(bound)).normalize()
    return f"{number:,f}" if abs(number) >= 10_000 else f"{number:f}"


def _size_problem(error: ErrorDetails, hidden: bool) -> Problem | None:
    """Describe texts and lists that are too short, too long or in the wrong format."""
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "string_pattern_mismatch":
        form = f"text that matches {context['pattern']}"
        return Problem(_of(value, "has the wrong format", hidden), form)
    thing = "character" if kind.startswith("string") else "value"
    if kind.endswith("too_short"):
        minimum = pluralize(context["min_length"], thing)
        return Problem(_of(value, "is too short", hidden), f"{minimum} or more")
    if kind.endswith("too_long"):
        maximum = pluralize(context["max_length"], thing)
        return Problem(_of(value, "is too long", hidden), f"{maximum} or fewer")
    return None


def _other_message(error: ErrorDetails, hidden: bool) -> str:
    """Return the message of another check, with the value if there is only one."""
    message = redact(error["msg"], os.environ)
    message = message.removeprefix("Value error, ").replace("Invalid JSON: ", "is not valid JSON: ")
    message = _truncate(f"{message[:1].lower()}{message[1:]}")
    if hidden or not _is_single(error):
        return message
    value = error["input"]
    return f"{message}, but is empty" if value is None else f"{message}, not {_format_value(value)}"


def _is_single(error: ErrorDetails) -> bool:
    """Return whether an error concerns a single value.

    The input of a JSON syntax error is the whole text, which does not count as one.
    """
    several = isinstance(error["input"], dict | list | tuple | BaseModel)
    return not several and error["type"] != "json_invalid"


def _truncate(message: str) -> str:
    """Truncate a long message at a word boundary."""
    if len(message) <= MAX_MESSAGE_CHARS:
        return message
    return f"{message[: MAX_MESSAGE_CHARS - 4].rsplit(' ', 1)[0]} ..."


def _format_value(value: object, form: Callable[[object], str] = repr) -> str:
    """Format a value, truncated. Secrets are redacted before the value is truncated."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, str):
        # Redact first: after escaping, the start and end of a secret would no longer be found.
        text = form(redact(value, os.environ))
    else:
        text = redact(_format_scalar(value, form), os.environ)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[: MAX_VALUE_CHARS - 4]} ..."


def _format_scalar(value: object, form: Callable[[object], str]) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    try:
        return form(value)
    except ValueError:  # Python refuses to format larger integers.
        return f"a number of more than {sys.get_int_max_str_digits():,} digits"
