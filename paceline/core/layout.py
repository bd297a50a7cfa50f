"""Parallel layouts: how one model is spread over many devices, and which spreads are valid.

Two tables say what is refused, each refusal with its reason: RULES by what a layout combines, and
CONDITIONS by its sizes. To refuse one more combination is one more line in RULES; they feed the
checks before a run, docs/layouts.md, and the trainer, which gets RULES with its settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import lcm
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from paceline.core.shape import DecoderShape
from paceline.core.value import Value

Recompute = Literal["none", "selective", "full"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
Exchange = Literal["all-gather", "all-to-all", "ring"]


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
    schedule: Schedule = "1f1b"
    sequence_parallel: bool = False
    dp_shard: PositiveInt | None = None
    """Ranks of dp x cp that share one copy of what ZeRO-2 and 3 shard; None is all of them, fewer is
    hybrid sharding (HSDP)."""
    cp_exchange: Exchange = "all-gather"
    """How context-parallel ranks see each other's keys and values."""

    @property
    def model_devices(self) -> int:
        """Devices that hold one replica: tp x pp x cp."""
        return self.tp * self.pp * self.cp

    @property
    def smallest_world(self) -> int:
        """Fewest devices on which the layout is whole: one replica, or one hybrid shard of several."""
        return self.tp * self.pp * lcm(self.cp, self.dp_shard or 1)

    @property
    def effective_schedule(self) -> Schedule:
        """The pipeline schedule that runs: 1f1b over several chunks a rank is the interleaved one."""
        chunked = self.schedule == "1f1b" and self.pp > 1 and self.vp > 1
        return "interleaved" if chunked else self.schedule

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
        sizes = {"dp": self.dp(world_size), "tp": self.tp, "pp": self.pp, "cp": self.cp,
                 "vp": self.vp, "ep": self.ep, "zero": self.zero_stage}  # fmt: skip
        floor = {"zero": 0}
        return " ".join(f"{k} {v}" for k, v in sizes.items() if k == "dp" or v > floor.get(k, 1))


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
    refuse("sp", "no-tp", why="sequence_parallel needs tp > 1, because it cuts the sequence over the "
           "tensor ranks: set layout.tp, or leave layout.sequence_parallel out"),
    refuse("vp", "no-pp", why="vp > 1 needs pp > 1, because virtual stages are chunks of a pipeline "
           "rank's layers: set layout.pp, or leave layout.vp at 1"),
    refuse("gpipe", "no-pp", why="schedule gpipe needs pp > 1, because a schedule orders the "
           "micro-batches of pipeline stages: set layout.pp, or leave layout.schedule at 1f1b"),
    refuse("zero-bubble", "no-pp", why="schedule zero-bubble needs pp > 1, because without pipeline "
           "stages there is no bubble to fill: set layout.pp, or leave layout.schedule at 1f1b"),
    refuse("interleaved", "no-vp", why="schedule interleaved needs vp > 1, because it alternates "
           "between several chunks of layers a rank: set layout.vp, or use layout.schedule=1f1b"),
    refuse("all-to-all", "no-cp", why="cp_exchange all-to-all needs cp > 1, because without "
           "context-parallel ranks nothing is exchanged: set layout.cp, or leave it at all-gather"),
    refuse("ring", "no-cp", why="cp_exchange ring needs cp > 1, because without context-parallel "
           "ranks there is no ring: set layout.cp, or leave it at all-gather"),
    refuse("dp-shard", "zero0", why="dp_shard needs zero_stage 2 or 3, because ZeRO-0 shards "
           "nothing: set layout.zero_stage, or leave layout.dp_shard out"),
    refuse("dp-shard", "zero1", why="dp_shard needs zero_stage 2 or 3, because ZeRO-1 spreads its "
           "optimizer over all of dp x cp: set layout.zero_stage, or leave layout.dp_shard out"),
    refuse("ep", native=True, why="ep > 1 is not in the native trainer, because its models have no "
           "experts: they are estimated, parsed and launched through other engines; use layout.ep=1"),
    refuse("zero-bubble", "compile", native=True, why="schedule zero-bubble cannot run compiled "
           "blocks, because it splits a backward pass that torch.compile makes one piece: use "
           "training.compile=none or another schedule"),
    refuse("zero-bubble", "full", native=True, why="schedule zero-bubble cannot recompute whole "
           "blocks, because it takes weight gradients one by one and would compute a block anew for "
           "each of them: use layout.recompute=selective or none, or another schedule"),
    refuse("ring", "cuda", "fp32", native=True, why="cp_exchange ring needs bf16 or fp16 on a GPU, "
           "because flash attention has no fp32 kernel there: set training.dtype, or use "
           "layout.cp_exchange=all-gather"),
)  # fmt: skip
"""What cannot be combined, in any engine or in the native trainer."""


