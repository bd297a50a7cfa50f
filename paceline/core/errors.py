"""What a user is told when something is wrong, and the exit code that goes with it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_OK = 0
EXIT_BAD_INPUT = 1
EXIT_SYSTEM_FAULT = 2
EXIT_GATE_FAILED = 3
EXIT_INCOMPLETE = 4


class PacelineError(Exception):
    """One sentence for the user: `where: what; allowed; remedy`. `hosts` are those at fault.

    `others` are further problems of the same input, a line each.
    """

    exit_code = EXIT_SYSTEM_FAULT

    def __init__(
        self,
        where: str,
        what: str,
        *,
        allowed: str | None = None,
        remedy: str | None = None,
        hosts: Iterable[str] = (),
        others: Iterable[PacelineError] = (),
    ) -> None:
        self.hosts = tuple(hosts)
        self.where, self.what, self.allowed, self.remedy = where, what, allowed, remedy
        parts = [f"{where}: {what}"]
        parts += [f"allowed: {allowed}"] if allowed else []
        parts += [remedy] if remedy else []
        super().__init__("\n".join(["; ".join(parts), *map(str, others)]))


class UserError(PacelineError):
    """The input is wrong (exit code 1)."""

    exit_code = EXIT_BAD_INPUT


class SystemFaultError(PacelineError):
    """The machine, not the input, is at fault (exit code 2)."""

    exit_code = EXIT_SYSTEM_FAULT


class IncompleteError(PacelineError):
    """What was asked for did not come to an answer, and nothing is wrong with it (exit code 4)."""

    exit_code = EXIT_INCOMPLETE


def unreadable(where: str, error: OSError | UnicodeDecodeError) -> UserError:
    """The refusal of a file that cannot be read, or that holds no text."""
    if isinstance(error, UnicodeDecodeError):
        return UserError(where, "is not UTF-8 text", remedy="save it as UTF-8")
    return UserError(where, f"cannot be read: {error.strerror or error}")


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`did you mean 'x'?` for the closest of `choices`, or an empty string.

    Of several that differ in capitals alone it is the first, which is the usual one.
    """
    spelled: dict[str, str] = {}
    for choice in choices:
        if choice == word:
            return f"did you mean {word!r}?"
        spelled.setdefault(choice.lower(), choice)
    close = difflib.get_close_matches(word.lower(), spelled, n=1, cutoff=0.6)
    return f"did you mean {spelled[close[0]]!r}?" if close else ""
