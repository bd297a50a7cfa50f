"""`paceline runs export`: write a run in the format of a tracker, or its weights as a model."""

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
MODEL = "huggingface"
FORMATS = (*EXPORTERS, MODEL)


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
            metavar="FORMAT",
            help=f"{', '.join(FORMATS[:-1])} or {MODEL} (the weights of a checkpoint).",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="PATH",
            help="Folder to write; for openmetrics a file, for huggingface a new folder.",
        ),
    ],
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
    """Write a run for TensorBoard, W&B, MLflow or Prometheus, or its weights for Hugging Face.

    A tracker gets the settings, steps and figures of a run. Nothing is uploaded.

    A model is safetensors, their index and config.json. Supports OPT, GPT-2, Llama and FLUX.1, from
    a checkpoint of any layout. Adapters are written in the format of peft, or as a whole model with
    --merged.

    Examples:

      paceline runs export last --to tensorboard --out tb

      paceline runs export last --to openmetrics --out /var/lib/node_exporter/paceline.prom

      paceline runs export last --to huggingface --out model

      paceline runs export runs/RUN/checkpoints/step-000040 --to huggingface --out model
    """
    if to not in FORMATS:
        raise UserError(
            f"--to {to}",
            "is not a format",
            allowed=", ".join(FORMATS),
            remedy=did_you_mean(to, FORMATS) or f"for a model: --to {MODEL} --out {to}",
        )
    if to != MODEL:
        if merged or dtype or base_model:
            options = "--merged, --dtype and --base-model"
            raise UserError(f"--to {to}", f"takes no {options}, which are for --to {MODEL}")
        export_run(find_run(runs_root(runs_dir), run), to, out)
        echo(str(out))
        return
    model = export_checkpoint(
        run,
        runs_root(runs_dir),
        ExportRequest(
            to=str(out),
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