def features(
    layout: Layout,
    world_size: int,
    *,
    dtype: str | None = None,
    device: str | None = None,
    compiled: bool = False,
    tied: bool = False,
) -> frozenset[str]:
    """The names by which RULES speak of a run; `no-tp` and its like stand for an axis of size 1.

    A schedule counts where there are stages or another than the default was asked for; an exchange
    likewise. `device` is cpu or cuda; None leaves it open, as `dtype` does.
    """
    data_ranks = layout.dp(world_size) * layout.cp
    schedule, exchange = layout.effective_schedule, layout.cp_exchange
    axes = {axis: getattr(layout, axis) > 1 for axis in ("tp", "pp", "cp", "vp")}
    present = {
        **axes,
        **{f"no-{axis}": not used for axis, used in axes.items()},
        "dp": layout.dp(world_size) > 1,
        "ep": layout.ep > 1,
        "sp": layout.sequence_parallel,
        f"zero{layout.zero_stage}": True,
        "dp-shard": layout.dp_shard is not None,
        "hybrid": layout.dp_shard is not None and layout.dp_shard < data_ranks,
        schedule: axes["pp"] or schedule != "1f1b",
        exchange: axes["cp"] or exchange != "all-gather",
        layout.recompute: layout.recompute != "none",
        "compile": compiled,
        "tied": tied,
        dtype or "": dtype is not None,
        device or "": device is not None,
    }
    return frozenset(name for name, there in present.items() if there)


def broken_rules(present: frozenset[str], rules: Iterable[Rule] = RULES) -> list[Rule]:
    """The rules of which all features are present."""
    return [rule for rule in rules if rule.features <= present]


