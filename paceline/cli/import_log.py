"""`paceline import`: a foreign log becomes a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.log_options import (
    ConventionName,
    DeviceName,
    DtypeName,
    EngineName,
    GlobalBatch,
    ModelName,
    NumDevices,
    RecipeName,
    SeqLen,
    TotalTokens,
    WindowRule,
)
from paceline.cli.options import Json, ReportFormat, RunsDir


def import_log(
    path: Annotated[Path, typer.Argument(help="A log file, plain or .gz.")],
    engine: EngineName = None,
    recipe: RecipeName = None,
    model: ModelName = None,
    device: DeviceName = None,
    gpus: NumDevices = None,
    global_batch: GlobalBatch = None,
    seq_len: SeqLen = None,
    dtype: DtypeName = None,
    convention: ConventionName = None,
    tokens: TotalTokens = None,
    window: WindowRule = None,
    tag: Annotated[str | None, typer.Option(help="A name under which to find the run.")] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Import it although it was imported before.")
    ] = False,
    runs_dir: RunsDir = None,
    form: Annotated[ReportFormat, typer.Option("--format")] = ReportFormat.text,
    as_json: Json = False,
) -> None:
    """Store a training log as a run that `list`, `show`, `report` and `compare` know.

    The raw log is copied into the run folder and never edited, so that a better reader can be
    tried on it later. What the log does not say is added with the options, as for `parse`.

    Example: paceline import train.log --model llama31-8b --device B200 --gpus 8 --seq-len 8192
    """
    from paceline.cli.printing import print_report
    from paceline.files.run_folder import runs_root
    from paceline.logs.facts import Given
    from paceline.runs.flow import command_line
    from paceline.runs.log_import import import_log as store

    given = Given(
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
    report = store(path, given, runs_root(runs_dir), command_line(), tag=tag, again=again)
    print_report(report, ReportFormat.json if as_json else form)
