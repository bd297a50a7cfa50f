"""Hugging Face Trainer (transformers with accelerate): job creation and log format."""

from paceline.engines.hf_trainer.arguments import (
    IMPORTS,
    REQUIREMENTS,
    SUPPORT,
    job,
    missing,
    settings,
    unsupported,
)
from paceline.engines.hf_trainer.log_format import LOG_FORMAT

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
