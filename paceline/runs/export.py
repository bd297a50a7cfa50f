"""A checkpoint of the native trainer becomes a model's folder as the hub has them."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from paceline.core.errors import SystemFaultError, UserError
from paceline.core.value import NonNegativeInt, PositiveInt, Value
from paceline.files.trainer_program import write_program
from paceline.machines.programs import last_line, run_program
from paceline.runs.checkpoints import HUB_CONFIG, find_checkpoint

PROGRAM = "programs.export"
ExportDtype = Literal["fp32", "bf16", "fp16"]


class ExportRequest(Value):
    """What is asked of an export."""

    to: str
    """The folder."""
    merged: bool = False
    """Adapters added to the weights that they adapt, instead of alone."""
    dtype: ExportDtype | None = None
    """Of all tensors; null keeps each as the checkpoint has it."""
    shard_bytes: PositiveInt = 5_000_000_000
    """Of a file of tensors at most."""
    like: str | None = None
    """A model's folder whose config.json and tokenizer are taken over."""


class ExportedFile(Value):
    """A file of tensors."""

    name: str
    bytes: NonNegativeInt


class ExportedModel(Value):
    """What was written."""

    checkpoint: str
    step: PositiveInt
    """After which the checkpoint was saved."""
    folder: str
    form: str
    """model_type of config.json, `flux`, or `adapters`."""
    dtypes: tuple[str, ...]
    """Of the tensors, as torch names them."""
    like: str | None
    """The model whose further settings and tokenizer were taken over."""
    files: tuple[ExportedFile, ...]


def export_checkpoint(name: str, runs: Path, asked: ExportRequest) -> ExportedModel:
    """Write a run's latest checkpoint, or the one that a path names, to a new folder.

    Raises UserError for a checkpoint that is broken or has no form in the hub, SystemFaultError
    when it cannot be read or written.
    """
    target = Path(asked.to).absolute()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UserError("--to", f"{target} is there already", remedy="name a new folder")
    if asked.like is not None and not (Path(asked.like) / HUB_CONFIG).is_file():
        raise UserError("--base-model", f"{asked.like} has no {HUB_CONFIG}")
    if find_spec("torch") is None:
        raise UserError("torch", "is not installed", remedy="pip install 'paceline[native]'")
    checkpoint = find_checkpoint("export", name, runs)
    question = {**asked.model_dump(), "to": str(target), "checkpoint": str(checkpoint)}
    if asked.like is not None:
        question["like"] = str(Path(asked.like).absolute())
    answer = _answer(question)
    if answer["event"] == "refused":
        raise UserError("export", answer["reason"])
    if answer["event"] == "failed":
        raise SystemFaultError("export", answer["reason"], remedy="nothing was left half done")
    return ExportedModel.model_validate({k: v for k, v in answer.items() if k != "event"})


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    """The line that the trainer's program prints."""
    with TemporaryDirectory(prefix="paceline-") as folder:
        start = str(write_program(PROGRAM, Path(folder)))
        done = run_program([sys.executable, start, json.dumps(question)], lambda: None)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemFaultError("export", last_line(done.stderr))
    return json.loads(lines[-1])
