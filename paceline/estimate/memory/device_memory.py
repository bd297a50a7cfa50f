"""Memory of a training run on its most loaded device, by part, and whether it fits.

There are three totals. `allocated` is the peak of live tensors. `reserved` is what the allocator
took from the device for them. `device_used` is all memory in use on the device, including the
driver's context and the buffers of collectives. Published figures state one of the three.

core/memory.py computes a lower bound, which `run` uses to refuse a run. This module estimates the
expected value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import erf
from typing import Literal

import numpy as np

from paceline.estimate.memory.activations import activations, all_forward_first
from paceline.estimate.memory.framework import FRAMEWORKS, MIB, Constants, Framework, constants
from paceline.estimate.memory.states import beyond_logits, stage, states
from paceline.estimate.model.case import Bools, Cases, Floats
from paceline.estimate.model.weights import num_microbatches, replicas

CONTEXT_BYTES: Mapping[str, float] = {"volta": 1113 * MIB, "ampere": 1573 * MIB, "cpu": 0.0}
"""Context size per GPU generation: memory that nvidia-smi shows with one tensor allocated. Source:
the 1.3B and 104B notes of BigScience (2021), CUDA 11."""
DEFAULT_CONTEXT_BYTES = 800 * MIB
"""Context size of other GPUs, for which there is no measurement. It is smaller because newer
drivers load kernels on demand."""
LIKELY, UNLIKELY = 0.9, 0.1
"""Probabilities of running out of memory between which a layout is borderline: the device's memory
is in the 80% interval of the need."""
Verdict = Literal["fits", "borderline", "out of memory"]


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the most loaded rank of each case, by part."""

    weights: Floats
    gradients: Floats
    optimizer: Floats
    gathered: Floats  # language: allow
    """Sharded weights that ZeRO-3, or FSDP's stage 2, gathers for computation."""
    activations: Floats
    logits: Floats
    """The head's inputs, logits and loss, on the last pipeline stage."""
    buffers: Floats
    """Gradient buckets, copies of gradients and workspaces."""
    not_at_once: Floats
    """Part of the fields above that is already freed when the others peak; it is subtracted."""
    fragmentation: Floats
    """Memory that the allocator holds beyond the peak of live tensors."""
    reclaimable: Floats
    """Part of the fragmentation that the allocator gives back before the device runs out of memory.
    It is the smaller of the step's buffers and the passes' tensors, because only one of them is
    needed at a time."""
    context: Floats
    """Driver context and buffers of collectives."""
    log_sd: Floats
    """Standard deviation of the total's logarithm."""

    @property
    def allocated(self) -> Floats:
        """Peak of live tensors."""
        total = (
            self.weights
            + self.gradients
            + self.optimizer
            + self.gathered
            + self.activations
            + self.logits
            + self.buffers
        )
        return total - self.not_at_once

    @property
    def reserved(self) -> Floats:
        """Bytes that the allocator has reserved."""
        return self.allocated + self.fragmentation

    @property
    def device_used(self) -> Floats:
        """Bytes in use on the device."""
        return self.reserved + self.context

    @property
    def needed_bytes(self) -> Floats:
        """Bytes that the device must have at least, whatever the allocator caches."""
        return self.device_used - self.reclaimable

    def at(self, row: int) -> dict[str, float]:
        """Return the parts of one case in bytes; they add up to `device_used`."""
        parts = {f.name: float(getattr(self, f.name)[row]) for f in fields(self)}
        del parts["log_sd"], parts["reclaimable"]
        return {**parts, "not_at_once": -parts["not_at_once"]}


def memory(
    x: Cases,
    frameworks: Mapping[str, Framework] | Framework = FRAMEWORKS,
    context_bytes: float | Floats | None = None,
) -> MemoryEstimate:
    """Return the bytes by part of the most loaded pipeline rank.

    That rank is the first (most micro-batches in flight, embedding), the last (head and logits), or
    the second where both ends have one layer less. `frameworks` is one for all cases, or a mapping
    by implementation. `context_bytes` None selects the usual size for the generation. Raises
    ValueError for an implementation without constants.
    """
    return _largest([rank_memory(x, rank, frameworks, context_bytes) for rank in (0, 1, -1)])


