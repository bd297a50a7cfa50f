# pyright: reportMissingImports=false, reportMissingTypeStubs=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUntypedBaseClass=false
# pyright: reportUnknownParameterType=false
"""Module that torchtitan imports before training: a model of the recipe's shape, and its samples.

Reads `shape.json` in the working folder and needs `token_windows_program.py` in the same folder.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from token_windows_program import TokenWindows
from torch import Tensor
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.models.moe import MoEArgs
from torchtitan.protocols.train_spec import register_train_spec

SETTINGS: dict[str, Any] = json.loads(Path("shape.json").read_text(encoding="utf-8"))
FAMILY = importlib.import_module(f"torchtitan.models.{SETTINGS['family']}")
ARGUMENTS = {"llama3": "TransformerModelArgs", "qwen3": "Qwen3ModelArgs"}
"""Name of the class of a model's arguments."""
ModelArgs: Any = getattr(FAMILY, ARGUMENTS[SETTINGS["family"]])


class RecipeArgs(ModelArgs):
    """Arguments of torchtitan's model, checked against the recipe's number of parameters."""

    def get_nparams_and_flops(self, model: torch.nn.Module, seq_len: int) -> tuple[int, int]:
        """Return torchtitan's (parameters, FLOPs per token); SystemExit on a mismatch."""
        count, flops = super().get_nparams_and_flops(model, seq_len)
        expected = SETTINGS["expected_parameters"]
        if count != expected:
            raise SystemExit(f"model: has {count:,} parameters, but the recipe has {expected:,}")
        return count, flops


class RankSamples(torch.utils.data.IterableDataset[tuple[dict[str, Tensor], Tensor]]):
    """Endless stream of one data-parallel rank's samples: inputs, and the tokens after them."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._windows = TokenWindows(
            SETTINGS["data"],
            SETTINGS["seq_len"] + 1,
            SETTINGS["vocab_size"],
            SETTINGS["samples"],
            SETTINGS["seed"],
        )
        self._rank, self._ranks = rank, ranks

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        order = torch.Generator().manual_seed(SETTINGS["seed"])
        while True:
            for index in torch.randperm(len(self._windows), generator=order)[
                self._rank :: self._ranks
            ]:
                window = self._windows[int(index)]
                yield {"input": window[:-1]}, window[1:]


def build_dataloader(
    dp_world_size: int, dp_rank: int, tokenizer: object, job_config: Any
) -> ParallelAwareDataloader:
    """Return a rank's data loader with its samples in micro-batches."""
    return ParallelAwareDataloader(
        RankSamples(dp_rank, dp_world_size),
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        batch_size=job_config.training.local_batch_size,
        pin_memory=torch.cuda.is_available(),
    )


def model_args() -> RecipeArgs:
    """Return the arguments of the recipe's model, with its experts if it has any."""
    experts = SETTINGS["experts"]
    extra = {"moe_args": MoEArgs(**experts)} if experts else {}
    return RecipeArgs(**SETTINGS["model_args"], **extra)


register_train_spec(
    SETTINGS["family"],
    dataclasses.replace(
        FAMILY.get_train_spec(),
        model_args={SETTINGS["flavor"]: model_args()},
        build_dataloader_fn=build_dataloader,
        build_tokenizer_fn=None,
        build_validator_fn=None,
        state_dict_adapter=None,
    ),
)
