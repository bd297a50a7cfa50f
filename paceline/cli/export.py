"""`paceline export`: what the native trainer trained, as a model's folder of the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import Json, RunsDir
from paceline.cli.output import TableForm, TableFormat, emit_table
from paceline.cli.terminal import echo
from paceline.core.errors import UserError
from paceline.core.units import si
from paceline.files.run_folder import runs_root
from paceline.report.document import Column
from paceline.runs.export import ExportDtype, ExportedModel, ExportRequest, export_checkpoint

GIGA = 1e9


def export(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CHECKPOINT",
            help="A run, of which its latest checkpoint is meant, or the folder of a checkpoint.",
        ),
    ],
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="Where; a new folder.")],
    merged: Annotated[
        bool, typer.Option("--merged", help="Add adapters to the weights that they adapt.")
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="fp32, bf16 or fp16 for all tensors; default: each as the checkpoint has it.",
            show_default=False,
        ),
    ] = None,
    base_model: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="A model's folder whose further settings and tokenizer are taken over; default "
            "the one that the training began with.",
            show_default=False,
        ),
    ] = None,
    shard_gb: Annotated[
        float, typer.Option(min=1e-6, metavar="GB", help="Size of one file at most.")
    ] = 5.0,
    runs_dir: RunsDir = None,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
) -> None:
    """Write what was trained as Hugging Face has models: safetensors, their index, config.json.

    OPT, GPT-2, Llama and FLUX.1 from a checkpoint of any layout. Of a training of adapters it
    writes these alone, as peft has them, or with --merged the whole model.

    Examples:

      paceline export last --to model

      paceline export runs/RUN/checkpoints/step-000040 --to model --dtype bf16

      paceline export lora --to merged --merged
    """
    exported = export_checkpoint(
        run,
        runs_root(runs_dir),
        ExportRequest(
            to=str(to),
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
    rows = [file.model_dump() for file in exported.files]
    emit_table(rows, columns, form, document=exported.model_dump(mode="json"))
    if form is TableFormat.text:
        echo(_sentence(exported))


def _dtype(name: str | None) -> ExportDtype | None:
    if name is None or name in ("fp32", "bf16", "fp16"):
        return name
    raise UserError(f"--dtype {name}", "is unknown", allowed="fp32, bf16, fp16")


def _sentence(exported: ExportedModel) -> str:
    taken = f"; settings and tokenizer of {exported.like}" if exported.like else ""
    dtypes = ", ".join(exported.dtypes)
    return f"{exported.folder}: {exported.form} after step {exported.step}, {dtypes}{taken}"
