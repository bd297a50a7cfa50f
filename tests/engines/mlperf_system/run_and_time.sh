#!/usr/bin/env python3
"""Stands in for a submission's trainer: keeps what it was started with, and prints MLPerf's lines."""

import json
import os
import pathlib
import sys
import time

# A script of a submission is handed over in its environment alone.
rank, seed = int(os.environ["SLURM_PROCID"]), int(os.environ["SEED"])
batch = int(os.environ["MINIBS"]) * int(os.environ["SLURM_NTASKS"])
seen = {"argv": sys.argv, "env": dict(os.environ), "cwd": os.getcwd()}
pathlib.Path(os.environ["LOGDIR"], f"seen-{rank}.json").write_text(json.dumps(seen))
if rank:
    sys.exit()
begun_ms = time.time_ns() // 1_000_000


def line(key, value=None, after_s=0.0, **metadata):
    record = {
        "namespace": "",
        "time_ms": begun_ms + round(1000 * after_s),
        "event_type": "POINT_IN_TIME",
        "key": key,
        "value": value,
        "metadata": {"file": "train.py", "lineno": 1, **metadata},
    }
    print(f":::MLLOG {json.dumps(record)}", flush=True)


line("cache_clear", os.environ["CLEAR_CACHES"] == "1")
line("init_start")
for key, value in {
    "submission_benchmark": "llama31_8b",
    "submission_org": "Example",
    "submission_platform": "2xBed",
    "submission_division": "closed",
    "seed": seed,
    "global_batch_size": batch,
    "gradient_accumulation_steps": 8,
    "max_sequence_length": 8192,
}.items():
    line(key, value, 60)
line("init_stop", None, 119)
if os.environ.get("HANGS"):
    time.sleep(600)
time.sleep(float(os.environ.get("LASTS", 0)))
line("run_start", None, 120)
for step in range(1, 41):
    seconds = 0.5 + 0.001 * (step * 7 % 5)
    line("tracked_stats", {"train_step_time": seconds, "train_loss": 12 - step / 8},
         120 + step / 2, step=step, samples_count=step * batch)  # fmt: skip
if os.environ.get("FAILS"):
    sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
samples = 178176 + 12288 * (seed % 3)
line("eval_accuracy", 3.4, 900, samples_count=samples - 12288)
line("eval_accuracy", 3.29, 960 + seed, samples_count=samples)
line("run_stop", None, 960 + seed, status="success", samples_count=samples)
