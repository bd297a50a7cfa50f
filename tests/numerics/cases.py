"""What is trained: three small models in every layout of a table, and as one process would."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from paceline.core.layout import Layout
from paceline.core.shape import DecoderShape
from tests.native.example import settings

GLOBAL_BATCH = 12
SEQ_LEN = 32
STEPS = {"fp64": 3, "fp32": 20, "bf16": 3}
"""fp64 takes AdamW steps, the others plain SGD steps: Adam would amplify their rounding."""

DATA_STEPS = max(STEPS.values())

LLAMA: dict[str, Any] = {"num_layers": 4}
GPT: dict[str, Any] = {
    "num_layers": 4, "num_kv_heads": None, "gated_ffn": False, "activation": "gelu",
    "norm": "layernorm", "positions": "learned", "bias": True, "tied_embeddings": True,
    "embedding_norm": True, "vocab_size": 400, "vocab_multiple": 128,
}  # fmt: skip
OPT: dict[str, Any] = {
    **GPT, "activation": "relu", "norm_position": "post", "final_norm": False,
    "embedding_norm": False, "position_offset": 2, "embedding_size": 24,
}  # fmt: skip
MODELS = {"llama": LLAMA, "gpt": GPT, "opt": OPT}
"""Grouped key/value heads; tied embeddings; tied ones behind projections, and norms after sums."""

# `mb` is the micro-batch; without it a replica takes its whole share of the batch at once. `compile`
# stops where gradients are decided, at the graphs that autograd makes: inductor takes 40 s more.
TABLE = """
1  mb4 full                                          llama gpt opt
1  mb6 selective                                     llama gpt opt
1  compile                                           llama gpt
2  masked                                            llama gpt
2  mb6                                               llama gpt opt
2  zero1 mb3 full                                    llama gpt opt
2  zero2 mb3 full                                    llama gpt opt
2  zero3 mb6                                         llama gpt opt
2  zero3 mb3 full                                    llama gpt opt
2  tp2                                               llama gpt opt
2  tp2 sp                                            llama gpt opt
2  tp2 sp mb4 selective                              llama gpt
2  tp2 compile                                       llama gpt
2  pp2 gpipe mb3                                     llama gpt opt
2  pp2 mb3                                           llama gpt opt
2  pp2 vp2 interleaved mb3                           llama gpt opt
2  pp2 zero-bubble mb3                               llama gpt opt
2  cp2                                               llama gpt opt
2  cp2 all-to-all                                    llama gpt
2  cp2 ring                                          llama gpt
2  cp2 masked                                        llama gpt
3  mb2 full                                          opt
3  zero1 mb4                                         llama
3  zero2 mb2 full                                    opt
3  zero3 mb4                                         llama
3  pp3 mb2                                           llama gpt
4  tp4 sp                                            gpt
4  tp2 sp zero1                                      llama gpt
4  tp2 sp zero2 mb3                                  llama gpt
4  tp2 sp zero3 compile                              llama gpt
4  pp2 zero1 mb1                                     llama gpt
4  pp4 mb2                                           llama opt
4  cp4                                               llama
4  cp4 all-to-all                                    gpt
4  cp4 ring masked                                   llama gpt
4  cp2 zero1 mb3                                     llama gpt
4  cp2 zero3 mb3                                     llama gpt
4  cp2 all-to-all tp2 sp                             gpt
4  pp2 cp2 mb3 selective                             llama gpt
4  zero3 shard2                                      llama gpt
4  pp2 zero3 mb3 masked                              llama gpt
8  tp2 sp pp2 zero3 mb3                              llama gpt
8  tp2 sp pp2 vp2 zero-bubble zero3 mb3              llama gpt
8  tp2 sp pp2 cp2 vp2 interleaved mb3 full masked    llama gpt
8  tp2 sp pp2 vp2 zero-bubble zero1 mb3 selective    llama gpt
8  tp2 sp cp2 zero3 shard2 full                      llama gpt
8  pp2 vp2 zero-bubble cp2 zero2 shard2 mb3          llama gpt
2  pp2 vp3 interleaved mb3                           gpt
2  zero3 shard1 mb6                                  llama
4  cp2 ring tp2 sp                                   llama
4  pp2 cp2 all-to-all mb3                            gpt
"""

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
EXCHANGES = ("all-gather", "all-to-all", "ring")
SIZES = {"zero": "zero_stage", "shard": "dp_shard", "mb": "micro_batch"}


@dataclass(frozen=True)
class Case:
    """One training; `fault` names what is broken in it on purpose."""

    ranks: int
    words: str
    model: str
    dtype: str
    fault: str = ""

    @property
    def name(self) -> str:
        """What its file is called."""
        parts = (str(self.ranks), self.words or "plain", self.model, self.dtype, self.fault)
        return "_".join(part.replace(" ", "-") for part in parts if part)

    @property
    def masked(self) -> bool:
        """Whether many targets count for nothing, on some ranks far more than on others."""
        return "masked" in self.words.split()

    @property
    def compiled(self) -> bool:
        """Whether every block goes through torch.compile."""
        return "compile" in self.words.split()

    @property
    def steps(self) -> int:
        """How many steps of the data are trained; the data itself depends on how many there are."""
        return STEPS[self.dtype]

    @property
    def sgd(self) -> bool:
        """Whether plain SGD is in AdamW's place."""
        return self.dtype != "fp64"

    @property
    def layout(self) -> Layout:
        """What its words say."""
        fields: dict[str, Any] = {}
        for word in self.words.split():
            if word in SCHEDULES:
                fields["schedule"] = word
            elif word in EXCHANGES:
                fields["cp_exchange"] = word
            elif word in ("full", "selective"):
                fields["recompute"] = word
            elif word == "sp":
                fields["sequence_parallel"] = True
            elif size := re.fullmatch(r"([a-z]+)(\d+)", word):
                fields[SIZES.get(size[1], size[1])] = int(size[2])
        whole = Layout(**fields)
        share = GLOBAL_BATCH // whole.dp(self.ranks)
        return whole if "micro_batch" in fields else replace_fields(whole, micro_batch=share)

    def settings(self) -> dict[str, Any]:
        """Its trainer.json.

        Adam's eps is large here: with a small one, a gradient that is nothing but rounding (a key's
        bias has none) would move its weight as far as any other.
        """
        layout = self.layout
        return settings(
            ranks=self.ranks, steps=DATA_STEPS, **MODELS[self.model], dtype=self.dtype,
            global_batch=GLOBAL_BATCH, seq_len=SEQ_LEN, matmul_precision="highest", eps=1e-3, grad_clip=0.5,
            lr=0.1 if self.sgd else 1e-3,
            compile="blocks" if self.compiled else "none",
            dp=layout.dp(self.ranks),
            num_microbatches=layout.num_microbatches(self.ranks, GLOBAL_BATCH),
            **layout.model_dump(mode="json"),
        )  # fmt: skip


