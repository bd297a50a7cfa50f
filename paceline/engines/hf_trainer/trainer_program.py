# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Program that trains a transformers model with its Trainer, once per device with env:// set.

Run `trainer_program.py SETTINGS.json` in a folder that also has `token_windows_program.py`. It
prints the Trainer's own lines, and for each step its `trainer_state.json` entry with the seconds
since the start of training.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from token_windows_program import TokenWindows
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import logging

GIB = 2**30


def main(path: str) -> None:
    """Train with the settings in file `path`."""
    if os.environ.get("WORLD_SIZE") == "1":
        run_as_single_process()
    settings = json.loads(Path(path).read_text(encoding="utf-8"))
    torch.set_float32_matmul_precision(settings["matmul_precision"])
    if os.environ.get("RANK", "0") == "0":
        logging.set_verbosity_info()
    logging.disable_progress_bar()
    arguments = TrainingArguments(**settings["arguments"])
    model = add_adapters(build(settings), settings["lora"])
    check_size(model, settings["expected_parameters"])
    if settings["compile_blocks"]:
        for block in blocks_of(model):
            block.compile()
    trainer = PlannedTrainer(
        model=model,
        args=arguments,
        train_dataset=TokenWindows(
            settings["data"],
            settings["seq_len"],
            settings["model"]["vocab_size"],
            settings["samples"],
            settings["seed"],
        ),
        data_collator=collate,
        rates=rate_factors(settings["learning_rate"]),
    )
    if arguments.fsdp and not trainer.is_fsdp_enabled:
        raise SystemExit("fsdp: accelerate does not shard here and would train replicas instead")
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(StepEntries())
    trainer.train()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    # After all work is done, Gloo's threads keep some interpreters from exiting (observed: 1 of 6).
    os._exit(0)


def run_as_single_process() -> None:
    """Keep a single process from wrapping its model for several, or using every visible GPU."""
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)


class PlannedTrainer(Trainer):
    """Trainer whose learning rate factor follows `rates`: fraction of the peak by step, from 0."""

    def __init__(self, *, rates: Callable[[int], float], **settings: Any) -> None:
        self._rates = rates
        super().__init__(**settings)

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Create the schedule from the settings instead of one of transformers'."""
        target = optimizer or self.optimizer
        assert isinstance(target, torch.optim.Optimizer), "the Trainer makes its optimizer first"
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(target, self._rates)
        return self.lr_scheduler


class StepEntries(TrainerCallback):
    """Callback that prints each entry of the Trainer's history with full precision and run time."""

    def __init__(self) -> None:
        self._began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Print a step's entry, after the Trainer has read its loss from the device."""
        entry = dict(state.log_history[-1])
        # The log reader would prefer the entry of the whole run, which includes the slow first
        # steps.
        if not state.is_world_process_zero or "loss" not in entry:
            return
        entry["train_runtime"] = round(time.perf_counter() - self._began, 4)
        if torch.cuda.is_available():
            allocated = torch.cuda.max_memory_allocated() / GIB
            entry["memory/max_allocated (GiB)"] = round(allocated, 2)
        print(entry, flush=True)


def build(settings: Mapping[str, Any]) -> PreTrainedModel:
    """Return a float32 model for a transformers configuration, with weights from the seed."""
    torch.manual_seed(settings["seed"])
    configuration = AutoConfig.for_model(**settings["model"])
    return AutoModelForCausalLM.from_config(
        configuration, attn_implementation=settings["attention"]
    ).float()


def add_adapters(model: PreTrainedModel, lora: Mapping[str, Any] | None) -> nn.Module:
    """Return the model, with peft's adapters if the settings have any."""
    if lora is None:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(**lora, task_type="CAUSAL_LM"))


def check_size(model: nn.Module, expected: int) -> None:
    """Raise SystemExit if the model's number of parameters differs from its recipe."""
    count = sum(parameter.numel() for parameter in model.parameters())
    if count != expected:
        raise SystemExit(f"model: has {count:,} parameters, but the recipe has {expected:,}")


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """Return the transformer blocks: the longest module list."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len)


def collate(windows: list[Tensor]) -> dict[str, Tensor]:
    """Stack windows to inputs and labels (batch, length); the model shifts labels by one token."""
    ids = torch.stack(windows)
    return {"input_ids": ids, "labels": ids}


def rate_factors(plan: Mapping[str, Any]) -> Callable[[int], float]:
    """Return the learning rate schedule as a function of the step, relative to the peak.

    (n + 1) / warmup while n < warmup, then m + (1 - m) f((n - warmup) / (decay - warmup)), with
    f(x) = 1 - x for linear and (1 + cos(pi x)) / 2 for cosine. n is the step, counted from 0, and m
    is the minimum.
    """
    kind, warmup, decay, minimum = plan["kind"], plan["warmup"], plan["decay"], plan["lowest"]

    def factor(step: int) -> float:
        if step < warmup:
            return min(1.0, (step + 1) / warmup)
        if kind == "constant":
            return 1.0
        progress = min(1.0, (step - warmup) / max(1.0, decay - warmup))
        remaining = 1 - progress if kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return minimum + (1 - minimum) * remaining

    return factor


if __name__ == "__main__":
    main(sys.argv[1])
