"""From the event lines of a pipeline's ranks to a report that holds equals against equals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.core.result import Result
from paceline.files.documents import write_value
from paceline.files.run_folder import RUN_FILE
from paceline.runs.outcome import evaluate
from tests.example import make_spec, noisy
from tests.files.rank_files import write_ranks
from tests.files.test_run_folder import make_record

BUSY_OF_STAGE = (0.10, 0.16)


def result_of(tmp_path: Path, stages_known: bool, slow_rank: int | None = None) -> Result:
    """Eight ranks, 2 x 2 x 2, the second stage busier; one may be 10% slower than its peers."""
    folder = tmp_path / f"told-{stages_known}-{slow_rank}"
    spec = make_spec(ranks=8)
    write_value(folder / RUN_FILE, make_record("ok", name="run", spec=spec))
    own: dict[int, dict[str, Any]] = {}
    for rank in range(8):
        stage = rank // 4
        coordinates = {"pp": stage, "dp": rank // 2 % 2, "cp": 0, "tp": rank % 2}
        layout = {"pp": 2, "coordinates": coordinates} if stages_known else {"pp": 2}
        slower = 1.1 if rank == slow_rank else 1.0
        busy = noisy(40, slower * BUSY_OF_STAGE[stage], 0.001, seed=rank)
        times = zip(noisy(40), busy, strict=True)
        steps = [{"step_time_s": t, "busy_time_s": b} for t, b in times]
        own[rank] = {"layout": layout, "steps": steps}
    write_ranks(folder, spec, [], changes=own)
    return evaluate(folder).result


def test_a_busier_stage_is_no_straggler(tmp_path: Path):
    result = result_of(tmp_path, stages_known=True)
    assert [rank.stage for rank in result.ranks] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert result.straggler is not None and not result.straggler.named
    unaware = result_of(tmp_path, stages_known=False)
    assert unaware.straggler is not None and unaware.straggler.excess > 0.1


def test_a_slow_rank_of_either_stage_is_named_with_its_stage(tmp_path: Path):
    for slow_rank in (1, 6):
        straggler = result_of(tmp_path, stages_known=True, slow_rank=slow_rank).straggler
        assert straggler is not None and straggler.named
        assert (straggler.rank, straggler.stage) == (slow_rank, slow_rank // 4)