def replace_fields(layout: Layout, **fields: Any) -> Layout:
    """The layout with other fields, checked again."""
    return Layout(**{**layout.model_dump(), **fields})


def shape(model: str) -> DecoderShape:
    """The shape of one of the models."""
    raw = settings(**MODELS[model])["model"]
    raw.pop("padded_vocab")
    return DecoderShape(**raw)


def reference(case: Case) -> Case:
    """The same training in one process, in one piece, keeping all activations."""
    return replace(case, ranks=1, words="masked" if case.masked else "", fault="")


def exact(case: Case) -> Case:
    """The same training in fp32, which bf16 only rounds; fp64 would draw other weights."""
    return replace(case, dtype="fp32")


def table() -> list[Case]:
    """The rows, each with all of its models, in fp64."""
    return [
        Case(ranks, words, model, "fp64") for ranks, words, models in rows() for model in models
    ]


def rounded() -> list[Case]:
    """The rows in fp32 and bf16, each with one of its models in turn."""
    return [
        Case(ranks, words, models[(row + shift) % len(models)], dtype)
        for shift, dtype in enumerate(("fp32", "bf16"))
        for row, (ranks, words, models) in enumerate(rows())
        if not Case(ranks, words, models[0], dtype).compiled
    ]


def rows() -> list[tuple[int, str, list[str]]]:
    """Ranks, layout and models of each row of the table."""
    cells = [re.split(r"\s{2,}", line.strip()) for line in TABLE.strip().splitlines()]
    return [(int(ranks), words, models.split()) for ranks, words, models in cells]
