"""What a stage replaces of PyTorch's own is still there, so that replacing it does something."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B

from paceline.trainer.replica.pipeline import LocalStage

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
