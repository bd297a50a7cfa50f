"""An engine's own program, waiting for its turn: _engine_in_turns.py BLOCK PRECISION PROGRAM ...

Runs in the engine's environment. A step ends when the program's optimizer has stepped; allocator,
garbage collection and fp32 matrix-product setting are the native trainer's.
"""

from __future__ import annotations

import gc
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from _turns import BlockTimer, own_output
from torch.optim.optimizer import register_optimizer_step_post_hook

sys.path.insert(0, str(Path(__file__).parents[1]))

from paceline.trainer.measure.machine import keep_freed_memory


class OuterSteps:
    """Counts a step when the outermost of the optimizers that wrap each other has stepped."""

    def __init__(self, turn: BlockTimer) -> None:
        self._turn, self._first = turn, 0

    def __call__(self, optimizer: Any, *_: Any) -> None:
        """Wait for the next turn behind a step of the optimizer that stepped first."""
        self._first = self._first or id(optimizer)
        if id(optimizer) == self._first:
            gc.disable()  # between steps, as the native trainer; some frameworks switch it on
            self._turn.step()


def main(block: int, precision: str, program: list[str]) -> None:
    """Train until nobody wants another block."""
    turn = BlockTimer(block, own_output())
    keep_freed_memory()
    turn.step()
    torch.set_float32_matmul_precision(precision)
    register_optimizer_step_post_hook(OuterSteps(turn))
    sys.argv = program
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(program[0]).resolve().parent)
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
