"""The rank that the others wait for is the one with the largest busy time."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from paceline.core.ranks import find_straggler
from paceline.core.steps import Steps
from paceline.files.events import read_rank
from tests.numerics.cases import ALL
from tests.trainer.example import run_ranks, settings, steps

RANKS, SLOW, STEPS = 4, 2, 74
STAGES = (0, 1, 2, 3) if ALL else (0, 3)
WORK_S = 0.08

PROGRAM = f"""
import json, os, sys, time
import torch.distributed as dist
from paceline.trainer import main
from paceline.trainer.model.decoder import Decoder
from paceline.trainer.parallel.mesh import join_world

work_s = {WORK_S} * (1.1 if os.environ["RANK"] == "{SLOW}" else 1.0)
compute = Decoder.embed

def slowed(self, *inputs):
    time.sleep(work_s)
    return compute(self, *inputs)

Decoder.embed = slowed
join_world("cpu")
os.environ.pop("PACELINE_STORE", None)
dist.init_process_group = lambda *args, **kwargs: None
with open(sys.argv[1]) as file:
    raw = json.load(file)
for stage in {STAGES}:
    raw["layout"]["zero_stage"], raw["events"] = stage, f"steps-{{stage}}"
    path = f"trainer-{{stage}}-{{os.environ['RANK']}}.json"
    with open(path, "w") as file:
        json.dump(raw, file)
    if main.main(path):
        os._exit(1)
os._exit(0)
"""
"""One world trains with every ZeRO stage, and one of its ranks is 10% slower.

The ranks share two cores, whose scheduling alone differs by more than that, so most of a step is
not arithmetic but a wait of fixed length, as on a host whose device computes.
"""


@pytest.fixture(scope="module")
def slowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What that world left behind."""
    folder = tmp_path_factory.mktemp("straggler")
    program = folder / "slowed.py"
    program.write_text(PROGRAM)
    raw = settings(
        RANKS, STEPS, source="synthetic", micro_batch=1, global_batch=RANKS, num_layers=1
    )
    (folder / "trainer.json").write_text(json.dumps(raw))
    code, output = run_ranks(RANKS, program, "trainer.json", folder=folder)
    assert code == 0, output
    return folder


@pytest.mark.parametrize("stage", STAGES)
def test_the_slow_rank_is_the_busiest_and_waits_least(slowed: Path, stage: int) -> None:
    busy_s, wait_s = (
        [
            median(row[key] for row in steps(slowed, rank, f"steps-{stage}")[4:])
            for rank in range(RANKS)
        ]
        for key in ("busy_time_s", "comm_wait_s")
    )

    assert max(busy_s) == busy_s[SLOW]
    assert min(wait_s) == wait_s[SLOW]


@pytest.mark.parametrize("stage", STAGES)
def test_the_harness_names_it(slowed: Path, stage: int) -> None:
    folder = slowed / f"steps-{stage}"
    ranks = {
        rank: Steps.of(
            read_rank((folder / f"rank-{rank:05d}.jsonl").read_text().splitlines()).steps
        )
        for rank in range(RANKS)
    }

    straggler = find_straggler(ranks, {}, np.arange(5, STEPS + 1))

    assert straggler is not None
    assert (straggler.rank, straggler.named) == (SLOW, True)
