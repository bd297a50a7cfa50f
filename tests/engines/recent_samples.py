"""Made-up logs of the research scripts and of the frameworks that came after 2023.

Each is written as the program prints it whose file its log format names; the numbers are our own.
"""

from __future__ import annotations

import json
from datetime import timedelta

from tests.engines.sample import RunningTotal, Sample

LOSS, STEP = 9.5, 1e-7
TOKENS = 524_288


def _short(value: float) -> str:
    """Three significant digits and K, M, B or T, as nanotron prints numbers."""
    if abs(value) < 1:
        return f"{value:.3g}"
    value, size = float(f"{value:.3g}"), 0
    while abs(value) >= 1000:
        value, size = value / 1000, size + 1
    return f"{f'{value:f}'.rstrip('0').rstrip('.')}{'KMBTPE'[size - 1] if size else ''}"


def _nanotron(number: int, seconds: float) -> bytes:
    return (
        "05/06/2026 13:47:27 [INFO|DP=0|PP=0|TP=0|node-07]: "
        f"iteration: {number} / 9000000 | consumed_tokens: {_short(TOKENS * number)} | "
        f"elapsed_time_per_iteration_ms: {_short(1000 * seconds)} | "
        f"tokens_per_sec: {_short(TOKENS / seconds)} | "
        f"tokens_per_sec_per_gpu: {_short(TOKENS / seconds / 8)} | global_batch_size: 256 | "
        f"lm_loss: {_short(LOSS - number * STEP)} | lr: 0.0003 | "
        f"model_tflops_per_gpu: {_short(6000 / seconds)} | "
        f"hardware_tflops_per_gpu: {_short(6000 / seconds)} | grad_norm: 0.515 | "
        "cuda_memory_allocated: 15.2G | cuda_max_memory_reserved: 54.7G\n"
    ).encode()


NANOTRON_HEAD = b"""\
05/06/2026 13:47:01 [INFO|DP=0|PP=0|TP=0|node-07]:        parallelism=ParallelismArgs(dp=2,
05/06/2026 13:47:01 [INFO|DP=0|PP=0|TP=0|node-07]:                                    pp=1,
05/06/2026 13:47:01 [INFO|DP=0|PP=0|TP=0|node-07]:                                    tp=4,
05/06/2026 13:47:01 [INFO|DP=0|PP=0|TP=0|node-07]:                     expert_parallel_size=1),
05/06/2026 13:47:02 [INFO|DP=0|PP=0|TP=0|node-07]: [Start training] datetime: 2026-05-06 \
13:47:02.889276 | mbs: 4 | grad_accum: 32 | global_batch_size: 256 | sequence_length: 2048 | \
train_steps: 9000000 | start_iteration_step: 0 | consumed_train_samples: 0
"""


def _value(value: float) -> str:
    """A metric as OLMo-core prints it."""
    if value > 1000:
        return f"{int(value):,d}"
    decimals = next((n for n, least in ((1, 100), (2, 10), (3, 1)) if value > least), 4)
    return f"{value:.{decimals}f}"


def _olmo_core(number: int, seconds: float) -> bytes:
    metrics = {
        "train/CE loss": LOSS - number * STEP,
        "train/PPL": 9876.5,
        "optim/total grad norm": 1.25,
        "optim/LR (group 0)": 3e-4,
        "throughput/device/data loading (s)": 0.0012,
        "throughput/device/TPS": 65536 / seconds,
        "throughput/device/TPS (actual avg)": 65536 / 7.5,
        "throughput/total tokens": TOKENS * number,
        "throughput/device/BPS": 1 / seconds,
        "throughput/device/BPS (actual avg)": 1 / 7.5,
        "throughput/device/MFU": 300 / seconds,
        "gpu_memory/GPU active mem (GiB)": 54.321,
        "gpu_memory/GPU reserved mem (GiB)": 61.421,
    }
    head = (
        "2026-05-06 13:47:27.123\tnode-07:0\tolmo_core.train.callbacks.console_logger:52\tINFO\t"
        f"[step={number}/9000000,epoch=1,eta=3:12:01]\n"
    )
    return (head + "".join(f"    {n}={_value(v)}\n" for n, v in metrics.items())).encode()


