"""`paceline runs export`: export a run to a tracker, or a checkpoint to Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import Json, RunsDir
from paceline.cli.output import TableForm, TableFormat, emit_table
from paceline.cli.terminal import echo
from paceline.core.errors import UserError, did_you_mean
from paceline.core.units import si
from paceline.files.run_folder import find_run, runs_root
from paceline.report.document import Column
from paceline.runs.export import ExportDtype, ExportedModel, ExportRequest, export_checkpoint
from paceline.runs.exporters import EXPORTERS, export_run

GIGA = 1e9


def export(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CHECKPOINT",
            help="Run, whose latest checkpoint is exported, or the folder of a checkpoint.",
        ),
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FOLDER|FORMAT",
            help="New folder for the exported model; with --out: "
            f"{', '.join([*EXPORTERS][:-1])} or {[*EXPORTERS][-1]}.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="PATH",
            help="Export the steps and figures of the run to this folder (openmetrics: file).",
            show_default=False,
        ),
    ] = None,
    merged: Annotated[
        bool, typer.Option("--merged", help="Merge the adapters into the base weights.")
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Data type of all tensors: fp32, bf16 or fp16; default: as in the checkpoint.",
            show_default=False,
        ),
    ] = None,
    base_model: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Model folder that supplies the tokenizer and other settings; default: the "
            "model that the training started from.",
            show_default=False,
        ),
    ] = None,
    shard_gb: Annotated[
        float, typer.Option(min=1e-6, metavar="GB", help="Maximum size of one weights file.")
    ] = 5.0,
    runs_dir: RunsDir = None,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
) -> None:
    """Export a run to TensorBoard, W&B, MLflow or OpenMetrics, or a checkpoint to Hugging Face.

    With --out, the settings, the steps and the figures of a run are exported. Nothing is uploaded.

    Without it, a checkpoint is exported as a model: safetensors, their index, config.json.
    Supports OPT, GPT-2, Llama and FLUX.1, from a checkpoint of any layout. A training of adapters
    is exported as adapters in the format of peft, or as a whole model with --merged.

    Examples:

      paceline runs export last --to tensorboard --out tb

      paceline runs export last --to openmetrics --out /var/lib/node_exporter/paceline.prom

      paceline runs export last --to model

      paceline runs export runs/RUN/checkpoints/step-000040 --to model --dtype bf16

      paceline runs export lora --to merged --merged
    """
    if to in EXPORTERS or out is not None:
        if out is None:
            remedy = f"--to ./{to} exports a checkpoint to a folder"
            raise UserError(f"--to {to}", "needs --out", remedy=remedy)
        if to not in EXPORTERS:
            raise UserError(
                f"--to {to}",
                "is not a format, which --out requires",
                allowed=", ".join(EXPORTERS),
                remedy=did_you_mean(to, EXPORTERS) or "leave out --out to export a checkpoint",
            )
        export_run(find_run(runs_root(runs_dir), run), to, out)
        echo(str(out))
        return
    model = export_checkpoint(
        run,
        runs_root(runs_dir),
        ExportRequest(
            to=to,
            merged=merged,
            dtype=_dtype(dtype),
            shard_bytes=max(1, int(shard_gb * GIGA)),
            like=None if base_model is None else str(base_model),
        ),
    )
    form = TableFormat.json if as_json else form
    columns = [
        Column("name", "file"),
        Column("bytes", "size", lambda value: si(value, "B"), "right"),
    ]
    rows = [file.model_dump() for file in model.files]
    emit_table(rows, columns, form, document=model.model_dump(mode="json"))
    if form is TableFormat.text:
        echo(_sentence(model))


def _dtype(name: str | None) -> ExportDtype | None:
    if name is None or name in ("fp32", "bf16", "fp16"):
        return name
    raise UserError(f"--dtype {name}", "is unknown", allowed="fp32, bf16, fp16")


def _sentence(model: ExportedModel) -> str:
    tokenizer_source = f"; settings and tokenizer of {model.like}" if model.like else ""
    dtypes = ", ".join(model.dtypes)
    return f"{model.folder}: {model.form} after step {model.step}, {dtypes}{tokenizer_source}"
