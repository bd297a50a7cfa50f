"""Weights kept in the compute dtype change no number of a training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.trainer.config import parse_config
from paceline.trainer.data.batches import LocalBatch
from paceline.trainer.measure.clock import HostClock, StepClock
from paceline.trainer.parallel.mesh import Mesh, World
from paceline.trainer.replica.assembly import make_replica
from paceline.trainer.replica.replica import ComputeCopies, Replica
from tests.trainer.example import settings

CPU = torch.device("cpu")


def replica_of(**values: Any) -> Replica:
    config = parse_config(settings(dtype="bf16", micro_batch=2, global_batch=4, **values))
    return make_replica(config, World(0, 0, 1, CPU, None), Mesh(), StepClock(HostClock()))


def gradients(replica: Replica) -> tuple[Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    length = replica.parts[0].setting.seq_len
    tokens = torch.randint(64, (2, 2, length), generator=generator)
    loss = replica.train(LocalBatch(tokens, tokens, tokens.numel()), 0.01)
    return loss, {name: p.grad for name, p in replica.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_gradients_are_those_without_copies(tied: bool, recompute: str) -> None:
    plain, copied = (replica_of(tied_embeddings=tied, recompute=recompute) for _ in range(2))
    copied.copies = ComputeCopies(copied.parts)
    assert copied.copies.copies

    for _ in range(2):
        (loss, wanted), (same_loss, same) = gradients(plain), gradients(copied)
        assert torch.equal(loss, same_loss)
        assert wanted.keys() == same.keys()
        for name, gradient in wanted.items():
            assert torch.equal(gradient, same[name]), name
        for replica in (plain, copied):
            with torch.no_grad():
                for _, parameter in replica.named_parameters():
                    assert parameter.grad is not None
                    parameter.sub_(parameter.grad)
                    parameter.grad = None


def test_a_layer_that_computes_in_its_own_dtype_has_none() -> None:
    replica = replica_of()
    for part in replica.parts:
        part.bfloat16()
    assert not ComputeCopies(replica.parts).copies
