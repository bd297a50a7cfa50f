"""The physical coefficients of the time model, with their meaning and prior."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from paceline.estimate.model.case import Floats
from paceline.files import catalog


@dataclass(frozen=True)
class Prior:
    """Log-normal prior of a coefficient: its median, and `sd` of its logarithm."""

    name: str
    value: float
    sd: float
    what: str


PRIORS: tuple[Prior, ...] = (
    # The values below are prior medians and standard deviations of the logarithm. The fitted
    # medians are in fit/coefficients.json. A comment states the formula or the source where one is
    # documented. `gemm_*`: share of the dense peak that large 16-bit GEMMs reach, by generation
    # (generations.yaml). All generations also share a deviation (SHARED_GEMM_SD in
    # fit/posterior.py).
    *(
        Prior(f"gemm_{each.name}", each.gemm_efficiency, each.gemm_sd, f"GEMMs of {each.what}")
        for each in catalog.generations().values()
    ),
    # 8-bit GEMMs reach 0.92 of the 16-bit share of the peak (docs/dev/estimator-log.md, Attention).
    Prior("gemm_8bit", 0.92, 0.10, "8-bit GEMM efficiency divided by the 16-bit one"),
    # Between 0.81 on a B300 (0.75 with block scales: FOUR_BIT_GAIN in block.py) and 1.06, as
    # cuBLAS 12.9 is up to 2.3 times as fast on Blackwell as in 8 bit (NVIDIA's blog).
    Prior("gemm_4bit", 0.90, 0.20, "4-bit GEMM efficiency divided by the 16-bit one"),
    Prior("gemm_blocks", 0.93, 0.10, "factor on narrow GEMM efficiency with block scales"),
    Prior("gemm_torch", 1.00, 0.06, "GEMM rate of PyTorch modules relative to fused ones"),
    # Applies if n or k is not a multiple of the generation's tile (`gemm_alignment` in
    # generations.yaml).
    Prior("gemm_odd", 0.65, 0.20, "relative rate of GEMMs with unaligned dimensions"),
    # Scales with 1 / sqrt(peak): `_start` in block.py.
    Prior("gemm_start_s", 15e-6, 0.70, "fixed time per GEMM on an A100"),
    # Rate of n tokens per expert: rate x gemm_grouped x n / (n + grouped_tokens) (`grouped_rate` in
    # experts.py).
    Prior("gemm_grouped", 0.62, 0.30, "rate of grouped GEMMs relative to one large GEMM"),
    Prior("grouped_tokens", 100.0, 0.70, "tokens per expert at which GEMMs run at half rate"),
    # Exponent of the gain of 8 and 4 bit over 16 bit in grouped GEMMs without fused casts; 1 is the
    # whole gain (`grouped_rate` in experts.py).
    Prior("grouped_narrow", 0.30, 0.70, "part of a narrow type's gain in unfused grouped GEMMs"),
    # Runs with forced balance do not fit better with imbalance 1 (docs/dev/estimator-log.md,
    # Experts).
    Prior("imbalance", 1.05, 0.10, "load imbalance: slowest expert rank over the mean"),
    # Slowdown exp(experts_pace x years before 2026); without it experts are missed by 17.7% instead
    # of 17.0% (docs/dev/estimator-log.md, Experts).
    Prior("experts_pace", 0.20, 0.60, "yearly speedup of MoE software (log)"),
    # Rate exp(-kernel_immaturity 2^(-age / 1 year)): kernels of a new GPU lack part of their rate,
    # and that part halves every year (docs/dev/estimator-log.md, Age of software).
    Prior("kernel_immaturity", 0.20, 0.50, "log slowdown of kernels at a device's release"),
    # Rate ~ (power limit / data-sheet power)^power_exponent: `gemm_rate` in block.py.
    Prior("power_exponent", 0.70, 0.30, "exponent of the rate in the power limit"),
    # One pass reads 2 bytes and writes 1 per input element of a narrow GEMM (`_elementwise` in
    # block.py).
    Prior("cast_traffic", 1.0, 0.50, "memory traffic of casts to narrow types, over one pass"),
    # Defined at a GEMM efficiency of 0.72; attention scales with the GEMM rate. Its backward pass
    # takes 2.5 forward passes (Dao, arXiv:2307.08691).
    Prior("flash", 0.52, 0.25, "flash attention's forward rate over the 16-bit peak"),
    Prior("flash_torch", 0.65, 0.25, "PyTorch's flash attention since Hopper, relative rate"),
    Prior("flash_tpu", 1.00, 0.25, "TPU splash attention, relative rate"),
    # The first FlashAttention runs at 0.6 of the second (docs/dev/estimator-log.md, Attention).
    Prior("flash_early", 0.60, 0.25, "FlashAttention-1 relative to version 2"),
    Prior("scores", 0.30, 0.30, "GEMM efficiency of attention that stores its scores"),
    # Stored scores pass memory 3.3 times, not 6 (docs/dev/estimator-log.md, Attention). A pass
    # reads and writes 2 bytes per score.
    Prior("scores_passes", 3.3, 0.40, "passes of the scores through memory, forward"),
    Prior("memory", 0.75, 0.15, "achieved share of the data-sheet memory bandwidth"),
    Prior("elementwise", 1.0, 0.40, "traffic of norms, activations and residuals, over its count"),
    Prior("permuted", 1.5, 0.40, "traffic of sorting tokens by expert and back, over its count"),
    # Since container 26.06 fused expert kernels take most of the memory traffic (release notes of
    # Megatron-Bridge 0.5; docs/dev/estimator-log.md, Fused kernels).
    Prior("experts_fused", 0.3, 0.50, "share of expert memory traffic that fused kernels leave"),
    Prior("elementwise_eager", 1.5, 0.30, "the same for eager PyTorch"),
    # 20 bytes per logit, forward and backward: LOGIT_BYTES in step.py.
    Prior("logits", 1.0, 0.50, "memory traffic of logits and loss, over 20 bytes per logit"),
    Prior("host_softmax_s", 1.5e-3, 0.35, "CPU time of one block, forward and backward, Megatron"),
    Prior("host_fused_s", 2.0e-3, 0.45, "the same with Transformer Engine"),
    Prior("host_torch_s", 1.5e-3, 0.45, "the same with PyTorch's modules"),
    Prior("host_tp", 0.30, 0.30, "share of CPU time that tensor parallelism adds"),
    Prior("host_tp_fused", 1.0, 0.30, "the same with Transformer Engine"),
    # A CPU that does not know the token counts cannot launch the next GEMMs; a capacity removes
    # that wait (docs/dev/estimator-log.md, Host wait).
    Prior("host_experts_s", 5e-3, 0.50, "CPU time that experts add to a block"),
    Prior("host_capacity", 0.3, 0.50, "relative wait if tokens beyond a capacity are dropped"),
    # Hosts of V100 and A100 have factors of their own: held-out frameworks 10.5 to 10.1%, devices
    # 9.2 to 8.3% (docs/dev/estimator-log.md, Host).
    Prior("host_volta", 1.5, 0.50, "CPU time in nodes with V100s, relative to later ones"),
    Prior("host_ampere", 1.25, 0.30, "the same in nodes with A100s"),
    # Only on CPU devices; on GPUs this overhead is part of the block's launch time (step.py).
    Prior("host_sharded_s", 5e-4, 0.80, "FSDP hooks and copies per collective on a CPU"),
    Prior("host_microbatch_s", 2e-3, 0.80, "CPU time per micro-batch outside of blocks"),
    Prior("step_softmax_s", 10e-3, 0.80, "fixed time per step, Megatron of 2020-22"),
    Prior("step_fused_s", 30e-3, 0.60, "the same with Transformer Engine"),
    Prior("step_torch_s", 20e-3, 0.60, "the same with PyTorch's modules"),
    Prior("step_compiled_s", 8e-3, 0.60, "the same with compiled blocks and a fused optimizer"),
    # DeepSpeed's FP16_Optimizer (runtime/fp16/fused_optimizer.py): about eight operations of 10 us
    # and one wait for the device per tensor.
    Prior("host_tensor_s", 9e-5, 0.40, "CPU time per tensor in an unfused optimizer"),
    # CUDA graphs. A block has about 60 kernels, forward and backward, and as many again that round
    # and transpose operands of narrow GEMMs. Each has 2.5 us in which it fills and drains the
    # device and the next one starts. A captured step keeps the fixed time of a step with compiled
    # blocks and a fused optimizer. Starts are a level's share of small all-reduces without CPU
    # delay: 14 us on 8 H100 with multicast, 68 us on 32 devices of 4 nodes (nccl-tests in NVIDIA's
    # dgxc-benchmarking and in ml-engineering).
    Prior("graph_launches_s", 1.5e-4, 0.60, "time between a block's 16-bit kernels in a graph"),
    Prior("step_graph_s", 8e-3, 0.70, "time of a captured step outside of its micro-batches"),
    Prior("intra_start_graph_s", 4.6e-6, 0.60, "start of a captured collective, NVLink domain"),
    Prior("inter_start_graph_s", 13.6e-6, 0.60, "start of a captured collective between nodes"),
    Prior("intra", 0.75, 0.20, "achieved share of the NVLink domain's bandwidth"),
    Prior("intra_start_s", 30e-6, 0.60, "start latency of a collective in the NVLink domain"),
    Prior("inter", 0.75, 0.25, "achieved share of the network bandwidth"),
    Prior("inter_start_s", 60e-6, 0.60, "start latency of a collective between nodes"),
    # TP communication overlaps with GEMMs only with sequence parallelism in fused implementations:
    # Flux on 512 GB300 0.133 to 0.159 s, published 0.171 (docs/dev/estimator-log.md, TP overlap).
    Prior("tp_exposed", 0.70, 0.35, "exposed share of tensor-parallel communication"),
    Prior("tp_exposed_fused", 0.40, 0.40, "the same with overlapped communication"),
    Prior("cp_exposed", 0.30, 0.60, "exposed share of context-parallel communication"),
    Prior("ep_exposed", 0.80, 0.40, "exposed share of expert-parallel communication"),
    Prior("ep_overlapped", 0.40, 0.40, "the same, overlapped with another micro-batch"),
    # An all-to-all needs a point-to-point exchange for every pair of ranks, and ports do not help
    # each other. CPU threads deliver 9 to 43 GB/s per device (UCCL-EP's README, EFA of 50 GB/s): a
    # third of 100 GB/s. They take 0.23 to 0.32 ms for 128 tokens among 16 ranks, 0.41 to 0.62 among
    # 32 (same source, B200).
    Prior("all_to_all", 0.60, 0.40, "NCCL's all-to-all between nodes over the rate of a ring"),
    Prior("ep_proxied", 0.35, 0.50, "CPU-driven dispatchers over the rate of a ring"),
    Prior("ep_proxied_start_s", 2.7e-4, 0.50, "start of a CPU-driven dispatch among 16 ranks"),
    Prior("pp_exposed", 0.70, 0.40, "exposed share of pipeline transfers"),
    Prior("pp_exposed_fused", 0.20, 0.60, "the same with newer schedules"),
    # Lower bound of the exposed share, even if the last backward pass is long enough (`_dp` in
    # step.py).
    Prior("dp_exposed", 0.35, 0.50, "exposed share of the gradient exchange"),
    Prior("dp_exposed_fused", 0.25, 0.50, "the same with the distributed optimizer's overlap"),
    Prior("dp_exposed_softmax", 0.90, 0.30, "the same in Megatron of 2020 to 2022"),
    # Step adds max(work, exchange) + e min(work, exchange) - work (`exposed_seconds` in step.py).
    Prior("zero3_exposed", 0.35, 0.50, "exposed share of the shorter of ZeRO-3 traffic and work"),
    Prior("zero3_exposed_early", 0.90, 0.30, "the same in software of 2020 to 2022"),
    # 26 bytes per parameter: OPTIMIZER_BYTES in step.py.
    Prior("optimizer", 1.3, 0.40, "memory traffic of the optimizer over 26 bytes per parameter"),
    # Factor 1 + jitter log2(devices / 8): `assemble_step` in step.py.
    Prior("jitter", 6e-3, 0.60, "relative growth of a step per doubling of the nodes"),
)  # fmt: skip
NAMES = tuple(prior.name for prior in PRIORS)
CENTRE: Floats = np.log([prior.value for prior in PRIORS])
PRIOR_SD_FACTOR = 0.85
"""Factor on the deviations of all priors. The 16 medians that published steps determine best lie
0.38 of these deviations from their priors in the root mean square, and 0.67 with their own
uncertainty, so the deviations are too wide. With the factor, the intervals of unseen devices
contain 84.5% of rows instead of 85.3% (docs/dev/estimator-log.md, Width of priors)."""
WIDTH: Floats = PRIOR_SD_FACTOR * np.array([prior.sd for prior in PRIORS])


def coefficient_values(logs: Floats) -> Mapping[str, float]:
    """Return the coefficients by name from a vector of their logarithms."""
    return dict(zip(NAMES, np.exp(logs).tolist(), strict=True))
