"""DeepSpeed-Chat's supervised fine-tuning: job creation and log format."""

from __future__ import annotations

from paceline.core.run import RunSpec
from paceline.engines.deepspeed_chat.launch import IMPORTS, REQUIREMENTS, job, missing, settings
from paceline.engines.deepspeed_chat.log_format import LOG_FORMAT
from paceline.engines.deepspeed_chat.support import SUPPORT, unsupported

__all__ = [
    "IMPORTS",
    "LOG_FORMAT",
    "REQUIREMENTS",
    "SUPPORT",
    "job",
    "last_step",
    "missing",
    "settings",
    "unsupported",
]


def last_step(spec: RunSpec) -> int:
    """Return warmup plus timed steps: the log counts both, and warmup comes first."""
    return spec.training.lr_schedule.warmup + spec.training.steps
