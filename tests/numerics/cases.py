"""What is trained: small models in every layout of a table, and as one process would."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple

from paceline.core.layout import Layout
from paceline.core.training import RampUp, Training
from paceline.engines import native
from tests.example import make_spec
from tests.numerics.models import MODELS

GLOBAL_BATCH = 12
RAMP_UP = RampUp(start=6, increment=6, samples=6)
"""One step of half the batch, then whole ones."""
STEPS = {"fp64": 3, "fp32": 20, "bf16": 3}
"""fp64 takes AdamW steps, the others plain SGD steps: Adam would amplify their rounding."""
SHORT, SHORT_STEPS, SHORT_FROM_RANKS = "short", 5, 2
"""A word of fp32 on two ranks and more: its twenty steps, for ALL, take as long as fp64's."""

DATA_STEPS = max(STEPS.values())
WITH_EXPERTS = ("mixtral", "qwen3-moe", "deepseek-v3", "gpt-oss")

ALL = os.environ.get("PACELINE_NUMERICS") == "all"
"""Whether what covers no pair of features of its own is trained as well, as `make nightly` does."""
SMALL_LAYOUTS_BY_DAY = ("lora", "sft", "flux", "gpt-oss")
"""Models that are trained on fewer than four ranks only, without ALL."""

