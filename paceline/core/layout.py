"""Parallel layouts: how one model is spread over many devices, and which spreads are valid.

Two tables say what is refused, each refusal with its reason: RULES by what a layout combines, and
the CONDITIONS of core/layout_sizes.py. To refuse one more combination is one more entry of RULES;
they feed the checks before a run, docs/layouts.md, and the trainer, which gets RULES with its
settings.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import lcm
from typing import Annotated, Literal

from pydantic import Field

from paceline.core.hardware import NATIVE_NARROW
from paceline.core.value import NonNegativeInt, PositiveInt, Value

Recompute = Literal["none", "selective", "full", "budget"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
Exchange = Literal["all-gather", "all-to-all", "ring"]
GradientSync = Literal["every", "last"]


class Layout(Value):
    """Sizes of the parallel axes; data parallelism is what remains of the world."""

    tp: PositiveInt = 1
    pp: PositiveInt = 1
    cp: PositiveInt = 1
    vp: PositiveInt = 1
    ep: PositiveInt = 1
    zero_stage: Literal[0, 1, 2, 3] = 0
    micro_batch: PositiveInt = 1
    recompute: Recompute = "none"
    recompute_budget: Annotated[float, Field(ge=0, le=1)] | None = None
    """Of recompute=budget: the share that may be kept of the activations that lie between full
    recomputation (0) and none (1)."""
    schedule: Schedule = "1f1b"
    sequence_parallel: bool = False
    dp_shard: PositiveInt | None = None
    """Ranks of dp x cp that share one copy of what ZeRO-2 and 3 shard; None is all of them, fewer
    is hybrid sharding (HSDP)."""
    cp_exchange: Exchange = "all-gather"
    """How context-parallel ranks see each other's keys and values."""
    gradient_sync: GradientSync | None = None
    """The micro-batches of a step after which gradients are averaged; None is what the ZeRO stage
    does by itself: 0 and 1 after the last one, 2 and 3 after every one."""

    @property
    def model_devices(self) -> int:
        """Devices that hold one replica: tp x pp x cp."""
        return self.tp * self.pp * self.cp

    @property
    def smallest_world(self) -> int:
        """Fewest devices on which the layout is whole: one replica, or one hybrid shard."""
        return self.tp * self.pp * lcm(self.cp, self.dp_shard or 1)

    @property
    def effective_schedule(self) -> Schedule:
        """The pipeline schedule that runs: 1f1b over several chunks a rank is interleaved."""
        chunked = self.schedule == "1f1b" and self.pp > 1 and self.vp > 1
        return "interleaved" if chunked else self.schedule

    @property
    def recomputation(self) -> str:
        """What is recomputed, in words: `none`, `full`, `budget 0.5`."""
        share = self.recompute_budget
        return self.recompute if share is None else f"{self.recompute} {share:g}"

    def dp(self, world_size: NonNegativeInt) -> int:
        """Data-parallel replicas in a world of `world_size` devices."""
        return world_size // self.model_devices

    def shards(self, dp: int) -> int:
        """Ranks over which ZeRO spreads one copy of what it shards."""
        return self.dp_shard if self.dp_shard and self.zero_stage >= 2 else dp * self.cp

    def num_microbatches(self, world_size: int, global_batch: int) -> int:
        """Micro-batches that one replica runs per step (gradient accumulation)."""
        return global_batch // (self.dp(world_size) * self.micro_batch)

    def label(self, world_size: int) -> str:
        """The axes that are larger than one, in the field's order: `dp 4 tp 2 zero 3`."""
        sizes = {
            "dp": self.dp(world_size),
            "tp": self.tp,
            "pp": self.pp,
            "cp": self.cp,
            "vp": self.vp,
            "ep": self.ep,
            "zero": self.zero_stage,
        }
        floor = {"zero": 0}
        return " ".join(f"{k} {v}" for k, v in sizes.items() if k == "dp" or v > floor.get(k, 1))

    def full_label(self, world_size: int) -> str:
        """The same with what a step is made of: `dp 4 tp 2 micro-batch 2 recompute full`."""
        return beside_axes(self.label(world_size), self.micro_batch, self.recomputation)


def beside_axes(axes: str, micro_batch: int, recomputation: str) -> str:
    """The axes of a layout, its micro-batch, and what it recomputes if anything."""
    recomputed = "" if recomputation == "none" else f" recompute {recomputation}"
    return f"{axes} micro-batch {micro_batch}{recomputed}"


