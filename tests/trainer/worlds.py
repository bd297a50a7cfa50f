"""What several ranks compute together, compared with one process: context and loss parallelism.

Started as a program, once per rank: worlds.py FILE. Rank 0 writes the relative errors of every
case, the largest of all ranks; `outcome` starts it once for each number of ranks.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from paceline.trainer.model import attention, loss
from paceline.trainer.model import context_parallel as context
from paceline.trainer.model import context_parallel as ring
from paceline.trainer.model.attention import causal_attention
from paceline.trainer.model.loss import IGNORE_INDEX, chunked_cross_entropy
from paceline.trainer.parallel.mesh import MeshAxis
from tests.trainer.example import run_ranks

LIMIT_S = 240
EXCHANGES = ("all-gather", "all-to-all", "ring")
HEADS = {"MHA": (4, 4), "GQA": (4, 2), "MQA": (4, 1), "odd": (12, 3)}
DTYPES = ("float64", "float32", "bfloat16")
FAULTS = {
    "all-gather": ("order", "unsummed"),
    "all-to-all": ("order",),
    "ring": ("unmerged", "stray block"),
}
LOSS_FAULTS = ("wrong slice", "no exchange")
BATCH, TOKENS, WIDTH, VOCAB, SCALE = 2, 64, 8, 48, 0.25


def outcome(ranks: int) -> dict[str, Any]:
    """{case: {tensor: relative error}}, and "work": {exchange: [operations of every rank]}."""
    found, complaint = _outcome(ranks)
    assert found is not None, complaint
    return found


@functools.cache
def _outcome(ranks: int) -> tuple[dict[str, Any] | None, str]:
    """What a world wrote, and what it complained of; a world that fails is not started again."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcome.json"
        driver = Path(__file__)
        _, output = run_ranks(ranks, driver, str(file), folder=Path(folder), limit_s=LIMIT_S)
        return (json.loads(file.read_text()) if file.exists() else None), output


def relative(found: Tensor, wanted: Tensor) -> float:
    """The largest error among all ranks, as a part of the largest element; infinite for NaN."""
    scale = wanted.abs().max().double()
    error = ((found - wanted).double().abs().max() / scale).nan_to_num(torch.inf)
    dist.all_reduce(error, op=dist.ReduceOp.MAX)
    return error.item()


def context_errors(
    cp: MeshAxis, exchange: str, heads: tuple[int, int], dtype: torch.dtype
) -> dict[str, float]:
    """Output and gradients of this rank's tokens against those of the whole sequence."""
    generator = torch.Generator().manual_seed(5)
    counts = {"q": heads[0], "k": heads[1], "v": heads[1], "above": heads[0]}
    whole = {
        name: torch.randn(BATCH, TOKENS, n, WIDTH, dtype=torch.float64, generator=generator)
        for name, n in counts.items()
    }
    mine = context.local_positions(TOKENS, cp)
    wanted = attended(whole, causal_attention)
    local = {name: x[:, mine].to(dtype) for name, x in whole.items()}
    found = attended(local, lambda q, k, v: context.attend(q, k, v, cp, exchange))
    return {name: relative(x, wanted[name][:, mine]) for name, x in found.items()}


def attended(inputs: dict[str, Tensor], attend: Callable[..., Tensor]) -> dict[str, Tensor]:
    """The output, and the gradients of q, k and v."""
    *leaves, above = (x.clone().requires_grad_() for x in inputs.values())
    out = attend(*leaves)
    gradients = torch.autograd.grad(out, leaves, above)
    return dict(zip(("out", "q", "k", "v"), (out, *gradients), strict=True))


def loss_errors(
    tp: MeshAxis, dtype: torch.dtype, stretch: float = 1.0, scale: float | Tensor = SCALE
) -> dict[str, float]:
    """Loss and gradients of a head whose vocabulary is sliced against those of the whole head."""
    generator = torch.Generator().manual_seed(6)
    hidden = stretch * torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=generator)
    weight = torch.randn(VOCAB, WIDTH, dtype=torch.float64, generator=generator)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    targets = torch.arange(TOKENS) % VOCAB
    targets[[0, 5, TOKENS - 1]] = IGNORE_INDEX
    rows = VOCAB // tp.size
    mine = slice(tp.index * rows, (tp.index + 1) * rows)
    wanted = lost(hidden.double(), weight.double(), targets, SCALE)
    found = lost(hidden, weight[mine].contiguous(), targets, scale, tp)
    found["hidden"] = found["hidden"].double()
    dist.all_reduce(found["hidden"], group=tp.group)
    wanted["weight"] = wanted["weight"][mine]
    return {name: relative(x, wanted[name]) for name, x in found.items()}


def lost(hidden: Tensor, weight: Tensor, *rest: Any) -> dict[str, Tensor]:
    """The loss, and the gradients of hidden states and weight."""
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    value = chunked_cross_entropy(*leaves, *rest)
    gradients = torch.autograd.grad(value, leaves)
    return dict(zip(("loss", "hidden", "weight"), (value, *gradients), strict=True))


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, a module's name means something else."""
    kept = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, kept)


