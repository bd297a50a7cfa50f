"""Megatron-DeepSpeed: pretrain_gpt.py of a checkout with DeepSpeed's settings; its log."""

from __future__ import annotations

from paceline.engines.megatron_deepspeed.log_format import LOG_FORMAT
from paceline.engines.megatron_deepspeed.start import job, missing, settings, unsupported

__all__ = ["LOG_FORMAT", "OUTSIDE", "job", "missing", "settings", "unsupported"]

OUTSIDE = "a checkout of Megatron-DeepSpeed, and in its interpreter what that imports"
