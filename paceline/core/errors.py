"""Errors with a message for the user, and their exit codes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_OK = 0
EXIT_BAD_INPUT = 1
EXIT_SYSTEM_FAULT = 2
EXIT_GATE_FAILED = 3
EXIT_INCOMPLETE = 4


class PacelineError(Exception):
    """An error with one sentence for the user: `where: what; allowed; remedy`.

    `hosts` are the hosts that caused it. `others` are further problems of the same input, one line
    each.
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
    """Invalid input (exit code 1)."""

    exit_code = EXIT_BAD_INPUT


class SystemFaultError(PacelineError):
    """A fault of the machine, not of the input (exit code 2)."""

    exit_code = EXIT_SYSTEM_FAULT


class IncompleteError(PacelineError):
    """A valid request that could not be completed (exit code 4)."""

    exit_code = EXIT_INCOMPLETE


def unreadable(where: str, error: OSError | UnicodeDecodeError) -> UserError:
    """Return the error for a file that cannot be read or is not UTF-8 text."""
    if isinstance(error, UnicodeDecodeError):
        return UserError(where, "is not UTF-8 text", remedy="save it as UTF-8")
    return UserError(where, f"cannot be read: {error.strerror or error}")


MAX_NAMES_LISTED = 8
"""Names that an error lists. Of more, it names the command that lists them or the closest ones."""

MIN_SIMILARITY = 0.5
"""Similarity from which on a name is listed before names that come earlier."""


def unknown_name(
    where: str,
    what: str,
    word: str,
    names: Iterable[str],
    *,
    aliases: Iterable[str] = (),
    listing: str | None = None,
    if_none: str | None = None,
) -> UserError:
    """Return the error for a `word` that is not one of `names`.

    It suggests the closest of `names` and `aliases`. `listing` is the command that lists the names
    if they are too many for an error; `if_none` describes that there are no names.
    """
    names = list(dict.fromkeys(names))
    hints = [did_you_mean(word, [*names, *aliases])]
    if len(names) > MAX_NAMES_LISTED and listing:
        hints.append(f"`{listing}` lists them")
        names = []
    allowed = few_names(names, word) or (None if listing else if_none)
    return UserError(where, what, allowed=allowed, remedy=" ".join(filter(None, hints)) or None)


def few_names(names: Iterable[str], word: str = "") -> str:
    """Return the names, comma-separated; of too many, those similar to `word` or the first ones."""
    names = list(names)
    if len(names) <= MAX_NAMES_LISTED:
        return ", ".join(names)
    matcher = difflib.SequenceMatcher(b=word.lower())
    by_similarity = sorted(names, key=lambda name: -_similarity(matcher, name))
    listed_names = [name for name in names if name in by_similarity[:MAX_NAMES_LISTED]]
    return f"{', '.join(listed_names)} and {len(names) - len(listed_names)} more"


def _similarity(matcher: difflib.SequenceMatcher[str], name: str) -> float:
    matcher.set_seq1(name.lower())
    ratio = matcher.ratio()
    return ratio if ratio >= MIN_SIMILARITY else 0.0


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return `did you mean 'x'?` for the closest of `choices`, or an empty string.

    If several choices differ only in case, the first one is suggested. List the common spelling
    first.
    """
    originals: dict[str, str] = {}
    for choice in choices:
        if choice == word:
            return f"did you mean {word!r}?"
        originals.setdefault(choice.lower(), choice)
    close = difflib.get_close_matches(word.lower(), originals, n=1, cutoff=0.6)
    return f"did you mean {originals[close[0]]!r}?" if close else ""