def fault(name: str) -> Any:
    """A mistake to put in: what the comparison must find."""

    def own_part(out: Tensor, x: Tensor, group: Any) -> Tensor:
        return out.copy_(x[: len(out)])

    return {
        "order": replaced(context, "_to_sequence_order", lambda parts: parts.flatten(0, 1)),
        "unsummed": replaced(context, "reduce_scatter_into", own_part),
        "unmerged": replaced(
            ring, "merge_partial_attention", lambda out, lse, part, part_lse: out.add_(part)
        ),
        "stray block": replaced(ring, "_visible_slices", lambda *_: (slice(None), slice(None))),
    }[name]


def work(cp: MeshAxis) -> dict[str, list[int]]:
    """Operations of every rank's attention: with every exchange, of consecutive tokens, of all."""
    tokens, (heads, kv_heads) = 512, HEADS["GQA"]
    q, k, v = (torch.randn(1, tokens, n, WIDTH) for n in (heads, kv_heads, kv_heads))
    mine = context.local_positions(tokens, cp)
    start, end = (tokens * i // cp.size for i in (cp.index, cp.index + 1))
    counts = {
        exchange: operations(context.attend, q[:, mine], k[:, mine], v[:, mine], cp, exchange)
        for exchange in EXCHANGES
    }
    counts["consecutive"] = operations(causal_attention, q[:, start:end], k[:, :end], v[:, :end])
    counts["all"] = operations(causal_attention, q, k, v)
    ranks: list[Any] = [None] * cp.size
    dist.all_gather_object(ranks, counts, cp.group)
    return {name: [counts[name] for counts in ranks] for name in counts}


def operations(attend: Callable[..., Tensor], *inputs: Any) -> int:
    """Floating-point operations of the products in one call."""

    def of_kernel(
        q: Tensor, k: Tensor, v: Tensor, dropout: float = 0, causal: bool = False, **_: Any
    ) -> int:
        return 4 * q.numel() * k.shape[2] // (2 if causal else 1)

    of_kernel._get_raw = True  # type: ignore[attr-defined]
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with FlopCounterMode(display=False, custom_mapping={kernel: of_kernel}) as counter:
        attend(*inputs)
    return counter.get_total_flops()


def context_cases(cp: MeshAxis) -> dict[str, Any]:
    """Every exchange with every kind of heads and dtype, and its faults."""
    found: dict[str, Any] = {}
    for exchange in EXCHANGES:
        for kind, heads in HEADS.items():
            for name in DTYPES:
                errors = context_errors(cp, exchange, heads, getattr(torch, name))
                found[f"{exchange} {kind} {name}"] = errors
        for name in FAULTS[exchange]:
            with fault(name):
                errors = context_errors(cp, exchange, HEADS["GQA"], torch.float64)
                found[f"{exchange} fault {name}"] = errors
        with replaced(attention, "MAX_BLOCKED_TOKENS", 0):
            errors = context_errors(cp, exchange, HEADS["GQA"], torch.float64)
            found[f"{exchange} fused"] = errors
    return found


def loss_cases(tp: MeshAxis) -> dict[str, Any]:
    """The sliced loss in chunks of a few tokens, and its faults."""
    found: dict[str, Any] = {}
    loss.CHUNK_BYTES["cpu"] = 7 * (VOCAB // tp.size) * 8
    for name in DTYPES:
        found[f"loss {name}"] = loss_errors(tp, getattr(torch, name))
    found["loss far"] = loss_errors(tp, torch.float32, stretch=100)
    found["loss tensor"] = loss_errors(tp, torch.float64, scale=torch.tensor(SCALE))
    with replaced(loss, "all_gather_into", lambda out, x, group: out.copy_(x.repeat(tp.size, 1))):
        found["loss fault no exchange"] = loss_errors(tp, torch.float64)
    sliced, wrong = (
        loss._vocab_parallel_loss,
        MeshAxis(tp.size, tp.size - 1 - tp.index, tp.group, tp.ranks),
    )
    with replaced(
        loss, "_vocab_parallel_loss", lambda logits, targets, _: sliced(logits, targets, wrong)
    ):
        found["loss fault wrong slice"] = loss_errors(tp, torch.float64)
    return found


def pairs(rank: int) -> MeshAxis:
    """Ranks (0, 2) and (1, 3) as two axes."""
    groups: dict[tuple[int, ...], Any] = {
        ranks: dist.new_group(list(ranks)) for ranks in ((0, 2), (1, 3))
    }
    mine = (rank % 2, rank % 2 + 2)
    return MeshAxis(2, rank // 2, groups[mine], mine)


def main(file: Path) -> None:
    """Compute everything in the world that was started."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    axis = MeshAxis(size, rank, dist.group.WORLD, tuple(range(size)))
    found = {**context_cases(axis), **loss_cases(axis), "work": work(axis)}
    if size == 4:
        apart = pairs(rank)
        for exchange in EXCHANGES:
            errors = context_errors(apart, exchange, HEADS["GQA"], torch.float64)
            found[f"{exchange} pairs"] = errors
    if rank == 0:
        file.write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
