"""Megatron-Bridge: a performance recipe of its checkout by its own command line; its log."""

from __future__ import annotations

from paceline.engines.megatron_bridge.log_format import LOG_FORMAT
from paceline.engines.megatron_bridge.start import job, missing, settings, unsupported

__all__ = ["LOG_FORMAT", "OUTSIDE", "job", "missing", "settings", "unsupported"]

OUTSIDE = "NVIDIA's image of NeMo, or a checkout of Megatron-Bridge and what that imports"