@dataclass(frozen=True)
class Sizes:
    """What CONDITIONS look at; a world that holds whole replicas."""

    layout: Layout
    shape: DecoderShape
    world_size: int
    global_batch: int
    seq_len: int | None = None
    device: str | None = None
    """cpu or cuda; None leaves it open."""

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of one replica in a step."""
        return self.layout.num_microbatches(self.world_size, self.global_batch)


Condition = Callable[[Sizes], str | None]
"""Why the sizes do not fit together, None when they do; the first docstring line is the condition."""


def whole_batches(x: Sizes) -> str | None:
    """`global_batch` is a multiple of dp x `micro_batch`."""
    dp, micro_batch = x.layout.dp(x.world_size), x.layout.micro_batch
    if x.global_batch % (dp * micro_batch) == 0:
        return None
    return (
        f"global_batch {x.global_batch} is not a multiple of dp {dp} x micro_batch {micro_batch} = "
        f"{dp * micro_batch}, but all replicas run the same number of whole micro-batches"
    )


def whole_heads(x: Sizes) -> str | None:
    """tp divides the query heads, and divides the key/value heads or is a multiple of them."""
    # Megatron-Core 0.16 (transformer_config.py, attention.py) takes either for its query groups.
    tp, heads, kv_heads = x.layout.tp, x.shape.num_heads, x.shape.kv_heads
    if heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0):
        return None
    return (
        f"{heads} query and {kv_heads} key/value heads cannot be split over tp {tp}, because a tensor "
        "rank computes whole heads: use a tp that divides both"
    )


def whole_kv_heads(x: Sizes) -> str | None:
    """tp divides the key/value heads."""
    if x.shape.kv_heads % x.layout.tp == 0:
        return None
    return (
        f"{x.shape.kv_heads} key/value heads cannot be split over tp {x.layout.tp}, because tensor "
        "ranks do not copy them: use a tp that divides them"
    )


def whole_heads_in_all_to_all(x: Sizes) -> str | None:
    """With cp > 1 and `cp_exchange` all-to-all, tp x cp divides the query heads."""
    ranks = x.layout.tp * x.layout.cp
    used = x.layout.cp > 1 and x.layout.cp_exchange == "all-to-all"
    if not used or x.shape.num_heads % ranks == 0:
        return None
    return (
        f"{x.shape.num_heads} query heads cannot be split over tp {x.layout.tp} x cp {x.layout.cp} = "
        f"{ranks}, because all-to-all gives each rank whole heads: use layout.cp_exchange=all-gather"
    )


def whole_ffn(x: Sizes) -> str | None:
    """tp divides `ffn_size`."""
    if x.shape.ffn_size % x.layout.tp == 0:
        return None
    return (
        f"ffn_size {x.shape.ffn_size} cannot be split over tp {x.layout.tp}, because tensor ranks "
        "hold equal parts of it: use a tp that divides it"
    )


def whole_sequence_chunks(x: Sizes) -> str | None:
    """With cp > 1, 2 x cp divides `seq_len`."""
    chunks = 2 * x.layout.cp
    if x.layout.cp == 1 or x.seq_len is None or x.seq_len % chunks == 0:
        return None
    return (
        f"seq_len {x.seq_len} cannot be split into 2 x cp = {chunks} chunks, because a context rank "
        "takes an early and a late one, so that causal attention is equal work for all: use a "
        f"multiple of {chunks}"
    )


def whole_sequence_parts(x: Sizes) -> str | None:
    """With `sequence_parallel`, tp x cp divides `seq_len`."""
    parts = x.layout.tp * x.layout.cp
    if not x.layout.sequence_parallel or x.seq_len is None or x.seq_len % parts == 0:
        return None
    return (
        f"seq_len {x.seq_len} cannot be split over tp {x.layout.tp} x cp {x.layout.cp} = {parts}, "
        f"because sequence_parallel gives ranks equal parts of it: use a multiple of {parts}"
    )


def whole_stages(x: Sizes) -> str | None:
    """pp x vp divides the layers, or the layers with embedding and head counted as one each."""
    # Megatron may count them: 126 + 2 for Llama 3.1 405B.
    stages, layers = x.layout.pp * x.layout.vp, x.shape.num_layers
    if layers % stages == 0 or (layers + 2) % stages == 0:
        return None
    return (
        f"{layers} layers (or {layers + 2} with embedding and head) cannot be split over pp "
        f"{x.layout.pp} x vp {x.layout.vp} = {stages} stages, because a pipeline is as slow as its "
        "longest one: use a pp x vp that divides either"
    )


def whole_shards(x: Sizes) -> str | None:
    """`dp_shard` divides dp x cp."""
    ranks = x.layout.dp(x.world_size) * x.layout.cp
    if not x.layout.dp_shard or ranks % x.layout.dp_shard == 0:
        return None
    return (
        f"dp x cp = {ranks} ranks cannot be split into groups of dp_shard {x.layout.dp_shard}, because "
        "each group holds one copy of the states: use a dp_shard that divides them"
    )


def whole_vocabulary(x: Sizes) -> str | None:
    """tp divides the padded vocabulary."""
    rows = x.shape.padded_vocab(x.layout.tp)
    if rows % x.layout.tp == 0:
        return None
    return (
        f"a vocabulary of {rows} rows cannot be split over tp {x.layout.tp}, because tensor ranks "
        "hold equal parts of the embedding: pad it with model.vocab_multiple=2 or more"
    )


def filled_pipeline(x: Sizes) -> str | None:
    """1f1b has at least as many micro-batches as there are stages."""
    used = x.layout.pp > 1 and x.layout.effective_schedule == "1f1b"
    if not used or x.num_microbatches >= x.layout.pp:
        return None
    return (
        f"{x.num_microbatches} micro-batches a step do not fill pp {x.layout.pp}, because 1f1b begins "
        "with one for each stage: use a larger global_batch, a smaller layout.micro_batch or "
        "layout.schedule=gpipe"
    )


def whole_rounds(x: Sizes) -> str | None:
    """interleaved and zero-bubble: the number of rounds, micro-batches // pp, divides the micro-batches."""
    schedule, num = x.layout.effective_schedule, x.num_microbatches
    rounds = max(1, num // x.layout.pp)
    if x.layout.pp == 1 or schedule not in ("interleaved", "zero-bubble") or num % rounds == 0:
        return None
    return (
        f"{num} micro-batches a step cannot be split into {rounds} equal rounds, because {schedule} "
        f"repeats one round of at least pp {x.layout.pp}: use a multiple of {x.layout.pp}"
    )


def ring_heads(x: Sizes) -> str | None:
    """With cp > 1 and `cp_exchange` ring on a GPU, heads are a multiple of 8 and at most 256 wide."""
    width = x.shape.head_dim
    used = x.layout.cp > 1 and x.layout.cp_exchange == "ring" and x.device == "cuda"
    if not used or (width % 8 == 0 and width <= 256):
        return None
    return (
        f"heads {width} wide cannot go around a ring on a GPU, because flash attention there takes "
        "multiples of 8 up to 256: use layout.cp_exchange=all-gather"
    )


CONDITIONS: tuple[Condition, ...] = (
    whole_batches, whole_heads, whole_heads_in_all_to_all, whole_ffn, whole_sequence_chunks,
    whole_sequence_parts, whole_stages, whole_shards,
)  # fmt: skip
"""What sizes must satisfy in any engine."""
NATIVE_CONDITIONS: tuple[Condition, ...] = (
    whole_kv_heads, whole_vocabulary, filled_pipeline, whole_rounds, ring_heads,
)  # fmt: skip
"""What they must satisfy in the native trainer besides."""


def layout_problems(
    layout: Layout,
    shape: DecoderShape,
    world_size: int,
    global_batch: int,
    seq_len: int | None = None,
) -> list[str]:
    """Why this layout cannot run in any engine, one sentence each; empty when it can.

    `seq_len` None leaves out what depends on it.
    """
    if world_size % layout.model_devices:
        return [
            f"tp {layout.tp} x pp {layout.pp} x cp {layout.cp} = {layout.model_devices} "
            f"does not divide {world_size} devices: use a multiple of {layout.model_devices}"
        ]
    broken = broken_rules(features(layout, world_size), (r for r in RULES if not r.native))
    sizes = Sizes(layout, shape, world_size, global_batch, seq_len)
    return [rule.reason for rule in broken] + _unmet(CONDITIONS, sizes)


def native_problems(
    layout: Layout,
    shape: DecoderShape,
    world_size: int,
    global_batch: int,
    *,
    dtype: str | None = None,
    device: str | None = None,
    compiled: bool = False,
) -> list[str]:
    """Why the native trainer cannot run a layout without `layout_problems`, one sentence each."""
    present = features(
        layout, world_size, dtype=dtype, device=device, compiled=compiled,
        tied=shape.tied_embeddings,
    )  # fmt: skip
    broken = broken_rules(present, (rule for rule in RULES if rule.native))
    sizes = Sizes(layout, shape, world_size, global_batch, device=device)
    return [rule.reason for rule in broken] + _unmet(NATIVE_CONDITIONS, sizes)


def _unmet(conditions: Iterable[Condition], sizes: Sizes) -> list[str]:
    return [problem for condition in conditions if (problem := condition(sizes))]
