"""Log of an MLPerf run: `:::MLLOG` lines in the format of the rules of Training 5.1 to 6.1.

All values are those of the run itself. Sources: mlcommons/logging, mllog and the rule files of its
compliance checker; mlcommons/training_policies, training_rules.adoc.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from paceline.trainer.config import NARROW, LrScheduleConfig, TrainerConfig
from paceline.trainer.model_config import FluxConfig

LOG_FILE = "mlperf/result.txt"
TOKEN = ":::MLLOG"
START, END, POINT = "INTERVAL_START", "INTERVAL_END", "POINT_IN_TIME"


class MllogFile:
    """File of log lines, each appended with a single write; `clock` gives seconds since 1970.

    An existing file belongs to another start and is renamed to `NAME.1`, `NAME.2`, ...
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._clock = path, clock
        if path.is_file():
            names = (path.with_name(f"{path.name}.{number}") for number in count(1))
            path.rename(next(name for name in names if not name.exists()))
        path.write_text("")

    def write(self, kind: str, key: str, value: Any = None, **metadata: Any) -> None:
        """Append one line, with the source line of the caller."""
        caller = sys._getframe(2)
        place = {"file": Path(caller.f_code.co_filename).name, "lineno": caller.f_lineno}
        if isinstance(value, float) and not math.isfinite(value):
            value = None
        line = {
            "namespace": "",
            "time_ms": int(self._clock() * 1000),
            "event_type": kind,
            "key": key,
            "value": value,
            "metadata": {**place, **metadata},
        }
        with self._path.open("a") as file:
            file.write(f"{TOKEN} {json.dumps(line)}\n")


class MlperfRun:
    """Events of a timed run, in the order of the calls, as lines of its log.

    Without a `file`, as on all ranks but the first, nothing is written.
    """

    def __init__(self, config: TrainerConfig, file: MllogFile | None) -> None:
        self._config, self._file = config, file
        self._clock_runs = self._over = False
        self._block: tuple[int, int] | None = None

    def begin(self) -> None:
        """Log the start of the program: the submission, and all settings."""
        mlperf = self._config.mlperf
        if mlperf is None:
            return
        if mlperf.cache_cleared is not None:
            self._point("cache_clear", mlperf.cache_cleared)
        self._line(START, "init_start")
        labels = ("benchmark", "org", "division", "status", "platform")
        for name in labels:
            self._point(f"submission_{name}", getattr(mlperf, name))
        for key, value in settings(self._config).items():
            self._point(key, value)

    def start(self, warmup_s: float | None) -> None:
        """Start the clock: the model is built and no data has been read."""
        if warmup_s is not None:
            self._point("tracked_stats", {"warmup_time": warmup_s})
        self._line(END, "init_stop")
        self._line(START, "run_start")
        self._clock_runs = True

    def data(self, train_samples: int, eval_samples: int) -> None:
        """Log that the data is open, and start the first block."""
        self._point("train_samples", train_samples)
        self._point("eval_samples", eval_samples)
        self.begin_block(0, 0)

    def begin_block(self, step: int, samples: int) -> None:
        """Start a block after `step` steps and `samples` samples."""
        self._block = step, samples
        self._line(START, "block_start", step=step, samples_count=samples)

    def end_block(self, step: int, samples: int, seconds: float) -> None:
        """End a block, which took `seconds`, for an evaluation or at the end of the run."""
        assert self._block is not None, "a block has started"
        steps, more = step - self._block[0], samples - self._block[1]
        self._block = None
        if steps and seconds > 0:
            speed = {"throughput": more / seconds, "train_step_time": seconds / steps}
            self._point("tracked_stats", speed, step=step, samples_count=samples)
        self._line(END, "block_stop", step=step, samples_count=samples)

    def begin_evaluation(self, step: int, samples: int) -> None:
        """Start an evaluation after `step` steps and `samples` samples."""
        self._line(START, "eval_start", step=step, samples_count=samples)

    def end_evaluation(self, step: int, samples: int, loss: float, seconds: float) -> None:
        """End the evaluation with its loss and time."""
        self._point("eval_accuracy", loss, step=step, samples_count=samples)
        timing = {"validation_time": seconds}
        self._point("tracked_stats", timing, step=step, samples_count=samples)
        self._line(END, "eval_stop", step=step, samples_count=samples)

    def stop(self, reached: bool, step: int | None = None, samples: int | None = None) -> None:
        """End the run, with the target reached or missed; later calls do nothing."""
        if not self._clock_runs or self._over:
            return
        self._over = True
        counts = {"step": step, "samples_count": samples}
        metadata = {name: value for name, value in counts.items() if value is not None}
        self._line(END, "run_stop", status="success" if reached else "aborted", **metadata)

    def _point(self, key: str, value: Any, **metadata: Any) -> None:
        if self._file is not None:
            self._file.write(POINT, key, value, **metadata)

    def _line(self, kind: str, key: str, **metadata: Any) -> None:
        if self._file is not None:
            self._file.write(kind, key, **metadata)


