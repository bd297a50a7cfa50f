"""Small logs of the tests' own making."""

from __future__ import annotations

from collections.abc import Sequence


def megatron_line(
    step: int, time_s: float, batch: int = 128, loss: str = "2.1E+00", tflops: float | None = None
) -> str:
    """One line of Megatron-LM's form."""
    rate = f" throughput per GPU (TFLOP/s/GPU): {tflops:.1f} |" if tflops is not None else ""
    return (
        f" [2026-01-02 03:04:05] iteration {step:8d}/     100 |"
        f" consumed samples: {step * batch:12d} |"
        f" elapsed time per iteration (ms): {1000 * time_s:.1f} |{rate} learning rate: 3.000E-04 |"
        f" global batch size: {batch:5d} | lm loss: {loss} | loss scale: 1.0 | grad norm: 0.500 |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |\n"
    )


def megatron_log(times: Sequence[float], **fields: float) -> str:
    """A log with these step times in seconds, numbered from 1."""
    return "".join(megatron_line(n, t, **fields) for n, t in enumerate(times, start=1))  # type: ignore[arg-type]


def maxtext_log(times: Sequence[float]) -> str:
    """A log of MaxText's form, numbered from 0."""
    lines = (
        f"completed step: {n}, seconds: {t:.3f}, TFLOP/s: 100.0, loss: 2.5\n"
        for n, t in enumerate(times)
    )
    return "".join(lines)


def titan_log(tokens_per_s: float = 7000.0, num_lines: int = 30) -> str:
    """A log of torchtitan's form without what it says before the first step: every 10th step."""
    return "".join(
        f"[titan] 2025-01-01 00:00:00,000 - root - INFO - step: {n:2}  loss:  7.9  "
        "grad_norm:  0.5  memory: 40.00GiB(42.1%)  "
        f"tps: {tokens_per_s + n / 100:,.2f}  tflops: 405.56  mfu: 41.01%\n"
        for n in (1, *range(10, 10 * num_lines, 10))
    )


def chat_log(throughput: str = "943.455", devices: int = 8) -> str:
    """The end of a DeepSpeed-Chat log with Lambda's figure for the whole run."""
    timer = "".join(
        f"[2026-01-01 00:00:{n:02d},000] [INFO] [timer.py:258:stop] epoch=0/micro_step={n}0/"
        f"global_step={n}0, RunningAvgSamplesPerSec={960 - n}.5, CurrSamplesPerSec={945 + n}.25, "
        "MemAllocated=5.53GB, MaxMemAllocated=33.78GB\n"
        for n in range(1, 11)
    )
    return (
        f"[INFO] [launch.py:164:main] dist_world_size={devices}\n{timer}"
        "======\nExecution time: 18.3156 seconds for 90 steps\n"
        f"Throughput: {throughput} samples/sec\n"
    )
