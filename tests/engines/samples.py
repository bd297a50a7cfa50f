"""Made-up logs of every log format, of any length, with step times that are known."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import cycle

import numpy as np

from tests.engines.recent_samples import RECENT_SAMPLES
from tests.engines.sample import RunningTotal, Sample
from tests.engines.table_samples import TABLE_SAMPLES

NOISE = (
    b"node-07:4711:4711 [3] NCCL INFO Channel 05/0 : 3[3] -> 4[4] via P2P/CUMEM/read\n",
    b"/usr/lib/python3/dist-packages/torch/x.py:88: UserWarning: reduce_scatter is slow here\n",
    b"WARNING: logging before flag parsing goes to standard error | retry 3/5 | wait (ms): 12.0\n",
    b"  successfully saved checkpoint to /data/run/iter_x in 12.5 s\n",
    b"Downloading shards:  40%|\xe2\x96\x88\xe2\x96\x88  | 12/30 [00:12<00:18,  1.02s/it]\r",
    b"\x1b[33mloss of precision\x1b[0m in kernel 0x7f3a; caf\xe9 \x00 is not UTF-8\n",
)
"""Lines of others that stand between the steps."""

PREFIXES = (
    b"",
    b"[default7]:",
    b"[node-3:7]:",
    b" 3: ",
    b"ml-512-node-001: ",
    b"\x1b[36m[rank0]:\x1b[0m ",
)
"""What launchers put in front of every line."""


def log_parts(
    name: str, times: Sequence[float], prefix: bytes = b"", noise: Sequence[bytes] = NOISE
) -> Iterator[bytes]:
    """Head, steps with a noise line after each, tail; every line behind `prefix`."""
    sample = SAMPLES[name]
    between = cycle(noise or (b"",))
    yield _prefixed(sample.head, prefix)
    for number, seconds in zip(sample.numbers(len(times)), times, strict=True):
        yield _prefixed(sample.line(number, seconds), prefix)
        yield _prefixed(next(between), prefix)
    yield _prefixed(sample.tail, prefix)


def log_text(
    name: str, times: Sequence[float], prefix: bytes = b"", noise: Sequence[bytes] = NOISE
) -> bytes:
    """The log as a whole."""
    return b"".join(log_parts(name, times, prefix, noise))


def times_of(n: int, seed: int = 0) -> list[float]:
    """Step times of 0.5-50 s with a warm-up and a spread of 1 %."""
    draw = np.random.default_rng(seed)
    times = 10 ** draw.uniform(-0.3, 1.7) * (1 + 0.01 * draw.standard_normal(n))
    times[:1] *= 3
    return times.tolist()


def _prefixed(lines: bytes, prefix: bytes) -> bytes:
    return b"".join(prefix + line for line in lines.splitlines(keepends=True)) if prefix else lines


def _nemo1(number: int, seconds: float) -> bytes:
    return (
        f"Epoch 0: :  10%|█         | {number + 1}/9000000 [02:15<20:00, v_num=0, "
        f"reduced_train_loss={_digits(9.5 - number * 1e-7, 3)}, global_step={_digits(number, 4)}, "
        f"consumed_samples={_digits(128.0 * (number + 1), 4)}, "
        f"train_step_timing in s={_digits(seconds, 3)}]\r"
    ).encode()


def _nemo2(number: int, seconds: float) -> bytes:
    return (
        f"Training epoch 0, iteration {number}/8999999 | lr: 6.897e-06 | global_batch_size: 128 | "
        f"global_step: {number} | max_memory_reserved: 127785762816 | "
        f"max_memory_allocated: 115792977920 | reduced_train_loss: {9.5 - number * 1e-7:.4g} | "
        f"train_step_timing in s: {seconds:.4g} | TFLOPS_per_GPU: {6000 / seconds:.4g} | "
        f"consumed_samples: {128 * (number + 1)}\n"
    ).encode()


def _megatron(number: int, seconds: float) -> bytes:
    return (
        f" [2025-03-04 15:58:56] iteration {number:8d}/ 9000000 | "
        f"consumed samples: {128 * number:12d} | "
        f"elapsed time per iteration (ms): {seconds * 1000:.1f} | "
        f"throughput per GPU (TFLOP/s/GPU): {6000 / seconds:.1f} | "
        f"learning rate: 2.093023E-06 | global batch size: {128:5d} | "
        f"lm loss: {9.5 - number * 1e-7:.6E} | loss scale: 1.0 | grad norm: {1 + 1 / number:.3f} | "
        "number of skipped iterations:   0 | number of nan iterations:   0 |\n"
    ).encode()


def _megatron_bridge(number: int, seconds: float) -> bytes:
    record = (
        f" [2026-03-27 23:08:54] iteration {number:8d}/ 9000000 | "
        f"consumed samples: {128 * number:12d} | "
        f"elapsed time per iteration (ms): {seconds * 1000:.1f} | learning rate: 3.000000E-05 | "
        f"global batch size: {128:5d} | lm loss: {9.5 - number * 1e-7:.6E} | loss scale: 1.0 | "
        f"grad norm: {1 + 1 / number:.3f} | number of skipped iterations:   0 | "
        "number of nan iterations:   0 |\n"
    )
    rate = f"Step Time : {seconds:.2f}s GPU utilization: {6000 / seconds:.1f}MODEL_TFLOP/s/GPU\n"
    return f"{rate}{record}".encode()


def _megatron_deepspeed(number: int, seconds: float) -> bytes:
    return (
        f" iteration {number:8d}/ 9000000 | consumed samples: {2048 * number:12d} | "
        f"consumed tokens: {2048 * 2048 * number:12d} | "
        f"elapsed time per iteration (s): {seconds:.2f} | learning rate: 5.279E-05 | "
        f"global batch size: {2048:5d} | lm loss: {9.5 - number * 1e-7:.6E} | "
        f"grad norm: {1 + 1 / number:.3f} | num zeros: 0.0 | "
        "number of skipped iterations:   0 | number of nan iterations:   0 | "
        f"samples per second: {2048 / seconds:.3f} | TFLOPs: {6000 / seconds:.2f} |\n"
    ).encode()


def _deepspeed_chat(number: int, seconds: float) -> bytes:
    return (
        "[2024-07-08 05:16:30,329] [INFO] [timer.py:258:stop] "
        f"epoch=0/micro_step={number}/global_step={number}, "
        f"RunningAvgSamplesPerSec={190 / seconds}, CurrSamplesPerSec={192 / seconds}, "
        "MemAllocated=5.53GB, MaxMemAllocated=33.78GB\n"
    ).encode()


def _torchtitan(number: int, seconds: float) -> bytes:
    return (
        "[titan] 2025-06-01 05:16:30,329 - root - INFO - "
        f"\x1b[31mstep: {number:2}  \x1b[32mloss: {9.5 - number * 1e-7:7.4f}  "
        f"\x1b[38;2;180;60;0mgrad_norm: {1 + 1 / number:7.4f}  "
        f"\x1b[38;2;54;234;195mmemory: 61.42GiB(77.66%)  "
        f"\x1b[34mtps: {8_192_000 / seconds:,.0f}  \x1b[36mtflops: {3000 / seconds:,.2f}  "
        f"\x1b[35mmfu: {300 / seconds:.2f}%\x1b[39m\n"
    ).encode()


class _HfTrainer:
    """A dictionary, then the bar drawn again; `train_runtime` in it is a running total."""

    def __init__(self) -> None:
        self._run_time = RunningTotal()

    def __call__(self, number: int, seconds: float) -> bytes:
        run_time_s = self._run_time.after(number, seconds)
        return (
            f"{{'loss': {9.5 - number * 1e-7:.4f}, 'grad_norm': 1.25, 'learning_rate': 5e-05, "
            f"'epoch': {number / 100:.2f}, 'train_runtime': {run_time_s:.4f}}}\n"
            f"  0%|          | {number}/9000000 [00:12<02:15, {seconds:5.2f}s/it]\r"
        ).encode()


def _maxtext(number: int, seconds: float) -> bytes:
    return (
        f"completed step: {number}, seconds: {seconds:.3f}, TFLOP/s/device: {300 / seconds:.3f}, "
        f"Tokens/s/device: {8192 / seconds:.3f}, total_weights: 65536, "
        f"loss: {9.5 - number * 1e-7:.3f}\n"
    ).encode()


def _mlperf(number: int, seconds: float) -> bytes:
    event = {
        "namespace": "",
        "time_ms": 1_759_855_621_073 + int(1000 * number * seconds),
        "event_type": "POINT_IN_TIME",
        "key": "tracked_stats",
        "value": {"train_step_time": seconds},
        "metadata": {
            "file": "/workspace/callbacks.py",
            "lineno": 210,
            "samples_count": 32 * number,
            "step": number,
        },
    }
    return f":::MLLOG {json.dumps(event)}\n".encode()


def _native(number: int, seconds: float) -> bytes:
    event = {
        "event": "step",
        "step": number,
        "loss": 9.5 - number * 1e-7,
        "grad_norm": 1.25,
        "tokens": 4096.0,
        "samples": 16.0,
        "global_batch": 32,
        "seq_len": 256,
        "step_time_s": seconds,
        "busy_time_s": 0.9 * seconds,
        "comm_wait_s": 0.1 * seconds,
        "data_wait_s": 0.001,
        "skipped": False,
        "memory_bytes": {"allocated": None, "reserved": None, "resident": 6.5e8},
    }
    return json.dumps(event).encode() + b"\n"


def _digits(value: float, digits: int) -> str:
    """`value` as NeMo 1 prints it, padded with zeros after a point or with an exponent."""
    short = f"{value:.{digits - 1}g}" if value >= 1000 else f"{value:.{digits}g}"
    return short if "e" in short else f"{short}{'' if '.' in short else '.'}00"[:5]


def _mlperf_event(kind: str, key: str, value: object, time_ms: int = 1_759_855_600_000) -> bytes:
    event = {
        "namespace": "",
        "time_ms": time_ms,
        "event_type": kind,
        "key": key,
        "value": value,
        "metadata": {"file": "/workspace/train.py", "lineno": 12, "status": "success"},
    }
    return f":::MLLOG {json.dumps(event)}\n".encode()


MEGATRON_HEAD = b"""using world size: 8, data-parallel size: 8
------------------------ arguments ------------------------
  global_batch_size ............................... 128
  hidden_size ..................................... 4096
  num_layers ...................................... 32
  seq_length ...................................... 8192