def _llm_c(number: int, seconds: float) -> bytes:
    return (
        f"step {number:4d}/9000000 | loss {LOSS - number * STEP:.6f} (+nanz)| norm 1.2500 (-0.31z)"
        f"| lr 3.00e-04 | {1000 * seconds:.2f} ms | {3000 / seconds / 100:.1f}% bf16 MFU | "
        f"{TOKENS / 7.5:.0f} tok/s\n"
    ).encode()


LLM_C_HEAD = b"".join(
    b"| %-21s | %-50s |\n" % row
    for row in (
        (b"Parameter", b"Value"),
        (b"micro batch size B", b"16"),
        (b"sequence length T", b"1024"),
        (b"total batch size", b"524288"),
        (b"learning rate (LR)", b"6.000000e-04"),
        (b"device", b"NVIDIA H100 80GB HBM3"),
        (b"precision", b"BF16"),
        (b"num_layers L", b"12"),
        (b"num_parameters", b"124475904"),
        (b"num_processes", b"8"),
        (b"zero_stage", b"1"),
    )
) + (
    b"batch_size B=16 * seq_len T=1024 * num_processes=8 and total_batch_size=524288\n"
    b"=> setting grad_accum_steps=4\n"
    b"device memory usage: 21315 MiB / 81100 MiB\n"
    b"val loss 11.033154\n"
)


class _ModdedNanogpt:
    """`train_time` is a running total of milliseconds."""

    def __init__(self) -> None:
        self._clock = RunningTotal()

    def __call__(self, number: int, seconds: float) -> bytes:
        total_s = self._clock.after(number, seconds)
        return (
            f"step:{number}/9000000 train_time:{1000 * total_s:.0f}ms "
            f"step_avg:{1000 * total_s / number:.2f}ms\n"
        ).encode()


def _nanogpt(number: int, seconds: float) -> bytes:
    return (
        f"iter {number}: loss {LOSS - number * STEP:.4f}, time {1000 * seconds:.2f}ms, "
        f"mfu {300 / seconds:.2f}%\n"
    ).encode()


NANOGPT_HEAD = b"""\
Overriding: block_size = 1024
Overriding: batch_size = 16
tokens per iteration will be: 524,288
number of parameters: 123.59M
step 0: train loss 10.9892, val loss 10.9881
"""


def _nanochat(number: int, seconds: float) -> bytes:
    return (
        f"step {number:05d}/9000000 ({number / 90000:.2f}%) | loss: {LOSS - number * STEP:.6f} | "
        f"lrm: 1.00 | dt: {1000 * seconds:.2f}ms | tok/sec: {int(TOKENS / seconds):,} | "
        f"bf16_mfu: {300 / seconds:.2f} | epoch: 1 pq: 3 rg: 12 | total time: 12.34m | "
        "eta: 56.7m\n"
    ).encode()


NANOCHAT_HEAD = b"""\
GPU: NVIDIA H100 80GB HBM3 | Peak FLOPS (BF16): 9.89e+14
COMPUTE_DTYPE: torch.bfloat16 (auto-detected)
Tokens / micro-batch / rank: 32 x 2048 = 65,536
Tokens / micro-batch: 524,288
Total batch size 524,288 => gradient accumulation steps: 1
Step 00000 | Validation bpb: 3.3000
"""


