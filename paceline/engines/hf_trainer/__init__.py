"""Hugging Face's Trainer (transformers on accelerate) as an engine, and how its log reads."""

from paceline.engines.hf_trainer.arguments import (
    IMPORTS,
    REQUIREMENTS,
    job,
    missing,
    settings,
    unsupported,
)
from paceline.engines.hf_trainer.dialect import DIALECT

__all__ = ["DIALECT", "IMPORTS", "REQUIREMENTS", "job", "missing", "settings", "unsupported"]