-------------------- end of arguments ---------------------
"""
NATIVE_HEAD = (
    json.dumps(
        {
            "event": "start",
            "schema": 1,
            "rank": 0,
            "world_size": 2,
            "local_rank": 0,
            "host": "here",
            "pid": 7,
            "time_unix": 1.7e9,
            "torch": "2.13.0",
            "python": "3.11.7",
            "cuda": None,
            "backend": "gloo",
            "device_name": "cpu",
            "num_parameters": 11_000_000,
            "trainable_parameters": 11_000_000,
            "layout": {"tp": 1, "pp": 1},
            "dtype": "bf16",
            "matmul_precision": "high",
            "threads": 1,
            "data": {"source": "synthetic"},
        }
    ).encode()
    + b"\n"
)

SAMPLES = {
    "nemo1": Sample(_nemo1, first=0, digits=5e-3),
    "nemo2": Sample(_nemo2, first=0),
    "megatron": Sample(_megatron, MEGATRON_HEAD),
    "megatron_bridge": Sample(_megatron_bridge),
    "megatron_deepspeed": Sample(_megatron_deepspeed, MEGATRON_HEAD, digits=1e-2),
    "deepspeed_chat": Sample(
        _deepspeed_chat, first=10, every=10, seconds=lambda steps: 192 / steps["samples_per_s"]
    ),
    "torchtitan": Sample(
        _torchtitan,
        b"[titan] 2025-06-01 05:16:20,329 - root - INFO - Building 1-D device mesh with "
        b"['dp_shard'], [8]\n"
        b"[titan] 2025-06-01 05:16:21,329 - root - INFO - Trainer is initialized with local batch "
        b"size 8, global batch size 8000, gradient accumulation steps 125, sequence length 8192, "
        b"total steps 9000000 (warmup 2)\n",
        seconds=lambda steps: 8_192_000 / steps["tokens_per_s_per_device"],
    ),
    "hf_trainer": Sample(_HfTrainer()),
    "maxtext": Sample(_maxtext, first=0),
    "mlperf": Sample(
        _mlperf,
        head=_mlperf_event("INTERVAL_END", "init_stop", None)
        + _mlperf_event("POINT_IN_TIME", "global_batch_size", 32)
        + _mlperf_event("INTERVAL_START", "run_start", None),
        tail=_mlperf_event("INTERVAL_END", "run_stop", None, 1_759_866_621_073),
    ),
    "native": Sample(_native, NATIVE_HEAD, prefixed=False),
    **RECENT_SAMPLES,
    **TABLE_SAMPLES,
}
"""One for every log format, by the name of its engine."""
