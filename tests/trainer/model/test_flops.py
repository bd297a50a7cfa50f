"""The catalog's FLOPs are those that PyTorch counts in the trainer's own model, to the last one.

On the meta device attention is computed by GEMMs over the whole square, which is what the
full-attention convention counts, or for layers with a window over blocks, which are more than it.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from paceline.core.flops import (
    attended_keys,
    flops_input,
    hardware_flops_per_token,
    model_flops_per_token,
)
from paceline.core.layout import Layout, Recompute
from paceline.core.recompute import block_levels
from paceline.core.run import RunSpec
from paceline.core.shape import DecoderShape, LoraSpec, has_experts
from paceline.engines import native
from paceline.trainer.config import parse_config
from paceline.trainer.model.windowed_attention import MIN_BLOCK_TOKENS
from tests.nightly import NIGHTLY
from tests.trainer.test_workloads import TINY, resolved, whole_model

SAMPLES = 2
DECODERS = [name for name in TINY if resolved(name).model.kind == "decoder"]


def grouped_flops(
    left: torch.Size, right: torch.Size, counts: torch.Size, *, out_shape: torch.Size, **_: object
) -> int:
    """FLOPs of grouped GEMMs, which the meta device does not compute one by one."""
    return 2 * left[0] * left[1] * right[1]


GROUPED: dict[object, object] = {
    torch.ops.paceline.grouped_linear: grouped_flops,
    torch.ops.paceline.grouped_weight_gradient: grouped_flops,
}


def counted(
    spec: RunSpec, recompute: Recompute, budget: float | None = None, **levels: tuple[str, ...]
) -> int:
    """FLOPs of a forward and a backward pass of SAMPLES samples; `levels` in those' place."""
    layout = Layout(recompute=recompute, recompute_budget=budget)
    raw = native.settings(spec.model_copy(update={"layout": layout}))
    model = whole_model(parse_config({**raw, **levels}))
    model.make_tables(torch.device("meta"))
    tokens = torch.zeros(SAMPLES, spec.training.seq_len, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False, custom_mapping=GROUPED) as counter:
        model(tokens, tokens).backward()
    return counter.get_total_flops()


def promised(spec: RunSpec, recompute: Recompute, budget: float | None = None) -> float:
    """What the formulas say of the same, with every query attending to every key."""
    layout = Layout(recompute=recompute, recompute_budget=budget)
    x = flops_input(spec.model, spec.training.seq_len, layout, spec.lora)
    per_token = model_flops_per_token if recompute == "none" else hardware_flops_per_token
    return SAMPLES * spec.training.seq_len * per_token("full-attention", x)


def before_the_first_adapter(shape: DecoderShape, lora: LoraSpec | None) -> int:
    """FLOPs per token of gradients that nothing needs: those of the first block's input.

    Where the embedding is frozen, no gradient flows below the first block's q, k and v.
    """
    if lora is None or lora.train_rest:
        return 0
    widths = shape.attention_size + 2 * shape.kv_size
    return 2 * shape.hidden_size * (widths + 3 * lora.rank)


def not_done_again(shape: DecoderShape, lora: LoraSpec | None) -> int:
    """FLOPs per token that recomputing a block saves: it ends with the last tensor that is needed.

    That is the input of the block's last product, or, behind it, the input of a norm or of the sum
    over experts, which a shared expert follows.
    """
    if shape.norm_position != "pre":
        return 0
    if has_experts(shape):
        routed = shape.num_layers - shape.first_dense_layers
        narrow = routed * shape.shared_ffn_size
        narrow += shape.first_dense_layers * (shape.dense_ffn_size or 0)
        return 2 * narrow * shape.hidden_size - sums_again(shape, ("full",) * shape.num_layers)
    last = lora.rank * shape.hidden_size if lora and "down" in lora.targets else 0
    return shape.num_layers * 2 * (last or shape.ffn_size * shape.hidden_size)


def biases_of_experts(shape: DecoderShape) -> int:
    """FLOPs per token of adding a block's biases of experts, each as a GEMM over all of them."""
    if not has_experts(shape) or not shape.bias:
        return 0
    widths = 2 * shape.ffn_size + shape.hidden_size
    return 2 * shape.experts_per_token * shape.num_experts * widths


def weighted_sums(shape: DecoderShape, passes: int = 2) -> int:
    """FLOPs per token of the sums over each token's experts, of their biases, and the gradients.

    The catalog leaves them out, as it does all that is not a GEMM of weights or attention. Biases
    are added in `passes` passes, of which the last one sums their gradients.
    """
    each = 2 * shape.experts_per_token * shape.hidden_size
    routed = shape.num_layers - shape.first_dense_layers
    sums = 3 * routed * each if has_experts(shape) else 0
    return sums + passes * shape.num_layers * biases_of_experts(shape)


def outputs_again(shape: DecoderShape, levels: tuple[str, ...]) -> int:
    """FLOPs per token of the experts' last GEMM where only its input is recomputed, and of biases.

    A loop over experts saves its input after it has run, so recomputation runs it again. The
    grouped GEMM of GPUs does not.
    """
    each = 2 * shape.experts_per_token * shape.hidden_size * shape.ffn_size
    levels = levels[shape.first_dense_layers :]
    biases = (levels.count("full") + levels.count("ffn")) * biases_of_experts(shape)
    return biases + levels.count("activation") * each if has_experts(shape) else 0


def sums_again(shape: DecoderShape, levels: tuple[str, ...]) -> int:
    """FLOPs per token of sums over experts that are recomputed, as a shared expert follows them."""
    levels = levels[shape.first_dense_layers :]
    again = sum(level in ("full", "ffn") for level in levels)
    return again * 2 * shape.experts_per_token * shape.hidden_size if shape.shared_ffn_size else 0


