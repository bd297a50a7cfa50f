"""Made-up logs of the formats that are declared as tables.

Each is written as the program prints it whose file its table names; the numbers are our own.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from tests.engines.sample import RunningTotal, Sample

TOKENS = 65_536


class _Clock:
    """Date of each line of a log."""

    def __init__(self, separator: str = ",") -> None:
        self._total = RunningTotal()
        self._separator = separator

    def after(self, number: int, seconds: float) -> str:
        moment = datetime(2026, 1, 1) + timedelta(seconds=self._total.after(number, seconds))
        return moment.strftime(f"%Y-%m-%d %H:%M:%S{self._separator}%f")[:23]


def _mmengine(number: int, seconds: float) -> bytes:
    return (
        f"2026/01/01 10:01:00 - mmengine - INFO - Iter(train) [{number:4}/9000000]  "
        f"lr: 2.0000e-05  eta: 0:45:00  time: {seconds:.4f}  data_time: 0.0080  memory: 13969  "
        "loss: 1.3000  grad_norm: 0.4000\n"
    ).encode()


def _mlx_lm(number: int, seconds: float) -> bytes:
    return (
        f"Iter {number}: Train loss 1.900, Learning Rate 1.000e-05, It/sec {1 / seconds:.6f}, "
        f"Tokens/sec {1202 / seconds:.3f}, Trained Tokens {1202 * number}, Peak mem 21.704 GB\n"
    ).encode()


class _InternEvo:
    def __init__(self) -> None:
        self._clock = _Clock()

    def __call__(self, number: int, seconds: float) -> bytes:
        return (
            f"{self._clock.after(number + 1, seconds)}\tINFO train.py:317 in "
            f"record_current_batch_training_metrics -- tflops={700 / seconds:.4f},step={number},"
            f"loss=5.4,tgs (tokens/gpu/second)={TOKENS / 8 / seconds:.4f},lr=7.6e-06,"
            f"loss_scale=65536.0,grad_norm=12.5,num_consumed_tokens={TOKENS * (number + 1)},"
            "largest_length=2048,fwd_bwd_time=3.9\n"
        ).encode()


def _mindformers(number: int, seconds: float) -> bytes:
    return (
        "2026-01-01 10:00:04,000 - [mindformers/core/callback/callback.py:529] - INFO - "
        f"{{ Epoch:[  1/  2], step:[{number:5}/9000000], loss: 6.500, "
        f"per_step_time: {1000 * seconds:.0f}ms, lr: 1e-05, overflow cond: False, "
        f"loss_scale: 1.0, global_norm: [1.2], train_throughput_per_npu: {300 / seconds:.1f}T\n"
    ).encode()


def _torchtune(number: int, seconds: float) -> bytes:
    return (
        f"Step {number} | loss:1.0831 lr:2e-05 tokens_per_second_per_gpu:{8192 / seconds:.6f} "
        "peak_memory_active:21.5 peak_memory_alloc:21.5 peak_memory_reserved:24.1\n"
    ).encode()


def _deepspeed_pipe(number: int, seconds: float) -> bytes:
    return (
        f"steps: {number} loss: 6.7133 iter time (s): {seconds:.3f} "
        f"samples/sec: {64 / seconds:.3f}\n"
    ).encode()


def _tinygrad(number: int, seconds: float) -> bytes:
    return (
        f"{number:5} {seconds:.2f} s run, 11.8750 loss, 0.000000000004 LR, 1454.57 GB used, "
        f"{1_700_000 / seconds:.2f} GFLOPS\n"
    ).encode()


def _nemo_rl(number: int, seconds: float) -> bytes:
    return (
        f"========================= Step {number}/9000000 =========================\n"
        "Training Results:\n"
        "  * Loss: 0.0812\n"
        "  * Training FLOPS: 385.00 TFLOPS (48.12 TFLOPS per rank)\n"
        "Timing:\n"
        f"  * Total step time: {seconds:.2f}s\n"
        "  * generation: 2.62s (54.5%)\n"
    ).encode()


def _picotron(number: int, seconds: float) -> bytes:
    rate = TOKENS / seconds
    return (
        f"[rank 0] Step: {number:<5} | Loss: 8.5469 | Global batch size:  65.54K | "
        f"Tokens/s: {rate / 1e3:7.2f}K | Tokens/s/GPU: {rate / 8e3:7.2f}K | "
        "Tokens:   1.04M | MFU: 41.20% | Memory usage:  41.75GB\n"
    ).encode()


def _llama_cpp(number: int, seconds: float) -> bytes:
    minutes, rest = divmod(round(100 * seconds), 60)
    return (
        f"train_opt_callback: iter={number:6} sample={number}/5608 sched=0.7 loss=2.1 "
        f"dt={minutes // 60:02}:{minutes % 60:02}:{rest:02} eta=03:29:33 |----->\n"
    ).encode()


class _MegatronProgress:
    def __init__(self) -> None:
        self._clock = _Clock(".")

    def __call__(self, number: int, seconds: float) -> bytes:
        return (
            f"{self._clock.after(number, seconds)}\tJob ID: 1\t# GPUs: 64\tSaving async checkpoint"
            f"\tIteration: {number}\tJob throughput: {6000 / seconds:.1f} TFLOP/s/GPU\t"
            "Cumulative throughput: 405.0 TFLOP/s/GPU\tFloating-point operations: 9.4e+19\t"
            f"Tokens (in billions): {number * 0.0021:.6f}\n"
        ).encode()


class _DlLogger:
    def __init__(self) -> None:
        self._clock = _Clock(".")

    def __call__(self, number: int, seconds: float) -> bytes:
        return (
            f"DLL {self._clock.after(number, seconds)}000 - Training Epoch: 0 "
            f"Training Iteration: {number}  average_loss : 8.1  step_loss : 8.0  "
            "learning_rate : 0.006 \n"
        ).encode()


def _tf_estimator(number: int, seconds: float) -> bytes:
    return (
        f"INFO:tensorflow:loss = 3.18, step = {number} ({seconds:.3f} sec)\n"
        f"INFO:tensorflow:global_step/sec: {1 / seconds:.6f}\n"
    ).encode()


class _Speedrun:
    def __init__(self) -> None:
        self._total = RunningTotal()

    def __call__(self, number: int, seconds: float) -> bytes:
        minutes = self._total.after(number, seconds) / 60
        return (
            f"{number}/9000000 train_loss: 2.6 train_time: {minutes:.6f}m "
            f"tok/s: {TOKENS / seconds:.3f}\n"
        ).encode()


def _colossalai(number: int, seconds: float) -> bytes:
    return (
        f"Step:   5%|#         | {number}/9000000 [00:19<06:16, {seconds:.2f}s/it]"
        "[01/01/26 10:00:00] INFO     colossalai - colossalai - INFO: "
        f"Step time: {seconds:.3f}\n"
    ).encode()


def _deepspeed_profile(number: int, seconds: float) -> bytes:
    return (
        "-------------------------- DeepSpeed Flops Profiler --------------------------\n"
        f"Profile Summary at step {number}:\n"
        "world size:                                                   8\n"
        "fwd+bwd FLOPS per GPU = 3 * fwd flops per GPU / (fwd+bwd latency):   90.0 TFLOPS\n"
        f"iter latency:                                                 {1000 * seconds:.2f} ms\n"
        f"samples/second:                                               {128 / seconds:.2f}\n"
    ).encode()


class _PaddleNlp:
    def __init__(self) -> None:
        self._clock = _Clock()

    def __call__(self, number: int, seconds: float) -> bytes:
        return (
            f"[{self._clock.after(number, seconds)}] [    INFO] - loss: 2.5, learning_rate: 3e-05, "
            f"global_step: {number}, interval_runtime: {seconds:.4f}, "
            f"interval_samples_per_second: {32 / seconds:.4f}, "
            f"interval_tokens_per_second_per_device: {TOKENS / 8 / seconds:.4f}, "
            f"interval_steps_per_second: {1 / seconds:.4f}, progress_or_epoch: 0.01\n"
        ).encode()


def _fairseq(number: int, seconds: float) -> bytes:
    return (
        f"2026-01-01 10:00:00 | INFO | train_inner | epoch 001:    {number} / 9000000 loss=9.1, "
        f"nll_loss=8.2, wps={TOKENS / seconds:.1f}, ups={1 / seconds:.2f}, wpb={TOKENS}, "
        f"bsz=128, num_updates={number}, lr=0.0001, gnorm=1.2, train_wall=50, gb_free=20, wall=99\n"
    ).encode()


def _composer(number: int, seconds: float) -> bytes:
    return (
        f"[batch={number + 1}/9000000]:\n"
        "\t Train time/epoch: 0\n"
        f"\t Train time/batch: {number}\n"
        f"\t Train time/sample: {number * 32}\n"
        f"\t Train time/token: {number * TOKENS}\n"
        "\t Train loss/train/total: 2.5000\n"
        f"\t Train throughput/batches_per_sec: {1 / seconds:.6f}\n"
        f"\t Train throughput/device/tokens_per_sec: {TOKENS / 8 / seconds:.4f}\n"
    ).encode()


def _open_clip(number: int, seconds: float) -> bytes:
    return (
        f"10:00:00 | INFO | Train Epoch: 0 [{number * 2560:>8}/90000000 (1%)] "
        f"Data (t): 0.010 Batch (t): {seconds:.3f}, {2560 / seconds:#g}/s, {320 / seconds:#g}/s/gpu"
        " LR: 1e-05 Logit Scale: 14.286 Contrastive_loss: 6.50 (6.60) Loss: 6.50 (6.60)\n"
    ).encode()


class _Prime:
    def __init__(self) -> None:
        self._clock = _Clock()

    def __call__(self, number: int, seconds: float) -> bytes:
        clock = self._clock.after(number, seconds)[11:19]
        return (
            f"{clock} [INFO] [Rank 0] step: {number}, loss: 9.5000, "
            f"tokens_per_second: {TOKENS / seconds:.2f}, mfu: 41.20\n"
        ).encode()


def _prime_rl(number: int, seconds: float) -> bytes:
    return (
        f"10:00:00 SUCCESS Step {number} | Time: {seconds:.2f}s | Loss: 0.0100 | Entropy: 0.5000 | "
        f"Grad. Norm: 0.1000 | LR: 1.00e-06 | Throughput: {TOKENS / seconds:.0f} tokens/s | "
        "MFU: 41.2% | Peak Mem.: 41.7 GiB\n"
    ).encode()


def _litgpt(number: int, seconds: float) -> bytes:
    return (
        f"Epoch 1 | iter {number} step {number} | loss train: 1.900, val: n/a | "
        f"iter time: {1000 * seconds:.2f} ms (step) remaining time: 1:02:03\n"
    ).encode()


TABLE_SAMPLES = {
    "paddlenlp": Sample(_PaddleNlp()),
    "fairseq": Sample(_fairseq),
    "composer": Sample(_composer, first=0),
    "open_clip": Sample(_open_clip),
    "prime": Sample(_Prime(), digits=0.2, first_is_unknown=True),
    "prime_rl": Sample(_prime_rl, first=0, digits=0.01),
    "litgpt": Sample(_litgpt),
    "mmengine": Sample(_mmengine),
    "mlx_lm": Sample(_mlx_lm),
    "internevo": Sample(_InternEvo(), first=0, first_is_unknown=True),
    "mindformers": Sample(_mindformers),
    "torchtune": Sample(_torchtune, seconds=lambda steps: 8192 / steps["tokens_per_s_per_device"]),
    "deepspeed_pipe": Sample(_deepspeed_pipe),
    "tinygrad": Sample(_tinygrad, digits=0.01),
    "nemo_rl": Sample(_nemo_rl, digits=0.01),
    "picotron": Sample(_picotron, digits=0.02),
    "llama_cpp": Sample(_llama_cpp, seconds=lambda steps: steps["step_time_s"] / 100, digits=0.01),
    "megatron_progress": Sample(_MegatronProgress(), digits=0.01, first_is_unknown=True),
    "dllogger": Sample(_DlLogger(), digits=0.01, first_is_unknown=True),
    "tf_estimator": Sample(_tf_estimator),
    "speedrun": Sample(_Speedrun()),
    "colossalai": Sample(_colossalai),
    "deepspeed_profile": Sample(_deepspeed_profile),
}
