"""Logs that pass the official checker, and submissions of them, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.mlperf.submission.description_check import FIELDS
from tests.mlperf.samples import EPOCH_MS, TEN, line

SYSTEM = "box_2x8"
ORGANISATION = "Example"


def whole_trial(
    number: int = 0, *, minutes: float = 10.0, samples: int = 3456, **changed: Any
) -> str:
    """One run of Llama 2 70B LoRA with every line that the closed division asks for.

    `changed` gives keys another value; None leaves one out.
    """
    start = EPOCH_MS + number * 7_200_000
    run, stop = start + 120_000, start + 120_000 + minutes * 60_000
    values: dict[str, Any] = {
        "submission_benchmark": "llama2_70b_lora",
        "submission_org": ORGANISATION,
        "submission_platform": "2xBox",
        "submission_division": "closed",
        "submission_status": "onprem",
        "seed": 100 + number,
        "global_batch_size": 8,
        "train_samples": 3901,
        "eval_samples": 173,
        "gradient_accumulation_steps": 1,
        "opt_base_learning_rate": 0.0004,
        "opt_learning_rate_training_steps": 1024,
        "opt_gradient_clip_norm": 0.3,
        "opt_adamw_weight_decay": 0.0001,
        "lora_alpha": 32,
        "lora_rank": 16,
    }
    values |= changed
    fields = [line(key, value, start + 3) for key, value in values.items() if value is not None]
    lines = [
        line("cache_clear", True, start - 10),
        line("init_start", None, start),
        *fields,
        line("init_stop", None, run - 1),
        line("run_start", None, run),
        line("block_start", None, run + 1, samples_count=0),
        line("block_stop", None, stop - 4, samples_count=samples),
        line("eval_start", None, stop - 3, samples_count=samples),
        line("eval_accuracy", 0.924, stop - 2, samples_count=samples),
        line("eval_stop", None, stop - 1, samples_count=samples),
        line("run_stop", None, stop, samples_count=samples, status="success"),
    ]
    return "".join(f"{text}\n" for text in lines)


def ten_runs(folder: Path, **changed: Any) -> Path:
    """Ten whole runs in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, minutes in enumerate(TEN):
        text = whole_trial(number, minutes=minutes, **changed)
        (folder / f"result_{number}.txt").write_text(text)
    return folder


def description(path: Path, **changed: Any) -> Path:
    """A whole system description; None leaves a field out."""
    fields: dict[str, Any] = dict.fromkeys(FIELDS, "something")
    fields |= {
        "submitter": ORGANISATION,
        "division": "closed",
        "status": "Available cloud",
        "system_name": "Box",
        "number_of_nodes": "2",
        "accelerators_per_node": "8",
        "accelerator_model_name": "NVIDIA H100 80GB HBM3",
        "other_software_stack": {"nccl_version": "2.28"},
    }
    fields = {name: value for name, value in (fields | changed).items() if value is not None}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(fields, indent=4))
    return path


def whole_submission(folder: Path, **changed: Any) -> Path:
    """An organization's folder that the official checker passes, unless logs are `changed`."""
    description(folder / "systems" / f"{SYSTEM}.json")
    ten_runs(folder / "results" / SYSTEM / "llama2_70b_lora", **changed)
    return folder


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below a folder, and when it was changed."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in paths}
