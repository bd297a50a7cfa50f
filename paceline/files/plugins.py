"""Plug-ins: objects that other distributions declare as entry points.

A plug-in that cannot be used gives one warning and is left out; it never stops Paceline.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from typing import Any

LOG_FORMATS = "paceline.log_formats"
ENGINES = "paceline.engines"
DEVICES = "paceline.devices"


class PluginWarning(UserWarning):
    """Warning about a plug-in that is left out."""


@cache
def plugins(group: str, problem_of: Callable[[str, Any], str | None]) -> dict[str, Any]:
    """Return the objects of an entry-point group by name.

    `problem_of(name, value)` returns why an object cannot be used, or None. It may raise anything.
    """
    usable: dict[str, Any] = {}
    value: Any = None
    for point in sorted(entry_points(group=group), key=lambda point: (point.name, point.value)):
        try:
            value = point.load()
            name_is_taken = "another plug-in has this name" if point.name in usable else None
            problem = name_is_taken or problem_of(point.name, value)
        except Exception as error:
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if problem is None:
            usable[point.name] = value
        else:
            warnings.warn(
                f"plug-in {point.name!r} ({group}, {point.value}) is left out: {problem}",
                PluginWarning,
                stacklevel=2,
            )
    return usable
