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
    # Share of the dense peak that large 16-bit GEMMs reach, by generation (generations.yaml).
    *(
        Prior(f"gemm_{each.name}", each.gemm_efficiency, each.gemm_sd, f"GEMMs of {each.what}")
        for each in catalog.generations().values()
    ),
    Prior("gemm_8bit", 0.92, 0.10, "8-bit GEMM efficiency divided by the 16-bit one"),
    Prior("gemm_4bit", 0.55, 0.30, "4-bit GEMM efficiency divided by the 16-bit one"),
    Prior("gemm_blocks", 0.93, 0.10, "factor on narrow GEMM efficiency with block scales"),
    Prior("gemm_torch", 1.00, 0.06, "GEMM rate of PyTorch modules relative to fused ones"),
    Prior("gemm_odd", 0.65, 0.20, "relative rate of GEMMs with unaligned dimensions"),
    Prior("gemm_start_s", 15e-6, 0.70, "fixed time per GEMM on an A100"),
    Prior("gemm_grouped", 0.62, 0.30, "rate of grouped GEMMs relative to one large GEMM"),
    Prior("grouped_tokens", 100.0, 0.70, "tokens per expert at which GEMMs run at half rate"),
    Prior("imbalance", 1.05, 0.10, "load imbalance: slowest expert rank over the mean"),
    Prior("experts_pace", 0.20, 0.60, "yearly speedup of MoE software (log)"),
    Prior("kernel_immaturity", 0.20, 0.50, "log slowdown of kernels at a device's release"),
    Prior("power_exponent", 0.70, 0.30, "exponent of the rate in the power limit"),
    Prior("cast_traffic", 1.0, 0.50, "memory traffic of casts to narrow types, over one pass"),
    Prior("flash", 0.52, 0.25, "flash attention's forward rate over the 16-bit peak"),
    Prior("flash_torch", 0.65, 0.25, "PyTorch's flash attention since Hopper, relative rate"),
    Prior("flash_tpu", 1.00, 0.25, "TPU splash attention, relative rate"),
    Prior("flash_early", 0.60, 0.25, "FlashAttention-1 relative to version 2"),
    Prior("scores", 0.30, 0.30, "GEMM efficiency of attention that stores its scores"),
    Prior("scores_passes", 3.3, 0.40, "passes of the scores through memory, forward"),
    Prior("memory", 0.75, 0.15, "achieved share of the data-sheet memory bandwidth"),
    Prior("elementwise", 1.0, 0.40, "traffic of norms, activations and residuals, over its count"),
    Prior("permuted", 1.5, 0.40, "traffic of sorting tokens by expert and back, over its count"),
    Prior("experts_fused", 0.3, 0.50, "experts' own traffic beside kernels that fuse it, a share"),
    Prior("elementwise_eager", 1.5, 0.30, "the same where PyTorch runs every operation by itself"),
    Prior("logits", 1.0, 0.50, "memory traffic of logits and loss, over 20 bytes a logit"),
    Prior("host_softmax_s", 1.5e-3, 0.35, "host time of one block, forward and backward, Megatron"),
    Prior("host_fused_s", 2.0e-3, 0.45, "the same with Transformer Engine"),
    Prior("host_torch_s", 1.5e-3, 0.45, "the same with PyTorch's modules"),
    Prior("host_tp", 0.30, 0.30, "host time that tensor parallelism adds, a share"),
    Prior("host_tp_fused", 1.0, 0.30, "the same with Transformer Engine"),
    Prior("host_experts_s", 5e-3, 0.50, "host time that experts add to a block"),
    Prior("host_capacity", 0.3, 0.50, "the same where tokens beyond a capacity are dropped"),
    Prior("host_volta", 1.5, 0.50, "host time in the hosts of V100s, over later ones"),
    Prior("host_ampere", 1.25, 0.30, "the same in those of A100s"),
    Prior("host_sharded_s", 5e-4, 0.80, "FSDP hooks and copies per collective on a CPU"),
    Prior("host_microbatch_s", 2e-3, 0.80, "CPU time per micro-batch outside of blocks"),
    Prior("step_softmax_s", 10e-3, 0.80, "fixed time per step, Megatron of 2020-22"),
    Prior("step_fused_s", 30e-3, 0.60, "the same with Transformer Engine"),
    Prior("step_torch_s", 20e-3, 0.60, "the same with PyTorch's modules"),
    Prior("step_compiled_s", 8e-3, 0.60, "the same with compiled blocks and a fused optimizer"),
    # DeepSpeed's FP16_Optimizer (runtime/fp16/fused_optimizer.py): some eight operations of 10 us
    # and one wait for the device a tensor.
    Prior("host_tensor_s", 9e-5, 0.40, "CPU time per tensor in an unfused optimizer"),
    # CUDA graphs. Some 60 kernels of a block, forward and backward, and as many again that round
    # and transpose operands of narrow products, each with 2.5 us in which it fills and drains the
    # device and the next one begins. A captured step keeps what one with compiled blocks and a
    # fused optimizer does. Starts are a level's share of small all-reduces, which no host delays:
    # 14 us on 8 H100 with multicast, 68 us on 32 devices of 4 nodes (nccl-tests in NVIDIA's
    # dgxc-benchmarking and in ml-engineering).
    Prior("graph_launches_s", 1.5e-4, 0.60, "time between a block's 16-bit kernels in a graph"),
    Prior("step_graph_s", 8e-3, 0.70, "time of a captured step beside its micro-batches"),
    Prior("intra_start_graph_s", 4.6e-6, 0.60, "start of a captured collective, fast domain"),
    Prior("inter_start_graph_s", 13.6e-6, 0.60, "start of a captured collective between nodes"),
    Prior("intra", 0.75, 0.20, "achieved share of the NVLink domain's bandwidth"),
    Prior("intra_start_s", 30e-6, 0.60, "start latency of a collective in the NVLink domain"),
    Prior("inter", 0.75, 0.25, "achieved share of the network bandwidth"),
    Prior("inter_start_s", 60e-6, 0.60, "start latency of a collective between nodes"),
    Prior("tp_exposed", 0.70, 0.35, "exposed share of tensor-parallel communication"),
    Prior("tp_exposed_fused", 0.40, 0.40, "the same with overlapped communication"),
    Prior("cp_exposed", 0.30, 0.60, "exposed share of context-parallel communication"),
    Prior("ep_exposed", 0.80, 0.40, "exposed share of expert-parallel communication"),
    Prior("ep_overlapped", 0.40, 0.40, "the same, overlapped with another micro-batch"),
    # A point-to-point exchange for every pair, of whose ports none helps another. Host threads
    # bring 9 to 43 GB/s from a device (UCCL-EP's README, EFA of 50 GB/s): a third of 100 GB/s. They
    # take 0.23 to 0.32 ms for 128 tokens among 16 ranks, 0.41 to 0.62 among 32 (the same, B200).
    Prior("all_to_all", 0.60, 0.40, "NCCL's all-to-all between nodes over the rate of a ring"),
    Prior("ep_proxied", 0.35, 0.50, "other dispatchers' by host threads over the rate of a ring"),
    Prior("ep_proxied_start_s", 2.7e-4, 0.50, "start of one by host threads among 16 ranks"),
    Prior("pp_exposed", 0.70, 0.40, "exposed share of pipeline transfers"),
    Prior("pp_exposed_fused", 0.20, 0.60, "the same with newer schedules"),
    Prior("dp_exposed", 0.35, 0.50, "exposed share of the gradient exchange"),
    Prior("dp_exposed_fused", 0.25, 0.50, "the same with the distributed optimizer's overlap"),
    Prior("dp_exposed_softmax", 0.90, 0.30, "the same in Megatron of 2020 to 2022"),
    Prior("zero3_exposed", 0.35, 0.50, "exposed share of the shorter of ZeRO-3 traffic and work"),
    Prior("zero3_exposed_early", 0.90, 0.30, "the same in software of 2020 to 2022"),
    Prior("optimizer", 1.3, 0.40, "memory traffic of the optimizer over 26 bytes a parameter"),
    Prior("jitter", 6e-3, 0.60, "relative growth of a step per doubling of the nodes"),
)  # fmt: skip
EXPERT_COEFFICIENTS = (
    "gemm_grouped", "grouped_tokens", "imbalance", "experts_pace", "permuted", "experts_fused",
    "host_experts_s", "host_capacity", "ep_exposed", "ep_overlapped", "all_to_all", "ep_proxied",
    "ep_proxied_start_s",
)  # fmt: skip
"""Coefficients used only by models with experts."""
NAMES = tuple(prior.name for prior in PRIORS)
CENTRE: Floats = np.log([prior.value for prior in PRIORS])
WIDTH: Floats = np.array([prior.sd for prior in PRIORS])


def coefficient_values(logs: Floats) -> Mapping[str, float]:
    """Return the coefficients by name from a vector of their logarithms."""
    return dict(zip(NAMES, np.exp(logs).tolist(), strict=True))
