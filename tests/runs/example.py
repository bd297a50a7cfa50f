"""Run folders of known speed, as a finished run leaves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from paceline.files.documents import write_text, write_value
from paceline.files.run_folder import INVENTORY_FILE, RUN_FILE
from tests.example import make_spec
from tests.files.rank_files import step_times, write_ranks
from tests.files.test_run_folder import make_record

STEPS = 60


def write_run(
    root: Path,
    name: str,
    step_time_s: float = 0.2,
    *,
    noise: float = 0.002,
    steps: int = STEPS,
    seed: int = 0,
    inventory: str | None = None,
    torch: str = "2.13.0",
    ended: bool = True,
    **record: Any,
) -> Path:
    """A run whose steps lie around `step_time_s`; `record` are fields of run.json."""
    folder = root / name
    kept = make_record(name=name, **{"status": "ok", **record})
    write_value(folder / RUN_FILE, kept)
    times = step_time_s * (1 + np.random.default_rng(seed).normal(0, noise, steps))
    write_ranks(folder, kept.spec or make_spec(), step_times(times), ended=ended, torch=torch)
    if inventory:
        write_text(folder / INVENTORY_FILE, inventory)
    return folder


def write_repeats(
    root: Path, tag: str, n: int, change: float = 0.0, deviation: float = 0.003, **fields: Any
) -> list[Path]:
    """n runs with this tag, `change` slower than 0.2 s, that deviate from run to run as stated."""
    shape = np.linspace(-1, 1, n)
    shape = shape / shape.std(ddof=1) if n > 1 else shape * 0
    return [
        write_run(
            root,
            f"2026-01-01-{tag}-{i}",
            0.2 * (1 + change) * (1 + deviation * s),
            seed=i,
            tag=tag,
            created=f"2026-01-01T00:00:{i:02d}+00:00",
            **fields,
        )
        for i, s in enumerate(shape)
    ]