# Ranks, layout, models; behind them models whose pairs of features other rows have, for ALL.
# `mb` is the micro-batch; without it a replica takes its whole share of the batch at once.
# `compile` stops where gradients are decided, at the graphs that autograd makes; `inductor`, which
# takes half a minute a row, makes code of them at night.
TABLE = """
1  mb4 full                                          llama gpt opt lora sft flux
1  mb6 selective                                     llama gpt opt lora sft
1  mb4 budget20                                      llama opt
1  compile                                           llama sft               gpt
1  compile budget50                                  gpt
2  zero3 mb3 budget70                                lora
2  tp2 sp mb4 budget30                               sft                     gpt
2  cp2 ring budget20                                 gpt                     llama
2  pp2 vp2 interleaved mb3 budget60                  llama                   gpt
2  masked                                            llama gpt sft
2  ramp mb3                                          gpt
2  mb6                                               llama gpt opt lora sft flux
2  zero1 mb3 full                                    llama gpt opt sft flux
2  zero1 mb3 full compile                            lora
2  zero2 mb3 full                                    llama opt lora sft flux
2  zero2 mb3 full compile                            gpt
2  zero3 mb6                                         llama gpt opt lora sft flux
2  zero3 mb3 full                                    llama gpt opt lora sft flux
2  tp2                                               llama gpt opt lora sft flux
2  tp2 mb4 full                                      lora sft flux
2  tp2 sp                                            llama gpt opt lora sft
2  tp2 sp mb4 selective                              llama lora
2  tp2 sp mb4 selective compile                      gpt
2  tp2 compile                                       lora                    llama gpt
2  pp2 gpipe mb3                                     llama gpt opt lora sft
2  pp2 mb3                                           llama opt lora sft
2  pp2 mb3 compile                                   gpt
2  pp2                                               gpt
2  pp2 vp2 interleaved mb3                           llama ends gpt opt lora sft
2  pp2 zero-bubble mb3                               llama gpt opt lora sft
2  pp2 ramp mb3                                      gpt
2  cp2                                               gpt opt lora sft flux
2  cp2 all-to-all                                    llama gpt lora sft
2  cp2 ring                                          llama gpt lora sft
2  cp2 masked                                        llama gpt sft
3  mb2 full                                          opt
3  zero1 mb4                                         llama
3  zero2 mb2 full                                    lora                    opt
3  zero3 mb4                                         flux                    llama
3  pp3 mb2                                           gpt                     llama
4  tp4                                               flux
4  tp4 sp                                            sft                     gpt
4  tp2 sp zero1                                      sft                     llama gpt lora
4  tp2 sp zero2 mb3                                  llama gpt sft
2  zero3 mb3 compile                                 llama
2  cp2 compile                                       llama flux
4  tp2 zero1 mb3                                     flux
4  tp2 zero2 mb3                                     flux
4  tp2 zero3 mb3 full                                flux                    lora sft
4  pp2 zero1 mb1                                     sft                     llama gpt lora
4  pp2 zero1 ramp mb1                                gpt
4  pp4 mb2                                           lora                    llama opt
4  cp4                                               flux                    llama
4  cp4 all-to-all                                    gpt
4  cp4 ring masked                                   gpt                     llama
4  cp2 zero1 mb3                                     llama gpt lora sft flux
4  cp2 zero3 mb3                                     flux                    llama gpt lora sft
4  cp2 all-to-all tp2 sp                             lora                    gpt
4  zero3 shard2                                      flux                    llama gpt lora sft
4  pp2 zero3 mb3 masked                              sft                     llama gpt
8  tp2 sp pp2 zero3 mb3                              sft                     llama gpt lora
8  tp2 sp pp2 vp2 zero-bubble zero3 mb3              llama gpt lora sft
8  tp2 sp pp2 cp2 vp2 interleaved mb3 full masked    llama ends gpt lora sft
8  tp2 sp pp2 vp2 zero-bubble zero1 mb3 selective    llama gpt lora sft
8  tp2 sp cp2 zero3 shard2 full                      llama gpt lora sft
8  pp2 vp2 zero-bubble cp2 zero2 shard2 mb3          llama gpt lora sft
8  tp2 cp2 zero2 shard2 full                         flux
2  pp2 vp3 interleaved mb3                           gpt
2  zero3 shard1 mb6                                  llama
4  cp2 ring tp2 sp                                   llama
4  tp2 zero3 mb3 full                                qwen3
4  pp2 cp2 mb3                                       gemma3 deepseek-v3
1  mb4 full                                          mixtral
2  zero3 mb3 full                                    mixtral
2  zero1 mb3                                         mixtral
2  tp2 sp mb4                                        mixtral
4  tp2 zero2 mb3                                     mixtral
4  pp2 vp2 interleaved cp2 mb3                       mixtral gpt-oss
2  tp2                                               qwen3-moe deepseek-v3 gpt-oss
2  ep2 mb3                                           mixtral
2  ep2 zero1 mb3                                     mixtral
2  ep2 zero2 mb3                                     mixtral
2  ep2 zero3 mb3 full                                mixtral
4  ep2 mb1                                           mixtral
4  ep2 zero1 mb1                                     mixtral
4  ep2 zero3 mb1                                     mixtral
4  ep4 zero3                                         mixtral
4  ep2 tp2 mb3                                       mixtral
4  ep2 tp2 sp zero3 mb3                              mixtral deepseek-v3 gpt-oss
4  ep2 pp2 mb3                                       mixtral
4  ep2 pp2 zero3 mb3                                 mixtral
4  ep2 pp2 vp2 interleaved mb3                       mixtral
4  ep2 pp2 zero-bubble mb3                           mixtral
2  ep2 cp2                                           mixtral
4  ep4 cp2 zero2                                     mixtral
2  ep2 compile                                       mixtral
2  ep2 mb3 selective                                 mixtral
2  ep2 mb3 budget40                                  mixtral
2  ep2 mb3 zero3 last                                mixtral
2  ep2 cp2 ring                                      mixtral
2  ep2 cp2 all-to-all                                mixtral gpt-oss
4  ep2 pp2 gpipe mb3                                 mixtral
8  ep2 tp2 sp pp2 vp2 interleaved zero3 mb3          mixtral
2  ep2 masked                                        mixtral
2  mb3 selective compile                             mixtral deepseek-v3 gpt-oss
4  pp2 gpipe cp2 ring mb3                            mixtral deepseek-v3
4  pp2 cp2 all-to-all budget40 mb3                   mixtral deepseek-v3
4  pp2 zero-bubble zero1 mb3                         mixtral
4  zero3 shard2 mb1 last                             mixtral
2  cp2 all-to-all compile                            gemma3
2  tp2 selective                                     phi4
4  pp2 cp2 all-to-all mb3                            gpt
2  zero3 mb3 full last                               sft
4  zero2 shard2 mb1 last                             llama
4  tp2 sp zero2                                      lora
4  tp2 sp zero3                                      gpt                     llama
4  pp2 cp2 mb3 selective                             sft                     llama gpt
"""

