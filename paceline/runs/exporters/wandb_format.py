"""A run as an offline run of Weights & Biases, which `wandb sync` uploads."""

from __future__ import annotations

import os
from pathlib import Path

import wandb

from paceline.runs.exporters.run_export import RunExport


def write(run: RunExport, out: Path) -> None:
    """Write `run` below the folder `out`; nothing is sent."""
    os.environ["WANDB_ERROR_REPORTING"] = "false"
    out.mkdir(parents=True, exist_ok=True)
    settings = wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,
        x_disable_stats=True,
        x_disable_meta=True,
        x_save_requirements=False,
    )
    tracker_run = wandb.init(
        mode="offline",
        dir=out,
        project="paceline",
        name=run.name,
        config={"status": run.status, **run.settings},
        settings=settings,
    )
    for step in run.rows():
        values = {f"step/{name}": value for name, value in step.values.items()}
        tracker_run.log({**values, "step/end_time_unix": step.time_unix}, step=step.index)
    tracker_run.summary.update(run.figures)
    tracker_run.finish()
