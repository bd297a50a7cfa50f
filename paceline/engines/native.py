"""The native trainer as an engine: its Job, and its event lines as steps."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator
from importlib import resources
from typing import Any

from paceline.core.layout import RULES, native_problems
from paceline.core.logs.logged import Dialect
from paceline.core.run import Job, RunSpec
from paceline.core.shape import num_parameters
from paceline.core.steps import Step
from paceline.engines.reading import native_lines, native_log
from paceline.events import StepEvent, read_events, read_rank, to_step

__all__ = ["DIALECT", "job", "missing", "read_rank", "settings", "steps", "unsupported"]

SETTINGS_FILE = "trainer.json"
TRAINER_FOLDER = "native"
DTYPES = ("fp32", "bf16", "fp16")
TEXT_SOURCES = ("stdlib", "text", "jsonl")
BYTE_VOCAB = 257


def unsupported(spec: RunSpec) -> list[str]:
    """What this trainer cannot do of `spec`, one sentence each."""
    problems = native_problems(
        spec.layout, spec.model, spec.world_size, spec.training.global_batch,
        dtype=spec.training.dtype, device=_device(spec),
        compiled=spec.training.compile != "none",
    )  # fmt: skip
    if spec.training.dtype not in DTYPES:
        problems.append(f"dtype {spec.training.dtype} is not among {', '.join(DTYPES)}")
    if spec.training.dtype == "fp16" and spec.cluster.device == "cpu":
        problems.append("fp16 on a CPU is emulated, hundreds of times slower than bf16 or fp32")
    if spec.memory_limit_bytes is not None and spec.cluster.device != "cpu":
        problems.append("memory_limit_bytes is for processes on a CPU; a GPU has its own limit")
    if spec.model.positions == "learned" and spec.training.seq_len > spec.model.max_positions:
        problems.append(
            f"seq_len {spec.training.seq_len} is beyond {spec.model.max_positions} learned positions"
        )
    if spec.data.source in TEXT_SOURCES and spec.model.vocab_size < BYTE_VOCAB:
        problems.append(
            f"vocab_size {spec.model.vocab_size} has no room for text, which needs {BYTE_VOCAB}: "
            "one id per byte and one that ends a document"
        )
    if spec.lora is not None:
        problems.append("LoRA adapters are not in the native trainer")
    return problems


def missing(spec: RunSpec) -> str | None:
    """torch, when it is not beside Paceline and no other interpreter is named."""
    if spec.cluster.python is not None or importlib.util.find_spec("torch") is not None:
        return None
    return "torch is not installed beside Paceline; pip install 'paceline[native]'"


def job(spec: RunSpec, name: str) -> Job:
    """The Job that trains `spec`: the trainer's own folder and its settings travel with it."""
    files = {
        f"{TRAINER_FOLDER}/{file.name}": file.read_text(encoding="utf-8")
        for file in sorted((resources.files("paceline") / "native").iterdir(), key=lambda f: f.name)
        if file.name.endswith(".py")
    }
    files[SETTINGS_FILE] = json.dumps(settings(spec), indent=2) + "\n"
    return Job(
        name=name,
        python=spec.cluster.python or sys.executable,
        program=(f"{TRAINER_FOLDER}/main.py", SETTINGS_FILE),
        env=_environment(spec),
        files=files,
        nodes=spec.cluster.nodes,
        devices_per_node=spec.cluster.devices_per_node,
        timeout_s=spec.time_limit_s,
    )


def settings(spec: RunSpec) -> dict[str, Any]:
    """The resolved JSON that the trainer reads, schema 1."""
    model = spec.model.model_dump(mode="json")
    model["padded_vocab"] = spec.model.padded_vocab(spec.layout.tp)
    return {
        "schema": 1,
        "model": model,
        "training": spec.training.model_dump(mode="json", exclude={"total_tokens"}),
        "data": spec.data.model_dump(mode="json", exclude={"real_tokens_per_sample"}),
        "layout": spec.layout.model_dump(mode="json"),
        "layout_rules": [
            {"features": sorted(rule.features), "reason": rule.reason} for rule in RULES
        ],
        "dp": spec.dp,
        "num_microbatches": spec.layout.num_microbatches(
            spec.world_size, spec.training.global_batch
        ),
        "device": _device(spec),
        "threads": spec.cluster.threads_per_device,
        "hang_limit_s": spec.hang_limit_s,
        "memory_limit_bytes": spec.memory_limit_bytes,
        "memory_parts": spec.memory_parts,
        "checkpoint": spec.checkpoint.model_dump(mode="json"),
        "expected_parameters": num_parameters(spec.model, spec.layout.tp),
        "events": "steps",
        "logs": "logs",
    }


def steps(lines: Iterable[str]) -> Iterator[Step]:
    """The steps in one rank's event lines."""
    return (to_step(event) for event in read_events(lines) if isinstance(event, StepEvent))


def _device(spec: RunSpec) -> str:
    return "cpu" if spec.cluster.device == "cpu" else "cuda"


def _environment(spec: RunSpec) -> dict[str, str]:
    environment = {"PYTHONUNBUFFERED": "1"}
    if spec.cluster.threads_per_device:
        environment["OMP_NUM_THREADS"] = str(spec.cluster.threads_per_device)
    return environment | spec.cluster.env


DIALECT = Dialect(
    title="Paceline",
    marks=(b'{"event": "step"', b'"step_time_s": '),
    step_line=native_lines.STEP_LINE,
    read=native_log.read,
    precedence=2,
)
