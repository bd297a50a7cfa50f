"""Paths that begin with somebody's home folder."""

from __future__ import annotations

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