class _LlamaFactory:
    """`elapsed_time` and `total_tokens` are running totals, `throughput` is their quotient."""

    def __init__(self) -> None:
        self._clock = RunningTotal()

    def __call__(self, number: int, seconds: float) -> bytes:
        total_s = self._clock.after(number, seconds)
        record = {
            "current_steps": number,
            "total_steps": 9_000_000,
            "loss": round(LOSS - number * STEP, 4),
            "lr": 1e-4,
            "epoch": round(number / 1000, 4),
            "percentage": round(number / 90_000, 2),
            "elapsed_time": str(timedelta(seconds=int(total_s))),
            "remaining_time": "1 day, 2:03:04",
            "throughput": round(TOKENS * number / total_s, 2),
            "total_tokens": TOKENS * number,
        }
        return json.dumps(record).encode() + b"\n"


def _automodel(number: int, seconds: float) -> bytes:
    return (
        f"2026-05-06 13:47:27 | INFO | root | step {number} | epoch 0 | "
        f"loss {LOSS - number * STEP:.4f} | grad_norm 1.2500 | lr 1.00e-05 | mem 24.90 GiB | "
        f"tps {TOKENS / seconds:.2f}({TOKENS / seconds / 8:.2f}/gpu) | num_label_tokens 21541\n"
    ).encode()


def _primus(number: int, seconds: float) -> bytes:
    return (
        "[\x1b[32m20260506 13:47:27\x1b[0m][\x1b[36mrank-7/8\x1b[0m][\x1b[1mINFO \x1b[0m] "
        f"\x1b[1m[--------trainer.py:2560] :  iteration {number:8d}/ 9000000 | "
        f"consumed samples: {128 * number:12d} | "
        f"elapsed time per iteration (ms): {1000 * seconds:.1f}/7500.0 | "
        "hip mem usage/free/total/usage_ratio: 153.81GiB/102.17GiB/255.98GiB/60.09% | "
        f"throughput per GPU (TFLOP/s/GPU): {6000 / seconds:.1f}/800.0 | "
        f"tokens per GPU (tokens/s/GPU): {131072 / seconds:.1f}/17476.3 | "
        f"learning rate: 9.984820E-06 | global batch size: {128:5d} | "
        f"lm loss: {LOSS - number * STEP:.6E} | loss scale: 1.0 | grad norm: 0.061 | "
        "number of skipped iterations:   0 | number of nan iterations:   0 |\x1b[0m\n"
    ).encode()


def _verl(number: int, seconds: float) -> bytes:
    return (
        f"(TaskRunner pid=4711) step:{number} - global_seqlen/mean:39976.5 - "
        "actor/entropy:0.4321 - actor/pg_loss:np.float64(0.0123) - actor/grad_norm:0.25 - "
        "perf/mfu/actor:0.21 - perf/max_memory_allocated_gb:54.25 - actor/lr:1e-06 - "
        f"timing_s/gen:{0.6 * seconds} - timing_s/step:{seconds} - "
        f"perf/total_num_tokens:{TOKENS} - perf/time_per_step:{seconds} - "
        f"perf/throughput:{TOKENS / seconds / 8}\n"
    ).encode()


RECENT_SAMPLES = {
    "nanotron": Sample(_nanotron, NANOTRON_HEAD, digits=5e-3),
    "olmo_core": Sample(_olmo_core, first=10, every=10, digits=1e-2),
    "llm_c": Sample(_llm_c, LLM_C_HEAD),
    "modded_nanogpt": Sample(_ModdedNanogpt()),
    "nanogpt": Sample(_nanogpt, NANOGPT_HEAD, first=0, every=10),
    "nanochat": Sample(_nanochat, NANOCHAT_HEAD, first=0),
    "llama_factory": Sample(_LlamaFactory()),
    "automodel": Sample(
        _automodel,
        b"2026-05-06 13:47:20 | INFO | root | - World size: 8\n",
        first=0,
        seconds=lambda steps: TOKENS / 8 / steps["tokens_per_s_per_device"],
    ),
    "primus": Sample(_primus),
    "verl": Sample(_verl),
}
"""One for each, by the name of its engine."""
