"""Stands in for NeMo's training program: keeps its arguments, and prints NeMo 1's progress bar."""

import json
import os
import pathlib
import sys
import time

settings = dict(word.lstrip("+").split("=", 1) for word in sys.argv[1:] if "=" in word)
rank, batch = int(os.environ["SLURM_PROCID"]), int(settings["model.global_batch_size"])
seen = {"argv": sys.argv, "env": dict(os.environ), "cwd": str(pathlib.Path.cwd())}
pathlib.Path(os.environ["RESULT_DIR"], f"seen-{rank}.json").write_text(json.dumps(seen))
if os.environ.get("HANGS") and rank:
    time.sleep(600)
steps = int(settings["trainer.max_steps"])
for step in range(steps if rank == 0 else 0):
    percent, seconds = 100 * (step + 1) // steps, 5 + step % 3 / 100
    fields = {
        "reduced_train_loss": f"{9 - step / 10:.3f}",
        "global_step": f"{step:.2f}",
        "consumed_samples": f"{batch * (step + 1):.1f}",
        "train_step_timing in s": f"{seconds:.2f}",
    }
    figures = ", ".join(f"{name}={value}" for name, value in fields.items())
    bar = f"\rEpoch 0: : {percent}%|█████| {step + 1}/{steps} [{step:02d}:00<00:00, {figures}]"
    print(bar, end="", flush=True)
    if os.environ.get("HANGS") and step == 19:
        time.sleep(600)
if rank == 0:
    print(f"\n`Trainer.fit` stopped: `max_steps={steps}` reached.")
