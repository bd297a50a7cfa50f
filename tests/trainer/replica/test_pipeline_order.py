"""A device that does one thing at a time can follow an evaluation's order of sends and receives.

What a stage replaces of PyTorch's own is still there, so that replacing it does something.
"""

from __future__ import annotations

import inspect
import queue
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B

from paceline.trainer.data.batches import LocalBatch
from paceline.trainer.parallel.mesh import MeshAxis
from paceline.trainer.replica.pipeline import LocalStage, PipelineRunner

LIMIT_S = 30.0
"""For what never comes."""


class Device(threading.Thread):
    """Does what is asked of it one after the other, as NCCL does in one communicator."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.asked: queue.Queue[tuple[Callable[[], Any], queue.Queue[Any]]] = queue.Queue()
        self.start()

    def run(self) -> None:
        while True:
            work, answer = self.asked.get()
            answer.put(work())

    def ask(self, work: Callable[[], Any]) -> Any:
        """Something to wait for."""
        answer: queue.Queue[Any] = queue.Queue()
        self.asked.put((work, answer))
        return SimpleNamespace(wait=lambda: answer.get(timeout=LIMIT_S))


class Runner(PipelineRunner):
    """One rank of a pipeline whose stages add 1, on devices that hand tensors to each other."""

    def __init__(self, rank: int, ranks: int, per_rank: int, lines: Any) -> None:
        self.axis, self.no_loss = MeshAxis(ranks, rank), torch.zeros(())
        last = ranks * per_rank - 1
        numbers = range(rank, last + 1, ranks)
        self.stages = [
            SimpleNamespace(is_first=n == 0, is_last=n == last, submod=lambda x, **_: x + 1)
            for n in numbers
        ]  # type: ignore[assignment]
        self.device, self.lines = Device(), lines

    def _send(self, out: Tensor) -> Any:
        line, taken = self.lines[self.axis.index, (self.axis.index + 1) % self.axis.size]

        def hand_over() -> None:
            line.put(out)
            taken.get()

        return self.device.ask(hand_over)

    def _receive(self, stage: Any) -> Tensor:
        line, taken = self.lines[(self.axis.index - 1) % self.axis.size, self.axis.index]

        def take() -> Tensor:
            out = line.get()
            taken.put(None)
            return out

        return self.device.ask(take).wait()


@pytest.mark.parametrize(("ranks", "per_rank"), [(2, 1), (2, 2), (4, 2), (3, 3)])
def test_no_rank_waits_for_another_that_waits_for_it(ranks: int, per_rank: int) -> None:
    lines = {(a, (a + 1) % ranks): (queue.Queue[Any](), queue.Queue[Any]()) for a in range(ranks)}
    runners = [Runner(rank, ranks, per_rank, lines) for rank in range(ranks)]
    inputs, found = torch.arange(8.0), dict[int, float]()
    batch = LocalBatch(inputs, inputs, len(inputs))

    def evaluate(rank: int) -> None:
        found[rank] = runners[rank].evaluate(batch, inputs).item()

    threads = [
        threading.Thread(target=evaluate, args=(rank,), daemon=True) for rank in range(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_S)

    assert found.get(ranks - 1) == inputs.sum().item() + len(inputs) * ranks * per_rank


TRIED = ("2.11", "2.13")
"""The PyTorch versions whose pipelines were read; another one needs a look at LocalStage."""
OWN = {"__init__", "_allocate", "_release"}
HOOKS = sorted(
    name
    for name, value in vars(LocalStage).items()
    if inspect.isfunction(value) and name not in OWN
)


@pytest.mark.parametrize("name", HOOKS)
def test_pytorch_calls_what_a_stage_overrides(name: str) -> None:
    theirs, ours = (
        inspect.signature(getattr(kind, name)).parameters for kind in (PipelineStage, LocalStage)
    )

    assert {"forward_one_chunk", "get_fwd_recv_ops", "_prepare_forward_infra"} <= {*HOOKS}
    kinds = {p.name for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert kinds <= {*theirs}


def test_pytorch_keeps_buffers_where_a_stage_frees_them() -> None:
    source = "".join(map(inspect.getsource, PipelineStage.__mro__[:-1]))

    for attribute in ("args_recv_info", "grad_recv_info", "bwd_cache"):
        assert f"self.{attribute}" in source
    assert "_n_microbatches" in inspect.getsource(Schedule1F1B)


def test_this_pytorch_is_one_whose_pipelines_were_read() -> None:
    assert torch.__version__.startswith(TRIED)
