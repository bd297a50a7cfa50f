"""NeMo 1 by NVIDIA's published procedure; its log reads as that of `nemo1`."""

from __future__ import annotations

from paceline.engines.nemo.launch import job, missing, settings, unsupported

__all__ = ["COMMANDS", "OUTSIDE", "TITLE", "job", "missing", "settings", "unsupported"]

TITLE = "NeMo 1, as NVIDIA publishes it"
COMMANDS = ("sbatch",)
OUTSIDE = "Slurm with Pyxis; the image of NeMo 24.09 in STAGE_PATH"
