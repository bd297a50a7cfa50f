"""Megatron-LM: pretrain_gpt.py of a checkout, or a Megatron-Core program; log format."""

from __future__ import annotations

from paceline.engines.megatron.log_format import LOG_FORMAT
from paceline.engines.megatron.start import (
    IMPORTS,
    REQUIREMENTS,
    job,
    missing,
    settings,
)
from paceline.engines.megatron.support import SUPPORT, unsupported

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
