"""Rates that short programs measure: memory copies, all-reduce, attention, small operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from paceline.core.errors import UserError
from paceline.core.shape import DecoderShape
from paceline.core.value import Value
from paceline.files.recipe import load_recipe
from paceline.machines.probe.program import probe_lines

TIME_LIMIT_S = 120.0
"""Of a program, besides four times the seconds that it measures."""
ALL_REDUCE_LIMIT_S = 180.0
BATCHES = (1, 8)
BACKWARD = 2.5
"""FLOPs of flash attention's backward pass over its forward pass: five matrix products, one of them
done again, against two (FlashAttention-2, section 4.1)."""
Attention = tuple[int, int, int, int, int]
"""Batch, tokens, heads, key/value heads, width of a head."""


class BandwidthRow(Value):
    """Copies of one size."""

    bytes: float
    """Copied at once."""
    bytes_per_s: float
    """Read and written together: the median over blocks of copies."""
    n: int
    spread: float
    """1.4826 x MAD / median of the blocks."""


class BandwidthProbe(Value):
    """All sizes on one device; the largest lies beyond the caches."""

    device_name: str
    torch: str
    threads: int
    rows: tuple[BandwidthRow, ...]


class CollectiveRow(Value):
    """One payload; every figure from the median repeat."""

    bytes: float
    bytes_per_s: float
    """Payload / time."""
    bus_bytes_per_s: float
    """Payload / time x 2 (n - 1) / n of n ranks: comparable between numbers of ranks (nccl-tests,
    doc/PERFORMANCE.md)."""
    latency_s: float
    """The time of one all-reduce."""
    n: int
    spread: float
    """1.4826 x MAD / median of the repeats."""


class CollectiveProbe(Value):
    """All payloads among one number of ranks."""

    device_name: str
    torch: str
    backend: str | None
    ranks: int
    rows: tuple[CollectiveRow, ...]


class AttentionRow(Value):
    """Causal attention of one shape, by the median repeat."""

    shape: Attention
    forward_s: float
    backward_s: float
    flops_per_s: float
    """Of both passes, counting the half that the mask leaves."""
    n: int
    spread: float
    """1.4826 x MAD / median of the repeats."""


class LatencyRow(Value):
    """Small operations one after the other, by the median row of them."""

    latency_s: float
    """From one to the next."""
    n: int
    spread: float


class AttentionProbe(Value):
    """All shapes on one device."""

    device_name: str
    torch: str
    rows: tuple[AttentionRow, ...]


class LatencyProbe(Value):
    """What starting an operation takes on one device."""

    device_name: str
    torch: str
    rows: tuple[LatencyRow, ...]


def probe_memory(python: str, device: str, threads: int | None, seconds: float) -> BandwidthProbe:
    """The copy rates of one device; raises SystemFaultError when the program fails."""
    question = {"device": device, "seconds": seconds}
    lines = probe_lines(
        python, "programs.bandwidth", question, threads=threads, limit_s=TIME_LIMIT_S + 4 * seconds
    )
    return _picked(BandwidthProbe, lines[0], rows=_rows(BandwidthRow, lines))


def probe_collective(
    python: str, device: str, ranks: int, threads: int | None, seconds: float
) -> CollectiveProbe:
    """The rates among `ranks` processes here; raises SystemFaultError when the program fails."""
    lines = probe_lines(
        python,
        "programs.allreduce",
        {"device": device, "seconds": seconds},
        ranks=ranks,
        threads=threads,
        limit_s=ALL_REDUCE_LIMIT_S + 4 * seconds,
    )
    return _picked(CollectiveProbe, lines[0], rows=_rows(CollectiveRow, lines))


def attention_shapes(recipe: str) -> list[Attention]:
    """The shapes of a recipe's attention for one sample and for eight; UserError for no decoder."""
    resolved = load_recipe(recipe)
    model = resolved.model
    if not isinstance(model, DecoderShape):
        raise UserError(recipe, "has no causal attention", remedy="name a decoder's recipe")
    sizes = (resolved.training.seq_len, model.num_heads, model.kv_heads, model.head_dim)
    return [(batch, *sizes) for batch in BATCHES]


def probe_attention(
    python: str,
    device: str,
    dtype: str,
    shapes: Sequence[Attention],
    threads: int | None,
    seconds: float,
) -> AttentionProbe:
    """Times of every shape; raises SystemFaultError when the program fails."""
    question = {
        "device": device,
        "dtype": dtype,
        "attention": shapes,
        "threads": threads,
        "seconds": seconds,
    }
    lines = probe_lines(
        python, "programs.kernels", question, threads=threads, limit_s=TIME_LIMIT_S + 4 * seconds
    )
    return _picked(AttentionProbe, lines[0], rows=tuple(map(_attention_row, lines)))


def probe_latency(python: str, device: str, seconds: float) -> LatencyProbe:
    """The time of one small operation; raises SystemFaultError when the program fails."""
    lines = probe_lines(
        python,
        "programs.latency",
        {"device": device, "seconds": seconds},
        limit_s=TIME_LIMIT_S + 4 * seconds,
    )
    line = lines[0]
    row = LatencyRow(latency_s=line["seconds"], n=line["n"], spread=line["spread"])
    return _picked(LatencyProbe, line, rows=(row,))


def _attention_row(line: dict[str, Any]) -> AttentionRow:
    batch, tokens, heads, _, width = line["shape"]
    # Two products of 2 x tokens^2 x width FLOPs a head, of which the causal mask leaves half.
    forward = 0.5 * 4 * batch * tokens**2 * heads * width
    both_s = line["forward_s"] + line["backward_s"]
    return AttentionRow(
        shape=tuple(line["shape"]),
        forward_s=line["forward_s"],
        backward_s=line["backward_s"],
        flops_per_s=(1 + BACKWARD) * forward / both_s,
        n=line["n"],
        spread=line["spread"],
    )


AnyValue = TypeVar("AnyValue", bound=Value)


def _picked(kind: type[AnyValue], line: Mapping[str, Any], **more: Any) -> AnyValue:
    """The fields of `kind` that a line of a program has, and `more`."""
    return kind(**{name: line[name] for name in kind.model_fields if name not in more}, **more)


def _rows(kind: type[AnyValue], lines: Sequence[Mapping[str, Any]]) -> tuple[AnyValue, ...]:
    return tuple(_picked(kind, line) for line in lines)
