"""Throughput, utilization, training days and scaling efficiency from step times."""

from __future__ import annotations

from paceline.core.units import SECONDS_PER_DAY


def samples_per_s(global_batch: float, step_time_s: float) -> float:
    """Return sequences per second over all devices: B / t.

    Source: Lambda 1-Click Cluster DeepSpeed-Chat benchmark, whose log divides the samples of the
    timed steps by their total time.
    """
    return global_batch / step_time_s


def step_time_s(global_batch: float, samples_per_s: float) -> float:
    """Return the seconds of one step from a printed throughput: B / (samples/s)."""
    return global_batch / samples_per_s


def tokens_per_s(seq_len: float, global_batch: float, step_time_s: float) -> float:
    """Return tokens per second over all devices: s B / t, padding included.

    Source: NVIDIA DGX Cloud Llama 3.1 recipe 25.01, "throughput in tokens per second".
    """
    return seq_len * global_batch / step_time_s


def flops_per_s_per_device(
    flops_per_sample: float, global_batch: float, step_time_s: float, num_devices: int
) -> float:
    """Return FLOP/s of one device: F B / (t n), in the convention in which F was counted.

    Source: BigScience tr3-1B3 benchmark (F = 8 P s with full recomputation, 6 P s without), and the
    numerator of the MFU in NVIDIA DGX Cloud Llama 3.1 recipe 25.01.
    """
    return flops_per_sample * global_batch / (step_time_s * num_devices)


def mfu(flops_per_s_per_device: float, peak_flops_per_s: float | None) -> float | None:
    """Return the share of the dense peak, 0-1; None if the peak is unknown.

    Model FLOPs give model FLOPs utilization (MFU). FLOPs that count recomputation give hardware
    FLOPs utilization (HFU). Source: NVIDIA DGX Cloud Llama 3.1 recipe 25.01.
    """
    return None if peak_flops_per_s is None else flops_per_s_per_device / peak_flops_per_s


def days(total_tokens: float, tokens_per_s: float) -> float:
    """Return the days to train `total_tokens` at a constant rate: N / (tokens/s) / 86,400.

    Source: NVIDIA DGX Cloud Llama 3.1 recipe 25.01, "time to train in days".
    """
    return total_tokens / tokens_per_s / SECONDS_PER_DAY


def scaling_efficiency(value: float, num: int, base_value: float, base_num: int) -> float:
    """Return throughput per device (or node) over that of the base.

    The formula is (value / num) / (base / base_num). Every such figure depends on its base. The
    Lambda 1-Click Cluster DeepSpeed-Chat benchmark prints "over 98%", which is true relative to one
    8-GPU node but not relative to one GPU.
    """
    return (value / num) / (base_value / base_num)
