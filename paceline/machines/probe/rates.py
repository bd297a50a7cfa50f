"""Rates measured by short programs: memory copies, all-reduce, attention, small operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from paceline.core.errors import UserError
from paceline.core.shape import DecoderShape
from paceline.core.value import Value
from paceline.files.recipe import load_recipe
from paceline.machines.probe.program import probe_lines

TIME_LIMIT_S = 120.0
"""Time limit of a program in seconds, plus four times the seconds that it measures."""
ALL_REDUCE_LIMIT_S = 180.0
BATCHES = (1, 8)
BACKWARD = 2.5
"""Ratio of the FLOPs of flash attention's backward pass to its forward pass: five GEMMs, one of
them recomputed, compared with two (FlashAttention-2, section 4.1)."""
Attention = tuple[int, int, int, int, int]
"""Shape of attention: batch, tokens, heads, key/value heads, head width."""


class BandwidthRow(Value):
    """Bandwidth of copies of one size."""

    bytes: float
    """Size of one copy in bytes."""
    bytes_per_s: float
    """Bytes read and written per second: median over blocks of copies."""
    n: int
    spread: float
    """Relative spread of the blocks: 1.4826 x MAD / median."""


class BandwidthProbe(Value):
    """Bandwidth for all sizes on one device; the largest size exceeds the caches."""

    device_name: str
    torch: str
    threads: int
    rows: tuple[BandwidthRow, ...]


class CollectiveRow(Value):
    """All-reduce of one payload; every figure is from the median repeat."""

    bytes: float
    bytes_per_s: float
    """Payload / time, in bytes per second."""
    bus_bytes_per_s: float
    """Bus bandwidth: payload / time x 2 (n - 1) / n for n ranks, which is comparable between
    numbers of ranks (nccl-tests, doc/PERFORMANCE.md)."""
    latency_s: float
    """Time of one all-reduce in seconds."""
    n: int
    spread: float
    """Relative spread of the repeats: 1.4826 x MAD / median."""


class CollectiveProbe(Value):
    """All-reduce of all payloads with one number of ranks."""

    device_name: str
    torch: str
    backend: str | None
    ranks: int
    rows: tuple[CollectiveRow, ...]


class AttentionRow(Value):
    """Causal attention of one shape; every figure is from the median repeat."""

    shape: Attention
    forward_s: float
    backward_s: float
    flops_per_s: float
    """FLOP/s of forward and backward pass, counting only the half that the causal mask leaves."""
    n: int
    spread: float
    """Relative spread of the repeats: 1.4826 x MAD / median."""


class LatencyRow(Value):
    """Latency of small operations run one after the other, from the median row of operations."""

    latency_s: float
    """Time from one operation to the next, in seconds."""
    n: int
    spread: float


class AttentionProbe(Value):
    """Attention of all shapes on one device."""

    device_name: str
    torch: str
    rows: tuple[AttentionRow, ...]


class LatencyProbe(Value):
    """Latency of starting an operation on one device."""

    device_name: str
    torch: str
    rows: tuple[LatencyRow, ...]


def probe_memory(python: str, device: str, threads: int | None, seconds: float) -> BandwidthProbe:
    """Measure the copy bandwidth of one device; raises SystemFaultError if the program fails."""
    question = {"device": device, "seconds": seconds}
    lines = probe_lines(
        python, "programs.bandwidth", question, threads=threads, limit_s=TIME_LIMIT_S + 4 * seconds
    )
    return _from_line(BandwidthProbe, lines[0], rows=_rows(BandwidthRow, lines))


def probe_collective(
    python: str, device: str, ranks: int, threads: int | None, seconds: float
) -> CollectiveProbe:
    """Measure all-reduce among `ranks` processes on this machine.

    Raises SystemFaultError if the program fails.
    """
    lines = probe_lines(
        python,
        "programs.allreduce",
        {"device": device, "seconds": seconds},
        ranks=ranks,
        threads=threads,
        limit_s=ALL_REDUCE_LIMIT_S + 4 * seconds,
    )
    return _from_line(CollectiveProbe, lines[0], rows=_rows(CollectiveRow, lines))


def attention_shapes(recipe: str) -> list[Attention]:
    """Return the shapes of a recipe's attention for one sample and for eight.

    Raises UserError if the recipe's model is not a decoder.
    """
    workload = load_recipe(recipe)
    model = workload.model
    if not isinstance(model, DecoderShape):
        raise UserError(
            recipe, "has no causal attention", remedy="choose a recipe of a decoder model"
        )
    sizes = (workload.training.seq_len, model.num_heads, model.kv_heads, model.head_dim)
    return [(batch, *sizes) for batch in BATCHES]


def probe_attention(
    python: str,
    device: str,
    dtype: str,
    shapes: Sequence[Attention],
    threads: int | None,
    seconds: float,
) -> AttentionProbe:
    """Measure attention of every shape; raises SystemFaultError if the program fails."""
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
    return _from_line(AttentionProbe, lines[0], rows=tuple(map(_attention_row, lines)))


def probe_latency(python: str, device: str, seconds: float) -> LatencyProbe:
    """Measure the time of one small operation; raises SystemFaultError if the program fails."""
    lines = probe_lines(
        python,
        "programs.latency",
        {"device": device, "seconds": seconds},
        limit_s=TIME_LIMIT_S + 4 * seconds,
    )
    line = lines[0]
    row = LatencyRow(latency_s=line["seconds"], n=line["n"], spread=line["spread"])
    return _from_line(LatencyProbe, line, rows=(row,))


def _attention_row(line: dict[str, Any]) -> AttentionRow:
    batch, tokens, heads, _, width = line["shape"]
    # Two GEMMs of 2 x tokens^2 x width FLOPs per head, of which the causal mask leaves half.
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


def _from_line(kind: type[AnyValue], line: Mapping[str, Any], **more: Any) -> AnyValue:
    """Return a `kind` filled from the fields of a program's line, and from `more`."""
    return kind(**{name: line[name] for name in kind.model_fields if name not in more}, **more)


def _rows(kind: type[AnyValue], lines: Sequence[Mapping[str, Any]]) -> tuple[AnyValue, ...]:
    return tuple(_from_line(kind, line) for line in lines)
