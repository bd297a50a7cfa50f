"""Where a profile's breakdown of a step enters: parts that steps alone do not tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.core.errors import UserError
from paceline.files.documents import parse_json, read_text


def profiled_parts(path: Path) -> dict[str, float]:
    """Seconds of a step by part, from what `paceline profile --json` printed.

    Raises UserError where the file holds no such parts.
    """
    try:
        document: Any = parse_json(read_text(path))
    except (OSError, ValueError) as error:
        raise UserError(str(path), f"cannot be read as JSON: {error}") from error
    parts = document.get("parts") if isinstance(document, dict) else None
    if not isinstance(parts, dict) or not parts:
        raise UserError(
            str(path), "holds no `parts` of a step", allowed="what `paceline profile --json` prints"
        )
    numbers = {str(name): value for name, value in parts.items() if isinstance(value, int | float)}
    return {name: float(value) for name, value in numbers.items() if value >= 0}
