"""Paths that begin with somebody's home folder."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.core.errors import UserError


def home_path(where: str, text: str) -> Path:
    """`text` as a path with its `~` or `~user` filled in.

    Raises UserError, in which `where` goes before the path, for a user whose home nobody knows.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UserError(
            f"{where} {text}".strip(),
            "names a user without a home",
            remedy="give the folder's whole path",
        ) from error


def cache_folder() -> Path:
    """Where a user's caches lie, which anybody may delete: $XDG_CACHE_HOME, else ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"
