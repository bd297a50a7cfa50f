"""Megatron-DeepSpeed: pretrain_gpt.py of a checkout with DeepSpeed's settings; its log."""

from __future__ import annotations

from paceline.engines.megatron_deepspeed.dialect import DIALECT
from paceline.engines.megatron_deepspeed.start import job, missing, settings, unsupported

__all__ = ["DIALECT", "OUTSIDE", "job", "missing", "settings", "unsupported"]

OUTSIDE = "a checkout of Megatron-DeepSpeed, and in its interpreter what that imports"
