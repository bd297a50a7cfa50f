"""Checks of layouts. All problems of a layout are reported together, each with its reason.

RULES refuse combinations, and SIZE_RULES refuse sizes that do not divide evenly. Rules of one axis
are declared with the axis (core/axes); the others are declared here. Checks before a run and the
reference page of layout rules use them. The trainer relies on these checks. It repeats only those
without which a damaged file would lead to a wrong result.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.core.axes import AXES
from paceline.core.axes.axis import Rule, SizeRule, refuse
from paceline.core.hardware import NATIVE_NARROW
from paceline.core.layout import MODEL_AXES
from paceline.core.parallel_run import ParallelRun
from paceline.core.units import pluralize

RULES: tuple[Rule, ...] = (
    *(rule for axis in AXES for rule in axis.rules),
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
    *(
        refuse(
            "experts",
            "compile",
            recompute,
            native=True,
            why=f"experts with recompute {recompute} are not compiled, because the recomputed "
            "router of a compiled block may choose other experts: use layout.recompute=selective "
            "or none, or training.compile=none",
        )
        for recompute in ("full", "budget")
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
        why="recompute budget is not for an mmdit, because its blocks are recomputed as a whole "
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
"""Refused combinations, in any engine or in the native trainer."""


def low_precision_widths(x: ParallelRun) -> str | None:
    """With low precision, a block or tile divides hidden size, and heads and MLP widths over tp."""
    block = low_precision_block(x)
    if x.shape.kind != "decoder" or block == 1:
        return None
    tp, shape, head = x.layout.tp, x.shape, x.shape.head_dim
    ffns = (shape.ffn_size, shape.shared_ffn_size, shape.dense_ffn_size or 0)
    parts = (shape.num_heads * head, shape.kv_heads * head, *ffns)
    odd = [width for width in (shape.hidden_size, *(part // tp for part in parts)) if width % block]
    if not odd:
        return None
    smaller = f"a tp below {tp} or " if tp > 1 and shape.hidden_size % block == 0 else ""
    return (
        f"matrices {odd[0]} wide cannot be multiplied in {_low_precision(x)}, because it takes "
        f"multiples of {block}: use {smaller}training.dtype=bf16"
    )


def low_precision_rows(x: ParallelRun) -> str | None:
    """Blocks with one scale (mxfp8, nvfp4, blockwise) divide the tokens of a micro-batch / cp."""
    scaled = x.dtype in ("mxfp8", "nvfp4") or (x.dtype == "fp8" and x.fp8_recipe == "blockwise")
    block = low_precision_block(x)
    if x.shape.kind != "decoder" or x.seq_len is None or not scaled or x.tokens % block == 0:
        return None
    return (
        f"{x.tokens} tokens of a micro-batch cannot be multiplied in {_low_precision(x)}, because "
        f"the weights' gradients sum over blocks of {block}: use another layout.micro_batch or "
        "seq_len"
    )


def low_precision_block(x: ParallelRun) -> int:
    """Return the number that must divide the sides of a matrix.

    It is a block with one scale, a GPU's tile, or 1.
    """
    if x.dtype == "fp8" and x.fp8_recipe == "blockwise":
        return 128
    on_gpu = x.device == "cuda"
    blocks = {"fp8": 16 if on_gpu else 1, "mxfp8": 32, "nvfp4": 128 if on_gpu else 16}
    return blocks.get(x.dtype or "", 1)


def _low_precision(x: ParallelRun) -> str:
    """Return the name of the precision in messages."""
    where = " on a GPU" if x.device == "cuda" else ""
    return f"{x.fp8_recipe} {x.dtype}{where}" if x.dtype == "fp8" else f"{x.dtype}{where}"


SIZE_RULES: tuple[SizeRule, ...] = tuple(rule for axis in AXES for rule in axis.size_rules)
"""Conditions on sizes that apply to every engine."""
NATIVE_SIZE_RULES: tuple[SizeRule, ...] = (
    *(rule for axis in AXES for rule in axis.native_size_rules),
    low_precision_widths,
    low_precision_rows,
)
"""Additional conditions on sizes that apply to the native trainer."""


def features(x: ParallelRun) -> frozenset[str]:
    """Return the features of a run that RULES refer to; `no-tp` stands for an axis of size 1.

    A schedule is a feature if there are several stages or if it is not the default. The same holds
    for an exchange. An unset device or dtype is not a feature.
    """
    layout = x.layout
    schedule, exchange = layout.effective_schedule, layout.cp_exchange
    by_budget, shared = layout.recompute == "budget", layout.recompute_budget is not None
    sizes = {axis.name: axis.size(x) for axis in AXES}
    present = {
        **{axis: size > 1 for axis, size in sizes.items()},
        **{f"no-{axis}": size == 1 for axis, size in sizes.items()},
        "sp": layout.sequence_parallel,
        f"zero{layout.zero_stage}": True,
        "dp-shard": layout.dp_shard is not None,
        "hybrid": layout.dp_shard is not None and layout.dp_shard < x.data_ranks,
        "sync-every": layout.gradient_sync == "every",
        schedule: layout.pp > 1 or schedule != "1f1b",
        exchange: layout.cp > 1 or exchange != "all-gather",
        layout.recompute: layout.recompute != "none",
        "budget without share": by_budget and not shared,
        "share without budget": shared and not by_budget,
        "compile": x.compiled,
        "tied": x.shape.tied_embeddings,
        "document-mask": x.document_mask,
        "mmdit": x.shape.kind == "mmdit",
        "experts": x.shape.kind == "decoder" and x.shape.num_experts > 1,
        x.dtype or "": x.dtype is not None,
        x.device or "": x.device is not None,
    }
    return frozenset(name for name, is_present in present.items() if is_present)


def violated_rules(present: frozenset[str], rules: Iterable[Rule] = RULES) -> list[Rule]:
    """Return the rules whose features are all present."""
    return [rule for rule in rules if rule.features <= present]


def layout_problems(x: ParallelRun) -> list[str]:
    """Return why a layout cannot run in any engine, one sentence each; empty if it can.

    Conditions on sizes that are not set are not checked.
    """
    layout = x.layout
    if x.world_size % layout.model_devices:
        sizes = " x ".join(f"{axis} {getattr(layout, axis)}" for axis in MODEL_AXES)
        return [
            f"{sizes} = {layout.model_devices} does not divide "
            f"{pluralize(x.world_size, 'device')}: use a multiple of {layout.model_devices}"
        ]
    return _problems(x, SIZE_RULES, native=False)


def native_problems(x: ParallelRun) -> list[str]:
    """Return why the native trainer cannot run a layout that passes `layout_problems`."""
    return _problems(x, NATIVE_SIZE_RULES, native=True)


def _problems(x: ParallelRun, size_rules: Iterable[SizeRule], *, native: bool) -> list[str]:
    broken_rules = violated_rules(features(x), (rule for rule in RULES if rule.native == native))
    unmet = (problem for rule in size_rules if (problem := rule(x)))
    return [*(rule.reason for rule in broken_rules), *unmet]
