"""What the layouts are compared on: three small models, and layouts that must not change them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.native.example import settings

GLOBAL_BATCH = 12
STEPS = 3
LLAMA: dict[str, Any] = {"num_layers": 3}
GPT: dict[str, Any] = {
    "num_kv_heads": None, "gated_ffn": False, "activation": "gelu", "norm": "layernorm",
    "positions": "learned", "bias": True, "tied_embeddings": True, "embedding_norm": True,
    "vocab_multiple": 128,
}  # fmt: skip
OPT: dict[str, Any] = {
    **GPT, "activation": "relu", "norm_position": "post", "final_norm": False,
    "embedding_norm": False, "position_offset": 2, "embedding_size": 24,
}  # fmt: skip
MODELS = {"llama": LLAMA, "gpt": GPT, "opt": OPT}
DTYPES = ("fp64", "fp32", "bf16")
FAULTS = {"unreduced bucket": 0, "loss of one rank": 1, "loss of another rank": 3}
"""Seeded faults, and the ZeRO stage that they are put into."""


@dataclass(frozen=True)
class Case:
    """One training of a few steps; `fault` names what is broken on purpose."""

    model: str
    dtype: str
    ranks: int
    zero_stage: int = 0
    micro_batch: int = GLOBAL_BATCH
    recompute: str = "none"
    fault: str = ""

    @property
    def name(self) -> str:
        """What its file is called."""
        parts = (self.model, self.dtype, self.ranks, self.zero_stage, self.micro_batch,
                 self.recompute, self.fault.replace(" ", "-"))  # fmt: skip
        return "_".join(str(part) for part in parts)

    def settings(self) -> dict[str, Any]:
        """Its trainer.json.

        Adam's eps is large here: with a small one, a gradient that is nothing but rounding (a key's
        bias has none) would move its weight as far as any other.
        """
        return settings(
            ranks=self.ranks, steps=STEPS, **MODELS[self.model], dtype=self.dtype,
            global_batch=GLOBAL_BATCH, micro_batch=self.micro_batch, recompute=self.recompute,
            zero_stage=self.zero_stage, matmul_precision="highest", eps=1e-3, grad_clip=0.5,
        )  # fmt: skip


def reference(case: Case) -> Case:
    """The same training in one process, in one piece, keeping all activations."""
    return Case(case.model, case.dtype, ranks=1)


def all_cases() -> list[Case]:
    """Every layout with every model and dtype."""
    found = [Case(model, dtype, ranks=1) for model in MODELS for dtype in DTYPES]
    found += [
        Case(model, dtype, 1, micro_batch=4, recompute="full")
        for model in MODELS
        for dtype in ("fp64", "fp32")
    ]
    for stage in range(4):
        for model, dtype in [(m, d) for m in MODELS for d in DTYPES]:
            found.append(Case(model, dtype, 2, stage, micro_batch=6))
            if dtype == "fp64":
                found.append(Case(model, dtype, 2, stage, micro_batch=3, recompute="full"))
        # Three ranks divide none of the sizes: shards differ, and some are empty.
        found.append(Case("opt", "fp64", 3, stage, micro_batch=2, recompute="full"))
        found.append(Case("llama", "fp32", 3, stage, micro_batch=4))
    found += [
        Case("llama", "fp32", 2, stage, micro_batch=6, fault=fault)
        for fault, stage in FAULTS.items()
    ]
    return found
