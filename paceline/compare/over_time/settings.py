"""Values as flat settings, and the settings in which several of them differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from pydantic import BaseModel

IGNORED_SETTINGS = ("cluster.name", "cluster.device_memory_bytes", "references")
"""Parts of a RunSpec that do not affect what runs."""


def flat_settings(value: BaseModel) -> dict[str, str]:
    """Return every setting by its dotted name, as text: `layout.zero_stage` -> `3`."""
    return dict(_flat(value.model_dump(mode="json"), ""))


def distinguishing(settings: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Return, for each set of settings, those in which the sets differ."""
    names = dict.fromkeys(name for flat in settings for name in flat)
    differing = [
        name
        for name in names
        if len({flat.get(name) for flat in settings}) > 1 and not name.startswith(IGNORED_SETTINGS)
    ]
    return [{name: flat[name] for name in differing if name in flat} for flat in settings]


def _flat(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, part in cast("dict[str, Any]", value).items():
            yield from _flat(part, f"{path}.{name}" if path else name)
    elif value is not None:
        yield path, str(value).lower() if isinstance(value, bool) else str(value)