def rank_memory(
    x: Cases,
    rank: int,
    frameworks: Mapping[str, Framework] | Framework = FRAMEWORKS,
    context_bytes: float | Floats | None = None,
) -> MemoryEstimate:
    """Return the bytes by part of pipeline rank `rank`, -1 for the last one."""
    f, s = constants(x, frameworks), stage(x, rank)
    persistent, passes = states(x, f, s), activations(x, f, s)
    on_gpu = ~x.is_category("generation", "cpu")
    activation_bytes = passes.saved_bytes + passes.working + persistent.copies
    # The backward pass of a block starts after the logits are freed, so only the larger of the two
    # counts. Gradients are allocated while activations are freed.
    saved_for_backward = passes.saved_bytes + persistent.copies
    working_peak = np.maximum(passes.working, passes.logits)
    # gpipe finishes all forward passes before the first backward pass allocates gradients.
    first_backward_end = persistent.gradients + saved_for_backward + passes.working + passes.waiting
    frees_before_backward = (
        (f.keeps_gradients == 0) & all_forward_first(x) & (num_microbatches(x) > 1)
    )
    # Peak of gradients and activations. Freed gradients: the forward peak has no gradients, so take
    # the larger of forward and backward. gpipe: compare the forward peak with the end of the first
    # backward pass. Otherwise gradients stay allocated throughout and add to the forward peak.
    peak = np.select(
        [_frees_gradients(x, f), frees_before_backward],
        [
            np.maximum(saved_for_backward + working_peak, persistent.gradients + passes.working),
            np.maximum(saved_for_backward + working_peak, first_backward_end),
        ],
        persistent.gradients + saved_for_backward + working_peak,
    )
    live = (
        persistent.weights
        + persistent.optimizer
        + persistent.gathered_weights
        + persistent.buffers
        + peak
    )
    # The step's buffers and the passes' tensors are needed at different times. The allocator caches
    # both, but can give back whichever is not in use: the smaller of the two at the peak.
    of_step = beyond_logits(persistent.of_step, persistent.trained_parameters, passes.num_logits)
    of_passes = (1 + f.fragmentation) * (saved_for_backward + working_peak)
    return MemoryEstimate(
        weights=persistent.weights,
        gradients=persistent.gradients,
        optimizer=persistent.optimizer,
        gathered=persistent.gathered_weights,
        activations=activation_bytes,
        logits=passes.logits,
        buffers=persistent.buffers,
        not_at_once=np.maximum(0, persistent.gradients + activation_bytes + passes.logits - peak),
        fragmentation=on_gpu * (f.fragmentation * live + of_step),
        reclaimable=np.where(on_gpu, np.minimum(of_step, of_passes), 0.0),
        context=_context(x, context_bytes) + on_gpu * f.communicator * _groups(x),
        log_sd=f.log_sd,
    )


def p_oom(estimate: MemoryEstimate, limit_bytes: float | Floats) -> Floats:
    """Return the probability, 0-1, that a device of `limit_bytes` runs out of memory.

    The need is log-normal: Phi(z) with z = ln(needed / limit) / sd, Phi the standard normal
    distribution.
    """
    deviations = np.log(estimate.needed_bytes / limit_bytes) / estimate.log_sd
    return np.array([0.5 * (1 + erf(z / 2**0.5)) for z in deviations])


def verdict(probability: float) -> Verdict:
    """Return the verdict for a probability of running out of memory."""
    if probability > LIKELY:
        return "out of memory"
    return "fits" if probability < UNLIKELY else "borderline"


def _largest(ranks: list[MemoryEstimate]) -> MemoryEstimate:
    used, needed_bytes = (
        np.stack([getattr(r, name) for r in ranks]) for name in ("device_used", "needed_bytes")
    )
    most, rows = used.argmax(axis=0), list(range(used.shape[1]))
    parts = {
        f.name: np.stack([getattr(rank, f.name) for rank in ranks])[most, rows]
        for f in fields(MemoryEstimate)
    }
    # The rank with the most memory in use can give part of it back, so another rank may need more.
    return MemoryEstimate(**{**parts, "reclaimable": used.max(axis=0) - needed_bytes.max(axis=0)})


def _frees_gradients(x: Cases, f: Constants) -> Bools:
    """Return a mask of the cases whose forward pass holds no gradients (one micro-batch per step).

    DDP's buckets hold the gradients throughout. FSDP and a single rank free them.
    """
    ranks = replicas(x) * x.cp
    single = x.global_batch <= replicas(x) * x.micro_batch
    return (f.keeps_gradients == 0) & single & ((ranks <= 1) | (x.zero_stage >= 2))


def _groups(x: Cases) -> Floats:
    """Return the number of process groups with more than one rank: TP, PP, CP, DP."""
    sizes = (x.tp, x.pp, x.cp, replicas(x) * x.cp)
    return np.sum([size > 1 for size in sizes], axis=0).astype(float)


def _context(x: Cases, context_bytes: float | Floats | None) -> Floats:
    if context_bytes is not None:
        return np.broadcast_to(np.asarray(context_bytes, dtype=float), x.size)
    generations = [x.is_category("generation", name) for name in CONTEXT_BYTES]
    return np.select(generations, list(CONTEXT_BYTES.values()), DEFAULT_CONTEXT_BYTES)
