"""torchtitan as an engine, and how its log reads."""

from paceline.engines.torchtitan.arguments import (
    IMPORTS,
    REQUIREMENTS,
    job,
    missing,
    settings,
    unsupported,
)
from paceline.engines.torchtitan.dialect import DIALECT

__all__ = ["DIALECT", "IMPORTS", "REQUIREMENTS", "job", "missing", "settings", "unsupported"]
