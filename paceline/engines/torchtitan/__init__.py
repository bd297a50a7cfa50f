"""torchtitan: job creation and log format."""

from paceline.engines.torchtitan.arguments import (
    IMPORTS,
    REQUIREMENTS,
    SUPPORT,
    job,
    missing,
    settings,
    unsupported,
)
from paceline.engines.torchtitan.log_format import LOG_FORMAT

__all__ = [
    "IMPORTS",
    "LOG_FORMAT",
    "REQUIREMENTS",
    "SUPPORT",
    "job",
    "missing",
    "settings",
    "unsupported",
]
