"""Versions for `paceline --version`."""

from __future__ import annotations

import platform
from importlib import metadata

from paceline import __version__


def versions() -> dict[str, str]:
    """Return the versions of Paceline, Python and torch by name."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "not installed"
    return {"paceline": __version__, "python": platform.python_version(), "torch": torch}
