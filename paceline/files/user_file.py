"""The user's defaults in `paceline.toml`: in the working directory, else in the user's settings."""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import UserError, unknown_name, unreadable
from paceline.files.documents import read_text
from paceline.files.home import home_path

FILE_NAME = "paceline.toml"
MAX_FILE_BYTES = 1 << 20
KEYS: dict[str, tuple[tuple[type, ...], str]] = {
    "cluster": ((str,), "a name of the catalog, or the path of a cluster file"),
    "gpu": ((str,), 'a device such as "H100"'),
    "price": ((int, float, str), 'money per GPU-hour, such as 2.5 or "$2.5"'),
    "runs_dir": ((str,), "the path of a folder"),
}
"""Accepted types of each key, and what its value is."""


@dataclass(frozen=True)
class UserFile:
    """Defaults of a user; relative paths refer to the folder of the file."""

    path: Path
    cluster: str | None = None
    gpu: str | None = None
    price: str | None = None
    runs_dir: str | None = None


def user_file() -> UserFile | None:
    """Return the user's defaults, None without a file; raise UserError for an invalid one."""
    candidates = (Path(FILE_NAME), settings_folder() / FILE_NAME)
    path = next((each for each in candidates if each.is_file()), None)
    return path and _read(path)


def settings_folder() -> Path:
    """Return the folder of the user's settings, which need not exist."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "paceline"


def _read(path: Path) -> UserFile:
    try:
        values = tomllib.loads(read_text(path, MAX_FILE_BYTES))
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(str(path), error) from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(str(path), f"is not TOML: {error}") from error
    problems = [problem for key, value in values.items() if (problem := _problem(path, key, value))]
    if problems:
        first, *others = problems
        raise UserError(
            first.where, first.what, allowed=first.allowed, remedy=first.remedy, others=others
        )
    texts = {key: str(value) for key, value in values.items()}
    for key in ("cluster", "runs_dir"):
        if key in texts and (key == "runs_dir" or _is_path(texts[key])):
            texts[key] = str(path.parent / home_path(f"{path}: {key}", texts[key]))
    return UserFile(path, **texts)


def _is_path(cluster: str) -> bool:
    return cluster.endswith((".yaml", ".yml")) or "/" in cluster


def _problem(path: Path, key: str, value: Any) -> UserError | None:
    if key not in KEYS:
        return unknown_name(str(path), f"unknown key {key!r}", key, KEYS)
    types, meaning = KEYS[key]
    if isinstance(value, bool) or not isinstance(value, types) or value == "":
        return UserError(f"{path}: {key}", f"{value!r} is not {meaning}")
    return None
