"""NeMo 1 by NVIDIA's published procedure; its log reads as that of `nemo1`."""

from __future__ import annotations

from paceline.engines.nemo.launch import LOGS, job, missing, settings, unsupported

__all__ = ["LOGS", "job", "missing", "settings", "unsupported"]