def block_pairs(seq_len: int, window: int | None) -> list[int]:
    """Pairs of queries and keys that a layer multiplies, by block of queries."""
    if window is None or window >= seq_len:
        return [seq_len**2]
    size = min(seq_len, max(MIN_BLOCK_TOKENS, window))
    ends = [(start, min(start + size, seq_len)) for start in range(0, seq_len, size)]
    return [(stop - start) * (stop - max(0, start - window + 1)) for start, stop in ends]


def over_layers(shape: DecoderShape, local: float, whole: float) -> float:
    """The mean over layers of what those with a window have, and those without."""
    share = shape.num_local_layers / shape.num_layers
    return share * local + (1 - share) * whole


def masked_away(shape: DecoderShape, seq_len: int) -> float:
    """FLOPs per token of one pass over pairs in blocks that no query sees."""
    pairs = sum(block_pairs(seq_len, shape.sliding_window))
    beyond = over_layers(shape, pairs / seq_len, seq_len) - attended_keys(shape, seq_len)
    return 4 * shape.num_layers * shape.attention_size * beyond


@pytest.mark.parametrize("name", DECODERS)
def test_the_formula_is_what_the_model_does(name: str) -> None:
    spec = resolved(name)
    assert spec.model.kind == "decoder"
    tokens = SAMPLES * spec.training.seq_len
    unneeded = tokens * before_the_first_adapter(spec.model, spec.lora)
    extra = tokens * 3 * masked_away(spec.model, spec.training.seq_len)
    extra += tokens * weighted_sums(spec.model)

    assert counted(spec, "none") == pytest.approx(promised(spec, "none") + extra - unneeded, 1e-12)
    assert unneeded < 0.02 * promised(spec, "none")


@pytest.mark.parametrize("name", DECODERS)
def test_full_recomputation_is_counted_but_for_what_ends_a_block(name: str) -> None:
    spec = resolved(name)
    assert spec.model.kind == "decoder"
    tokens = SAMPLES * spec.training.seq_len
    unneeded = before_the_first_adapter(spec.model, spec.lora)
    unneeded += not_done_again(spec.model, spec.lora)
    unneeded -= 4 * masked_away(spec.model, spec.training.seq_len) + weighted_sums(spec.model, 3)

    wanted = promised(spec, "full") - tokens * unneeded
    assert counted(spec, "full") == pytest.approx(wanted, 1e-12)


@pytest.mark.parametrize("name", DECODERS)
def test_recomputing_attention_is_counted_but_for_its_second_product(name: str) -> None:
    spec = resolved(name)
    assert spec.model.kind == "decoder"
    shape, tokens = spec.model, SAMPLES * spec.training.seq_len
    seq_len = spec.training.seq_len
    # Recomputation ends before the last block's second product.
    last = block_pairs(seq_len, shape.sliding_window)[-1] / seq_len
    keys = over_layers(shape, last, seq_len)
    latent = shape.latent_attention
    values = shape.num_heads * (latent.v_head_dim if latent else shape.head_dim)
    second = 2 * shape.num_layers * values * keys
    second -= 4 * masked_away(shape, seq_len) + weighted_sums(shape)
    unneeded = tokens * (before_the_first_adapter(shape, spec.lora) + second)

    wanted = promised(spec, "selective") - unneeded
    assert counted(spec, "selective") == pytest.approx(wanted, 1e-12)


BUDGETS = (0.0, 0.2, 0.5, 0.7, 0.9, 1.0) if NIGHTLY else (0.5,)


def masked_again(shape: DecoderShape, seq_len: int, levels: tuple[str, ...]) -> float:
    """FLOPs per token of pairs that no query sees, in recomputed attention."""
    extra = 0.0
    for layer in [i for i, level in enumerate(levels) if level == "full"]:
        alone = shape.model_copy(update={"num_layers": 1, "sliding_window_pattern": None})
        pattern = shape.sliding_window_pattern
        if not (pattern and (layer + 1) % pattern == 0):
            extra += masked_away(alone, seq_len)
    return extra


@pytest.mark.parametrize("name", DECODERS)
def test_a_budget_is_counted_to_the_last_flop(name: str) -> None:
    spec = resolved(name)
    assert spec.model.kind == "decoder"
    seq_len = spec.training.seq_len
    unneeded = before_the_first_adapter(spec.model, spec.lora)
    done: list[int] = []
    for budget in BUDGETS:
        levels = block_levels(spec.model, Layout(recompute="budget", recompute_budget=budget))
        extra = 3 * masked_away(spec.model, seq_len) + masked_again(spec.model, seq_len, levels)
        extra += weighted_sums(spec.model) + outputs_again(spec.model, levels)
        extra += sums_again(spec.model, levels)
        done.append(counted(spec, "budget", budget))
        wanted = promised(spec, "budget", budget) + SAMPLES * seq_len * (extra - unneeded)
        assert done[-1] == pytest.approx(wanted, 1e-12), budget
    assert done == sorted(done, reverse=True)
    if NIGHTLY:
        assert (done[0], done[-1]) == (counted(spec, "full"), counted(spec, "none"))


def test_a_block_at_another_level_than_is_counted_is_found() -> None:
    spec = resolved("gemma3-4b-tiny")
    levels = block_levels(spec.model, Layout(recompute="budget", recompute_budget=0.5))
    assert levels[-1] in ("ffn", "activation")

    other = counted(spec, "budget", 0.5, recompute_levels=("full", *levels[1:]))

    assert other > counted(spec, "budget", 0.5) * (1 + 1e-6)
