"""What every page begins with: the verdict, the answer in a sentence, and four figures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from paceline.core.text import one_line
from paceline.report.figures import split_unit

Tone = Literal["good", "alert", "plain"]
"""The colour of a verdict."""
UNKNOWN = "not known"
"""What stands in place of a figure that there is none of; a line below it says why."""


@dataclass(frozen=True)
class Card:
    """One large figure with what stands around it."""

    label: str
    number: str
    unit: str
    sure: str
    """The interval and its kind, else the spread, else empty."""
    lines: tuple[str, ...]


@dataclass(frozen=True)
class PageHead:
    """The upper end of a page: what it is of, what the answer is, and the figures behind it."""

    eyebrow: str
    """What kind of page it is."""
    name: str
    chip: str
    """The verdict in a few words; empty where nothing is judged."""
    tone: Tone
    setup: tuple[str, ...] = ()
    sentences: tuple[str, ...] = ()
    cards: tuple[Card, ...] = ()
    title: str = ""
    """Of the browser's window, the name if empty."""


def card(label: str, text: str, sure: str = "", lines: Iterable[str | None] = ()) -> Card:
    """A card whose figure is split from its unit; lines that are None or empty are left out."""
    number, unit = split_unit(text)
    return Card(label, number, unit, one_line(sure), tuple(one_line(x) for x in lines if x))


def unknown_card(label: str, why: str, lines: Iterable[str | None] = ()) -> Card:
    """A card that says that there is no figure, and why."""
    return card(label, UNKNOWN, "", (why, *lines))
