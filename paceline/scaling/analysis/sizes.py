"""Sizes of sub-clusters as they are written: `1,2,4,...,N`."""

from __future__ import annotations

from paceline.core.errors import UserError
from paceline.core.units import there_are

FORM = "numbers, `...` for those between, N for all hosts"


def parse_sizes(
    text: str | None, num_hosts: int, remedy: str = "name more with --hosts"
) -> tuple[int, ...]:
    """The sizes that `text` names on so many hosts, rising; 1, 2, 4, ... and all for None.

    `...` goes on as the two numbers before it did: by their ratio where that is whole, else by
    their difference; beside it numbers beyond the hosts are left out. `N` is all hosts. Raises
    UserError for anything else, and with `remedy` for more nodes than hosts.
    """
    text = "1,2,4,...,N" if text is None else text
    words = [word.strip() for word in text.split(",") if word.strip()]
    sizes: list[int] = []
    for at, word in enumerate(words):
        if word == "...":
            end = _number(words[at + 1], text, num_hosts) if at + 1 < len(words) else num_hosts
            sizes += _between(sizes, end, text)
        else:
            sizes.append(_number(word, text, num_hosts))
    if not sizes:
        raise UserError(f"--sizes {text}", "names no size", allowed=FORM)
    if "..." in words:
        sizes = [size for size in sizes if size <= num_hosts] or sizes
    if max(sizes) > num_hosts:
        raise UserError(f"--sizes {text}", there_are(num_hosts, "host"), remedy=remedy)
    return tuple(sorted(set(sizes)))


def _number(word: str, text: str, num_hosts: int) -> int:
    if word in ("N", "n"):
        return num_hosts
    if not (word.isascii() and word.isdecimal() and len(word) < 7 and int(word)):
        raise UserError(f"--sizes {text}", f"{word!r} is no number of nodes", allowed=FORM)
    return int(word)


def _between(sizes: list[int], end: int, text: str) -> list[int]:
    """What follows the last two of `sizes` up to `end`."""
    if len(sizes) < 2 or sizes[-1] <= sizes[-2]:
        raise UserError(f"--sizes {text}", "... needs two rising numbers before it", allowed=FORM)
    before, last = sizes[-2:]
    between: list[int] = []
    while True:
        following = last * (last // before) if last % before == 0 else 2 * last - before
        if following > end:
            return between
        before, last = last, following
        between.append(following)