BY_INDUCTOR = """
2  zero3 mb3 selective                               lora
4  tp2 sp zero1 mb3 selective                        gpt
4  tp2 sp zero2 mb3                                  lora
4  pp2 cp2 zero1 mb3                                 sft
4  pp2 cp2 zero2 mb3 selective                       llama
8  tp2 sp pp2 zero3 mb3                              sft
8  tp2 sp cp2 zero3 shard2 full                      lora
8  tp2 sp pp2 cp2 vp2 interleaved mb3 full           ends
"""
"""Layouts with the pairs of features that no compiled row of the table has; for ALL."""

ALONG = {"dp", "tp2", "pp2", "cp2", "ep2", "zero3", "full"}
"""Features with which every model is trained, and each of ROUNDED_MODELS rounded, without ALL."""
ROUNDED_MODELS = {"llama", "mixtral"}

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
EXCHANGES = ("all-gather", "all-to-all", "ring")
SYNCS = ("every", "last")
DATA_WORDS = ("masked", "ramp", SHORT)
"""What makes it another training, whatever the layout."""
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
    def grows(self) -> bool:
        """Whether the first step has a smaller batch."""
        return "ramp" in self.words.split()

    @property
    def drops(self) -> bool:
        """Whether half of what adapters read is dropped, which only the same layout repeats."""
        return "dropped" in self.words.split()

    @property
    def compiler(self) -> str | None:
        """What torch.compile makes of every block, None where it stays as it is."""
        words = self.words.split()
        if "inductor" in words:
            return "inductor"
        return "aot_eager" if "compile" in words else None

    @property
    def compiled(self) -> bool:
        """Whether every block goes through torch.compile."""
        return self.compiler is not None

    @property
    def steps(self) -> int:
        """How many steps of the data are trained; the data itself depends on how many there are."""
        return SHORT_STEPS if SHORT in self.words.split() else STEPS[self.dtype]

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
            elif word in SYNCS:
                fields["gradient_sync"] = word
            elif word in ("full", "selective"):
                fields["recompute"] = word
            elif word.startswith("budget"):
                fields["recompute"] = "budget"
                fields["recompute_budget"] = int(word.removeprefix("budget")) / 100
            elif word == "sp":
                fields["sequence_parallel"] = True
            elif size := re.fullmatch(r"([a-z]+)(\d+)", word):
                fields[SIZES.get(size[1], size[1])] = int(size[2])
        batch = RAMP_UP.start if self.grows else GLOBAL_BATCH
        share = batch // Layout(**fields).dp(self.ranks)
        return Layout(**{"micro_batch": share, **fields})

    def settings(self) -> dict[str, Any]:
        """Its trainer.json, in fp64 as well, which no recipe may ask for.

        Adam's eps is large here: with a small one, a gradient that is nothing but rounding (a key's
        bias has none) would move its weight as far as any other. And rounding that carries a ReLU
        over its kink changes all of a token's gradient, so what is rounded has none.
        """
        model = MODELS[self.model]
        training = Training(
            seq_len=model.seq_len,
            global_batch=GLOBAL_BATCH,
            steps=DATA_STEPS,
            dtype="fp32",
            matmul_precision="highest",
            eps=1e-3,
            grad_clip=0.5,
            lr=0.1 if self.sgd else 1e-3,
            compile="blocks" if self.compiled else "none",
            ramp_up=RAMP_UP if self.grows else None,
        )
        shape = model.shape if self.dtype == "fp64" else model.smooth
        lora = model.lora and model.lora.model_copy(update={"dropout": 0.5 * self.drops})
        spec = make_spec(
            ranks=self.ranks,
            model=shape,
            lora=lora,
            training=training,
            data=model.data,
            layout=self.layout,
        )
        raw = native.settings(spec)
        raw["training"]["dtype"] = self.dtype
        return raw


def reference(case: Case) -> Case:
    """The same training in one process, in one piece, keeping all activations."""
    words = [word for word in case.words.split() if word in DATA_WORDS]
    return replace(case, ranks=1, words=" ".join(words), fault="")


def dropping() -> list[tuple[Case, Case]]:
    """Layouts in which adapters drop inputs: keeping all activations, and recomputing them."""
    layouts = ((1, "dropped mb4"), (2, "dropped tp2 sp mb4"), (2, "dropped zero3 mb3"))
    kept = [Case(ranks, words, "lora", "fp64") for ranks, words in layouts]
    words = {case: ("full", "budget20") if case.ranks == 1 else ("full",) for case in kept}
    return [
        (case, replace(case, words=f"{case.words} {word}")) for case in kept for word in words[case]
    ]