@dataclass(frozen=True)
class Rule:
    """A combination that is refused wherever all of its features are present."""

    features: frozenset[str]
    reason: str
    """One sentence: what is refused, why, and what to do instead."""
    native: bool = False
    """True where only the trainer that comes with Paceline refuses it."""


def refuse(*features: str, why: str, native: bool = False) -> Rule:
    """One line of RULES."""
    return Rule(frozenset(features), why, native)


RULES: tuple[Rule, ...] = (
    refuse(
        "sp",
        "no-tp",
        why="sequence_parallel needs tp > 1, because it cuts the sequence over the tensor ranks: "
        "set layout.tp, or leave layout.sequence_parallel out",
    ),
    refuse(
        "vp",
        "no-pp",
        why="vp > 1 needs pp > 1, because virtual stages are chunks of a pipeline rank's layers: "
        "set layout.pp, or leave layout.vp at 1",
    ),
    refuse(
        "gpipe",
        "no-pp",
        why="schedule gpipe needs pp > 1, because a schedule orders the micro-batches of pipeline "
        "stages: set layout.pp, or leave layout.schedule at 1f1b",
    ),
    refuse(
        "zero-bubble",
        "no-pp",
        why="schedule zero-bubble needs pp > 1, because without pipeline stages there is no "
        "bubble to fill: set layout.pp, or leave layout.schedule at 1f1b",
    ),
    refuse(
        "interleaved",
        "no-vp",
        why="schedule interleaved needs vp > 1, because it alternates between several chunks of "
        "layers a rank: set layout.vp, or use layout.schedule=1f1b",
    ),
    refuse(
        "all-to-all",
        "no-cp",
        why="cp_exchange all-to-all needs cp > 1, because without context-parallel ranks nothing "
        "is exchanged: set layout.cp, or leave it at all-gather",
    ),
    refuse(
        "ring",
        "no-cp",
        why="cp_exchange ring needs cp > 1, because without context-parallel ranks there is no "
        "ring: set layout.cp, or leave it at all-gather",
    ),
    refuse(
        "dp-shard",
        "zero0",
        why="dp_shard needs zero_stage 2 or 3, because ZeRO-0 shards nothing: set "
        "layout.zero_stage, or leave layout.dp_shard out",
    ),
    refuse(
        "dp-shard",
        "zero1",
        why="dp_shard needs zero_stage 2 or 3, because ZeRO-1 spreads its optimizer over all of "
        "dp x cp: set layout.zero_stage, or leave layout.dp_shard out",
    ),
    refuse(
        "sync-every",
        "zero0",
        why="gradient_sync every needs zero_stage 2 or 3, because ZeRO-0 keeps whole gradients and "
        "adds up micro-batches in them: use layout.gradient_sync=last, or set layout.zero_stage",
    ),
    refuse(
        "sync-every",
        "zero1",
        why="gradient_sync every needs zero_stage 2 or 3, because ZeRO-1 keeps whole gradients and "
        "adds up micro-batches in them: use layout.gradient_sync=last, or set layout.zero_stage",
    ),
    refuse(
        "sync-every",
        "pp",
        native=True,
        why="gradient_sync every cannot run in a pipeline, because PyTorch's stages reduce "
        "gradients behind the last micro-batch: use layout.gradient_sync=last",
    ),
    refuse(
        "budget without share",
        why="recompute budget needs its share of activations, because that decides what is kept: "
        "set layout.recompute_budget to a number from 0 to 1",
    ),
    refuse(
        "share without budget",
        why="recompute_budget needs recompute budget, because the other kinds of recomputation "
        "keep what they keep: set layout.recompute=budget, or leave layout.recompute_budget out",
    ),
    refuse(
        "ep",
        native=True,
        why="ep > 1 is not in the native trainer, because its models have no experts: models with "
        "experts are estimated, and their logs parsed; use layout.ep=1",
    ),
    refuse(
        "document-mask",
        "cp",
        native=True,
        why="data.document_mask is not for cp > 1, because ranks with parts of a sequence "
        "attend to all of it: use layout.cp=1, or leave data.document_mask out",
    ),
    *(
        refuse(
            "document-mask",
            "compile",
            recompute,
            native=True,
            why=f"data.document_mask with recompute {recompute} is not compiled, because "
            "torch.compile leaves a whole recomputed block alone where it cannot trace its "
            "attention: use layout.recompute=selective or none, or training.compile=none",
        )
        for recompute in ("full", "budget")
    ),
    refuse(
        "zero-bubble",
        "compile",
        native=True,
        why="schedule zero-bubble cannot run compiled blocks, because it splits a backward pass "
        "that torch.compile makes one piece: use training.compile=none or another schedule",
    ),
    refuse(
        "zero-bubble",
        "full",
        native=True,
        why="schedule zero-bubble cannot recompute whole blocks, because it takes weight "
        "gradients one by one and would compute a block anew for each of them: use "
        "layout.recompute=selective or none, or another schedule",
    ),
    refuse(
        "zero-bubble",
        "budget",
        native=True,
        why="schedule zero-bubble cannot recompute by a budget, because it takes weight gradients "
        "one by one and would compute parts of a block anew for each of them: use "
        "layout.recompute=selective or none, or another schedule",
    ),
    refuse(
        "ring",
        "cuda",
        "fp32",
        native=True,
        why="cp_exchange ring needs bf16 or fp16 on a GPU, because flash attention has no fp32 "
        "kernel there: set training.dtype, or use layout.cp_exchange=all-gather",
    ),
    refuse(
        "mmdit",
        "pp",
        native=True,
        why="pp > 1 is not for an mmdit, because its two streams, its time and its text would all "
        "have to pass from stage to stage, and 12 billion parameters fit without: use "
        "layout.zero_stage=3 or layout.tp",
    ),
    refuse(
        "mmdit",
        "sp",
        native=True,
        why="sequence_parallel is not for an mmdit, because its short streams leave little "
        "between the layers to save: use layout.tp without it",
    ),
    refuse(
        "mmdit",
        "all-to-all",
        native=True,
        why="cp_exchange all-to-all is not for an mmdit, because without a mask all ranks do "
        "equal work on gathered keys and values: use layout.cp_exchange=all-gather",
    ),
    refuse(
        "mmdit",
        "ring",
        native=True,
        why="cp_exchange ring is not for an mmdit, because its sequences are too short to hide "
        "the passing on: use layout.cp_exchange=all-gather",
    ),
    refuse(
        "mmdit",
        "selective",
        native=True,
        why="recompute selective is not for an mmdit, because its attention keeps no scores that "
        "could be saved: use layout.recompute=full",
    ),
    refuse(
        "mmdit",
        "budget",
        native=True,
        why="recompute budget is not for an mmdit, because its blocks are computed anew as a whole "
        "or not at all: use layout.recompute=full or none",
    ),
    *(
        refuse(
            "mmdit",
            dtype,
            native=True,
            why=f"{dtype} is not for an mmdit, because its blocks are not converted to such "
            "products: use training.dtype=bf16",
        )
        for dtype in NATIVE_NARROW
    ),
)
"""What cannot be combined, in any engine or in the native trainer."""


