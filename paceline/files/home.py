"""Paths in a user's home folder."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.core.errors import UserError


def home_path(where: str, text: str) -> Path:
    """Expand `~` or `~user` in a path.

    Raises UserError for a user without a home; `where` precedes the path in its message.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UserError(
            f"{where} {text}".strip(),
            "refers to a user without a home folder",
            remedy="give the absolute path",
        ) from error


def cache_folder() -> Path:
    """Return the folder of the user's caches: in $XDG_CACHE_HOME, else in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"
