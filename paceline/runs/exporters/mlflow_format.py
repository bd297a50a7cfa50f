"""A run in a local file store of MLflow."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

# Mlflow reads both when it is imported.
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from paceline.runs.exporters.run_export import RunExport

EXPERIMENT = "paceline"
MAX_METRICS = 1000
"""Maximum number of metrics of one request."""
MAX_PARAMS = 100
MAX_TEXT = 500


def write(run: RunExport, out: Path) -> None:
    """Write steps and final figures as metrics and the settings as parameters."""
    client = MlflowClient(tracking_uri=out.resolve().as_uri())
    experiment = client.get_experiment_by_name(EXPERIMENT)
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(EXPERIMENT)
    start = round(run.start_unix * 1e3)
    entry = client.create_run(experiment_id, start_time=start, run_name=run.name)
    run_id, end, last_step = entry.info.run_id, start, 0
    metrics: list[Metric] = []
    for step in run.rows():
        end, last_step = round(step.time_unix * 1e3), step.index
        metrics += [Metric(f"step.{name}", v, end, last_step) for name, v in step.values.items()]
    metrics += [Metric(name, value, end, last_step) for name, value in run.figures.items()]
    remaining = iter(metrics)
    while batch := list(islice(remaining, MAX_METRICS)):
        client.log_batch(run_id, metrics=batch)
    params = iter([Param(name, str(value)[:MAX_TEXT]) for name, value in run.settings.items()])
    while group := list(islice(params, MAX_PARAMS)):
        client.log_batch(run_id, params=group)
    client.log_batch(run_id, tags=[RunTag("paceline.status", run.status)])
    client.set_terminated(run_id, "FINISHED" if run.status == "ok" else "FAILED", end)