def features(
    layout: Layout,
    world_size: int,
    *,
    dtype: str | None = None,
    device: str | None = None,
    compiled: bool = False,
    tied: bool = False,
    document_mask: bool = False,
    kind: str = "decoder",
) -> frozenset[str]:
    """The names by which RULES speak of a run; `no-tp` and its like stand for an axis of size 1.

    A schedule counts where there are stages or another than the default was asked for; an exchange
    likewise. `device` is cpu or cuda; None leaves it open, as `dtype` does.
    """
    data_ranks = layout.dp(world_size) * layout.cp
    schedule, exchange = layout.effective_schedule, layout.cp_exchange
    axes = {axis: getattr(layout, axis) > 1 for axis in ("tp", "pp", "cp", "vp")}
    by_budget, shared = layout.recompute == "budget", layout.recompute_budget is not None
    present = {
        **axes,
        **{f"no-{axis}": not used for axis, used in axes.items()},
        "dp": layout.dp(world_size) > 1,
        "ep": layout.ep > 1,
        "sp": layout.sequence_parallel,
        f"zero{layout.zero_stage}": True,
        "dp-shard": layout.dp_shard is not None,
        "hybrid": layout.dp_shard is not None and layout.dp_shard < data_ranks,
        "sync-every": layout.gradient_sync == "every",
        schedule: axes["pp"] or schedule != "1f1b",
        exchange: axes["cp"] or exchange != "all-gather",
        layout.recompute: layout.recompute != "none",
        "budget without share": by_budget and not shared,
        "share without budget": shared and not by_budget,
        "compile": compiled,
        "tied": tied,
        "document-mask": document_mask,
        "mmdit": kind == "mmdit",
        dtype or "": dtype is not None,
        device or "": device is not None,
    }
    return frozenset(name for name, there in present.items() if there)


def broken_rules(present: frozenset[str], rules: Iterable[Rule] = RULES) -> list[Rule]:
    """The rules of which all features are present."""
    return [rule for rule in rules if rule.features <= present]
