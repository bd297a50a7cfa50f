"""Export of a checkpoint of the native trainer to a Hugging Face model folder."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from paceline.core.errors import SystemFaultError, UserError
from paceline.core.value import NonNegativeInt, PositiveInt, Value
from paceline.files.documents import parse_json
from paceline.files.programs import last_line, run_program
from paceline.files.temporary import temporary_folder
from paceline.files.trainer_program import write_program
from paceline.runs.checkpoints import HUB_CONFIG, find_checkpoint

PROGRAM = "programs.export"
ExportDtype = Literal["fp32", "bf16", "fp16"]


class ExportRequest(Value):
    """Options of an export."""

    to: str
    """Target folder."""
    merged: bool = False
    """Merge LoRA adapters into the weights, instead of exporting them alone."""
    dtype: ExportDtype | None = None
    """Data type of all tensors; null keeps that of the checkpoint."""
    shard_bytes: PositiveInt = 5_000_000_000
    """Maximum size of a safetensors file."""
    like: str | None = None
    """Model folder whose config.json and tokenizer are copied."""


class ExportedFile(Value):
    """Safetensors file of an exported model."""

    name: str
    bytes: NonNegativeInt


class ExportedModel(Value):
    """Description of the exported model."""

    checkpoint: str
    step: PositiveInt
    """Step after which the checkpoint was saved."""
    folder: str
    form: str
    """model_type of config.json, `flux`, or `adapters`."""
    dtypes: tuple[str, ...]
    """Data types of the tensors, in torch's names."""
    like: str | None
    """Model folder whose other settings and tokenizer were copied."""
    files: tuple[ExportedFile, ...]


def export_checkpoint(name: str, runs: Path, request: ExportRequest) -> ExportedModel:
    """Export a run's latest checkpoint, or the one at a path, to a new folder.

    Raises UserError for a checkpoint that is corrupt or has no Hugging Face format, and
    SystemFaultError if it cannot be read or written.
    """
    target = Path(request.to).absolute()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UserError("--out", f"{target} exists already", remedy="use a new folder")
    if request.like is not None and not (Path(request.like) / HUB_CONFIG).is_file():
        raise UserError("--base-model", f"{request.like} has no {HUB_CONFIG}")
    if find_spec("torch") is None:
        raise UserError("torch", "is not installed", remedy="pip install 'paceline[native]'")
    checkpoint = find_checkpoint("export", name, runs)
    question = {**request.model_dump(), "to": str(target), "checkpoint": str(checkpoint)}
    if request.like is not None:
        question["like"] = str(Path(request.like).absolute())
    answer = _answer(question)
    if answer["event"] == "refused":
        raise UserError("export", answer["reason"])
    if answer["event"] == "failed":
        raise SystemFaultError("export", answer["reason"], remedy="no partial export was left")
    return ExportedModel.model_validate({k: v for k, v in answer.items() if k != "event"})


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    """Return the line that the trainer's program prints."""
    with temporary_folder() as folder:
        start = str(write_program(PROGRAM, Path(folder)))
        process = run_program([sys.executable, start, json.dumps(question)])
    lines = [line for line in process.stdout.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        raise SystemFaultError("export", last_line(process.stderr))
    try:
        return parse_json(lines[-1])
    except ValueError as error:
        raise SystemFaultError("export", f"printed no JSON: {error}") from error
