"""Rows reach the rank of their expert and return, also where a rank sends or receives none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.example import run_ranks

EXCHANGE = """
import os, sys
import torch
from torch import distributed as dist
from paceline.trainer.parallel.mesh import MeshAxis, join_world
from paceline.trainer.parallel.token_exchange import exchange_tokens

world = join_world("cpu")
axis = MeshAxis(3, world.rank, dist.group.WORLD, (0, 1, 2))
counts = torch.tensor(eval(sys.argv[1]))  # (rank, expert)
mine = counts[world.rank]
experts = torch.arange(6).repeat_interleave(mine)
place = torch.arange(len(experts), dtype=torch.float64)
rows = torch.stack((torch.full_like(place, world.rank), experts.double(), place), 1)
rows.requires_grad_()

received, local, combine = exchange_tokens(rows, mine, axis)
assert local.tolist() == counts.sum(0)[2 * world.rank : 2 * world.rank + 2].tolist()
own = torch.arange(2 * world.rank, 2 * world.rank + 2).repeat_interleave(local)
assert torch.equal(received[:, 1], own.double()), received
assert received[:, 0].tolist() == [
    r for e in (2 * world.rank, 2 * world.rank + 1) for r in range(3) for _ in range(counts[r, e])
]
returned = combine(received * (own + 1).unsqueeze(1))
assert torch.equal(returned, rows * (experts + 1).unsqueeze(1))
returned.backward(torch.ones_like(returned) * (place + 1).unsqueeze(1))
expected = ((experts + 1) * (place + 1)).unsqueeze(1).expand(-1, 3)
assert torch.equal(rows.grad, expected), rows.grad
print("exchanged", flush=True)
dist.barrier()
os._exit(0)
"""


@pytest.mark.parametrize(
    "counts",
    [
        [[1, 2, 0, 3, 1, 1], [2, 0, 4, 0, 0, 1], [0, 1, 1, 1, 5, 0]],
        [[2, 2, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [3, 1, 0, 0, 0, 0]],
    ],
    ids=["of all", "to one rank alone"],
)
def test_rows_are_sorted_by_expert_and_their_results_and_gradients_return(
    counts: list[list[int]], tmp_path: Path
) -> None:
    (tmp_path / "exchange.py").write_text(EXCHANGE)

    code, output = run_ranks(3, tmp_path / "exchange.py", repr(counts), folder=tmp_path)

    assert code == 0 and output.count("exchanged") == 3, output