def open_run(config: TrainerConfig, rank: int) -> MlperfRun:
    """Return the log of a run that writes one, else a log without a file."""
    writes = config.mlperf is not None and rank == 0
    return MlperfRun(config, MllogFile(Path(LOG_FILE)) if writes else None)


def settings(config: TrainerConfig) -> dict[str, Any]:
    """Return the run's settings that the rules require in the log, by key."""
    training = config.training
    evaluation = training.evaluation
    assert evaluation is not None, "a timed run is evaluated"
    values: dict[str, Any] = {
        "seed": training.seed,
        "global_batch_size": training.global_batch,
        "gradient_accumulation_steps": config.num_microbatches,
        "max_sequence_length": training.seq_len,
        "evaluation_frequency": evaluation.every_samples,
        "target_accuracy": evaluation.target,
        "opt_name": "adamw",
        "opt_base_learning_rate": training.lr,
        "opt_adamw_beta_1": training.betas[0],
        "opt_adamw_beta_2": training.betas[1],
        "opt_adamw_epsilon": training.eps,
        "opt_adamw_weight_decay": training.weight_decay,
        "opt_gradient_clip_norm": training.grad_clip,
        **schedule(training.lr_schedule, training.lr, training.steps, training.global_batch),
        "max_steps": training.steps,
        "data_source": config.data.source,
        "tensor_parallelism": config.layout.tp,
        "pipeline_parallelism": config.layout.pp,
        "context_parallelism": config.layout.cp,
        "expert_parallelism": config.layout.ep,
        "micro_batch_size": config.layout.micro_batch,
        **lowest_precisions(config),
        "config_filename": "trainer.json",
    }
    if config.lora is not None:
        values |= {"lora_rank": config.lora.rank, "lora_alpha": config.lora.alpha}
    if isinstance(config.model, FluxConfig):
        del values["max_sequence_length"]
    return values


PRECISIONS = {
    "fp64": "fp64",
    "fp32": "fp32",
    "bf16": "bfloat16",
    "fp16": "fp16",
    "fp8": "fp8",
    "mxfp8": "fp8",
    "nvfp4": "nvfp4",
}
"""Names of the rules by dtype. They have none for MXFP8, whose elements are fp8."""


def lowest_precisions(config: TrainerConfig) -> dict[str, str]:
    """Return the lowest precisions of linear layers, attention and collectives, by key.

    Attention of fp8 and fp4 models is in bf16. Gradients of the weights are reduced in fp32 or
    above, while sharded weights and activations travel in the dtype of attention.
    """
    training, layout = config.training, config.layout
    linear = PRECISIONS[training.dtype]
    # `medium` allows bf16, but torch computes as with `high` if it has no such kernel, as on GPUs.
    if linear == "fp32" and config.device == "cuda" and training.matmul_precision != "highest":
        linear = "tf32"
    inside = "bfloat16" if training.dtype in NARROW else linear
    travels = config.world_size > config.dp or layout.ep > 1 or layout.zero_stage >= 2
    narrowest_sent = "fp64" if training.dtype == "fp64" else "fp32"
    if travels and training.dtype not in ("fp64", "fp32"):
        narrowest_sent = inside
    names = {"linear": linear, "attn": inside, "comm": narrowest_sent}
    return {f"lowest_numerical_precision_in_{where}": name for where, name in names.items()}


def schedule(plan: LrScheduleConfig, lr: float, steps: int, batch: int) -> dict[str, Any]:
    """Return the learning rate schedule in steps; schedules in samples are rounded up."""
    per_step = batch if plan.unit == "samples" else 1
    warmup = -(-plan.warmup // per_step)
    end = steps if plan.decay is None else -(-plan.decay // per_step)
    return {
        "opt_end_learning_rate": lr if plan.kind == "constant" else plan.min_lr,
        "opt_learning_rate_warmup_steps": warmup,
        "opt_learning_rate_decay_steps": end - warmup,
        "opt_learning_rate_decay_schedule": f"{plan.kind} with linear warmup",
        "opt_learning_rate_training_steps": end,
    }
