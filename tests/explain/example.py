"""Run folders with known step parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.hardware import Cluster
from paceline.core.layout import Layout
from paceline.core.training import Training
from paceline.files.documents import write_value
from paceline.files.run_folder import RUN_FILE
from tests.example import SHAPE, make_spec
from tests.files.rank_files import write_ranks
from tests.files.test_run_folder import make_record

STEPS = 30
WORK_S = 0.2


def write_parts(
    root: Path,
    name: str,
    ranks: tuple[dict[str, float], ...] = ({}, {}),
    *,
    layout: Layout | None = None,
    start: dict[str, Any] | None = None,
    global_batch: int = 8,
    device: str = "cpu",
) -> Path:
    """Write a run whose ranks work 0.2 s per step (1% noise) plus the times in `ranks`.

    Keys: `work` (a factor), and in seconds `data`, `checkpoint`, `waited`, `throttled`, `system`,
    `comm`, and of experts `experts`, `dispatch` and `overload` (a factor). The ranks that finish
    first wait for the others.
    """
    layout = layout or Layout(micro_batch=4)
    training = Training(seq_len=32, global_batch=global_batch, steps=STEPS, dtype="fp32")
    cluster = Cluster(name="it", device=device, devices_per_node=len(ranks), threads_per_device=1)
    model = SHAPE if layout.ep == 1 else SHAPE.model_copy(update={"num_experts": 2})
    spec = make_spec(
        ranks=len(ranks), model=model, layout=layout, training=training, cluster=cluster
    )
    folder = root / name
    write_value(folder / RUN_FILE, make_record("ok", name=name, tag=name, spec=spec))
    noise = np.random.default_rng(7).normal(1, 0.01, STEPS)
    busy = [
        WORK_S * noise * rank.get("work", 1.0) + rank.get("data", 0.0) + rank.get("waited", 0.0)
        for rank in ranks
    ]
    own: dict[int, dict[str, Any]] = {}
    for number, rank in enumerate(ranks):
        waits = np.max(busy, axis=0) - busy[number] + rank.get("comm", 0.0)
        seconds = zip(busy[number].tolist(), waits.tolist(), strict=True)
        own[number] = {"steps": [_event(rank, *pair) for pair in seconds]}
    write_ranks(folder, spec, [], changes=own, **(start or {}))
    return folder


def _event(rank: dict[str, float], busy_s: float, wait_s: float) -> dict[str, Any]:
    """Return a step event of a rank with these busy and waiting times."""
    checkpoint = rank.get("checkpoint", 0.0)
    return {
        "step_time_s": busy_s + wait_s + checkpoint,
        "busy_time_s": busy_s,
        "comm_wait_s": wait_s,
        "data_wait_s": rank.get("data", 0.0),
        "cores": {
            "user_s": 0.2,
            "system_s": rank.get("system", 0.0),
            "waited_s": rank.get("waited", 0.0),
            "throttled_s": rank.get("throttled", 0.0),
        },
        **({"checkpoint_s": checkpoint} if checkpoint else {}),
        **(_expert_fields(rank) if "overload" in rank else {}),
    }


def _expert_fields(rank: dict[str, float]) -> dict[str, Any]:
    return {
        "experts_s": rank["experts"],
        "dispatch_s": rank["dispatch"],
        "routing": {
            "experts": 2,
            "layers": (0,),
            "overload": (rank["overload"],),
            "variation": (0.0,),
            "dead": (0,),
            "rank_overload": (rank["overload"],),
        },
    }