def exact(case: Case) -> Case:
    """The same training in fp32, which bf16 only rounds; fp64 would draw other weights."""
    return replace(case, dtype="fp32")


def table(everything: bool = ALL) -> list[Case]:
    """The rows, each with all of its models, in fp64."""
    return [
        Case(row.ranks, row.words, model, "fp64")
        for row in rows()
        for model in (*row.models, *(row.further if everything else ()))
    ]


def trained_table() -> list[Case]:
    """The cases of the table; by day few that together have every pair of features.

    Each brings most of the pairs, and of the axes of its model, that those before it leave.
    """
    if ALL:
        return table()
    left = {
        case: {frozenset(pair) for pair in combinations(_features(case), 2)}
        | {frozenset((case.model, axis)) for axis in _features(case) & ALONG}
        for case in table()
        if case.ranks < 4 or case.model not in SMALL_LAYOUTS_BY_DAY
    }
    chosen: list[Case] = []
    while any(left.values()):
        best = max(left, key=lambda case: len(left[case]))
        chosen.append(best)
        brought = left.pop(best)
        left = {case: brings - brought for case, brings in left.items()}
    return chosen


def _features(case: Case) -> set[str]:
    """The words of a case and what it has without a word, apart from sizes."""
    words = {re.sub(r"^(mb|budget)\d+", r"\1", word) for word in case.words.split()} - {"mb"}
    if case.layout.cp > 1 and words.isdisjoint(EXCHANGES):
        words.add("all-gather")
    if case.layout.pp > 1 and words.isdisjoint(SCHEDULES):
        words.add("1f1b")
    return words | ({"dp"} if case.layout.dp(case.ranks) > 1 else set())


def rounded(everything: bool = ALL) -> list[Case]:
    """The rows in fp32 and bf16, each with the model that has had the least of its words so far."""
    chosen: list[Case] = []
    had: Counter[tuple[str, str]] = Counter()
    for row in rows():
        models = (*row.models, *row.further)
        each = {model: [(model, word) for word in row.words.split()] for model in models}
        model = min(
            each, key=lambda model: sorted((had[pair] for pair in each[model]), reverse=True)
        )
        case = Case(row.ranks, row.words, model, "fp32")
        if not case.compiled:
            had.update(each[model])
            chosen.append(case)
    chosen = chosen if everything else _rounded_by_day(chosen)
    in_bf16 = [replace(case, dtype="bf16") for case in chosen]
    if not everything:
        chosen = [_shortened(case) if case.ranks >= SHORT_FROM_RANKS else case for case in chosen]
    return [*chosen, *in_bf16]


def _rounded_by_day(cases: list[Case]) -> list[Case]:
    """The cases of few ranks that together have every word, and each model its axes."""
    chosen: list[Case] = []
    had: set[str] = set()
    for case in sorted(cases, key=lambda case: case.ranks):
        words = {word for word in case.words.split() if not re.match(r"mb|budget", word)}
        axes = words & ALONG if case.model in ROUNDED_MODELS else set[str]()
        brings = words | {f"{case.model} {word}" for word in axes}
        if not brings <= had:
            chosen.append(case)
            had |= brings
    return chosen


def _shortened(case: Case) -> Case:
    return replace(case, words=f"{case.words} {SHORT}")


class Row(NamedTuple):
    """A row of the table."""

    ranks: int
    words: str
    models: tuple[str, ...]
    further: tuple[str, ...]
    """Models that are trained for ALL alone."""


def by_inductor(everything: bool = ALL) -> list[Case]:
    """Every compiled row of the table, and its additions, with Inductor's code; at night."""
    compiled = [case for case in table(everything=False) if case.compiled]
    again = [replace(case, words=case.words.replace("compile", "inductor")) for case in compiled]
    more = [
        Case(row.ranks, f"{row.words} inductor", model, "fp64")
        for row in rows(BY_INDUCTOR)
        for model in row.models
    ]
    return [*again, *more] if everything else []


def rows(table: str = TABLE) -> list[Row]:
    """The table, or another of its form."""
    cells = [re.split(r"\s{2,}", line) for line in table.strip().splitlines()]
    return [
        Row(int(ranks), words, tuple(models.split()), tuple(" ".join(further).split()))
        for ranks, words, models, *further in cells
    ]
