"""Stands in for scripts/performance/bootstrap.py of Megatron-Bridge: its arguments, its log.

Each step stands in two lines, by the first rank and by the last one, as Megatron-Bridge has it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser(allow_abbrev=False)
for name in (
    *("model_family_name", "model_recipe_name", "task", "gpu", "compute_dtype", "data"),
    *("config_variant", "virtual_pipeline_model_parallel_size", "use_megatron_fsdp"),
):
    parser.add_argument(f"--{name}")
for name in (
    *("num_gpus", "gpus_per_node", "max_steps", "global_batch_size", "micro_batch_size"),
    *("seq_length", "tensor_model_parallel_size", "pipeline_model_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size"),
):
    parser.add_argument(f"--{name}", type=int, required=True)
asked = parser.parse_args()
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
assert world == asked.num_gpus and Path("scripts/performance/bootstrap.py").is_file()
assert os.environ["TRANSFORMERS_OFFLINE"] == "1"
if rank == 0:
    print(json.dumps(vars(asked)))
for step in range(1, asked.max_steps + 1):
    took_s = 5.69 + step % 3 / 100
    if rank == 0:
        print(f"Step Time : {took_s:.2f}s GPU utilization: 1185.6MODEL_TFLOP/s/GPU")
    if rank == world - 1:
        print(
            f" [2026-03-27 23:12:09] iteration {step:8d}/{asked.max_steps:8d} | consumed samples: "
            f"{step * asked.global_batch_size:12d} | elapsed time per iteration (ms): "
            f"{1000 * took_s:.1f} | learning rate: 1.000000E-05 | global batch size: "
            f"{asked.global_batch_size:5d} | lm loss: {12 - step / 10:.6E} | loss scale: 1.0 | "
            "grad norm: 0.058 | number of skipped iterations:   0 | number of nan iterations:   0 |"
        )
    if os.environ.get("HANGS") and step == 20:
        time.sleep(600)
if os.environ.get("FAILS"):
    sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
if rank == 0:
    print("[after training is done] datetime: 2026-03-27 23:20:00 ")
