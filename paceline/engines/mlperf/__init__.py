"""MLPerf Training: a submission's own run.sub and config_*.sh started, and any MLPerf log read."""

from __future__ import annotations

from paceline.engines.mlperf.dialect import DIALECT
from paceline.engines.mlperf.launch import LOGS, job, missing, settings, unsupported

__all__ = ["DIALECT", "LOGS", "job", "missing", "settings", "unsupported"]
