"""MLPerf Training: submissions started by their run.sub and config_*.sh, and the log format."""

from __future__ import annotations

from paceline.engines.mlperf.launch import SUPPORT, job, missing, settings, unsupported
from paceline.engines.mlperf.log_format import LOG_FORMAT

__all__ = [
    "COMMANDS",
    "ENDS_AT_TARGET",
    "LOG_FORMAT",
    "OUTSIDE",
    "SUPPORT",
    "job",
    "missing",
    "settings",
    "unsupported",
]

ENDS_AT_TARGET = True
COMMANDS = ("bash", "sbatch")
OUTSIDE = "Slurm with Pyxis, and the benchmark's image, run.sub, config_*.sh and data"
