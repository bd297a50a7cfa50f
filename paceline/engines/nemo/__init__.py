"""NVIDIA's published procedures: of NeMo 1 (form `launch`), and of today by llmb-run (`llmb`).

Their logs read as those of `nemo1`, and of `megatron_bridge` or `nemo2`.
"""

from __future__ import annotations

from paceline.engines.nemo.forms import job, missing, settings, unsupported

__all__ = ["COMMANDS", "OUTSIDE", "TITLE", "job", "missing", "settings", "unsupported"]

TITLE = "NeMo, as NVIDIA publishes it"
COMMANDS = ("sbatch",)
OUTSIDE = "Slurm with Pyxis; the image of NeMo 24.09 in STAGE_PATH, or llmb-run's LLMB_INSTALL"
