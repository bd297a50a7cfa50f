"""Training samples for programs that run inside a foreign framework, from the data of a RunSpec."""

from __future__ import annotations

from typing import Any

from paceline.core.run import RunSpec
from paceline.engines.launch.programs import native_settings, program_file

SOURCES = ("synthetic", "stdlib", "text", "tokens")
BYTE_VOCAB = 257
"""One id for each byte and one that ends a document."""
WINDOWS_FILE = "token_windows_program.py"


def data_problems(spec: RunSpec) -> list[str]:
    """What of the data `token_windows_program.py` cannot read, one sentence each."""
    data = spec.data
    problems: list[str] = []
    if data.source not in SOURCES:
        problems.append(f"data.source {data.source} is not among {', '.join(SOURCES)}")
    if data.packing != "packed":
        problems.append("data.packing padded is not in this engine: use packed")
    if data.loss_mask is not None or data.split is not None:
        problems.append("data.loss_mask and data.split are not in this engine: leave them out")
    if spec.model.kind == "decoder" and data.source in ("stdlib", "text"):
        vocab = spec.model.vocab_size
        if vocab < BYTE_VOCAB:
            problems.append(f"vocab_size {vocab} has no room for text, which needs {BYTE_VOCAB}")
    return problems


def training_problems(spec: RunSpec) -> list[str]:
    """What such programs leave to the native trainer, one sentence each."""
    return [
        f"{name} is not in this engine: leave it out, or use engine=native"
        for name in native_settings(spec)
    ]


def data_settings(spec: RunSpec) -> dict[str, Any]:
    """What `token_windows_program.py` is to be told of the data."""
    return spec.data.model_dump(mode="json", include={"source", "path", "token_dtype"})


def windows_program() -> dict[str, str]:
    """`token_windows_program.py` as a file of a Job."""
    return program_file(__name__, WINDOWS_FILE)
