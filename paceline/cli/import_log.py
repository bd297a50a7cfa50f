"""`paceline import`: a foreign log becomes a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import log_options as log
from paceline.cli import options
from paceline.cli.printing import print_report
from paceline.files.run_folder import runs_root
from paceline.logs.facts import UserSettings
from paceline.runs.flow import command_line
from paceline.runs.log_import import import_log as store


def import_log(
    path: Annotated[Path, typer.Argument(help="A log file, plain or .gz.")],
    engine: log.EngineName = None,
    recipe: log.RecipeName = None,
    model: log.ModelName = None,
    device: log.DeviceName = None,
    gpus: log.NumDevices = None,
    global_batch: log.GlobalBatch = None,
    seq_len: log.SeqLen = None,
    dtype: log.DtypeName = None,
    convention: log.ConventionName = None,
    tokens: log.TotalTokens = None,
    window: log.WindowRule = None,
    tag: options.Tag = None,
    again: Annotated[
        bool, typer.Option("--again", help="Import it although it was imported before.")
    ] = False,
    runs_dir: options.RunsDir = None,
    form: options.ReportForm = options.ReportFormat.text,
    as_json: options.Json = False,
) -> None:
    """Store a training log as a run that `list`, `show`, `report` and `compare` know.

    The raw log is copied into the run folder, secrets left out, so that a better reader can be
    tried on it later. What the log does not say is added with the options, as for `parse`.

    Example: paceline import train.log --model llama31-8b --device B200 --gpus 8 --seq-len 8192
    """
    facts = UserSettings(
        engine,
        recipe,
        model,
        device,
        gpus,
        global_batch,
        seq_len,
        dtype,
        convention,
        tokens,
        window,
    )
    report = store(path, facts, runs_root(runs_dir), command_line(), tag=tag, again=again)
    print_report(report, options.ReportFormat.json if as_json else form)
