"""Example of a training script: prints a made-up step time and loss."""

import argparse
import json
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--compile", action="store_true")
parser.add_argument("--skip-layers", action="store_true")
options = parser.parse_args()
name = "compile" if options.compile else "skip" if options.skip_layers else "base"
count = Path(f".runs-{name}")
number = len(count.read_text("utf-8")) if count.exists() else 0
count.write_text("x" * (number + 1), "utf-8")
noise = 1 + 0.002 * (number % 3)
step_time_s = {"base": 1.0, "compile": 0.93, "skip": 0.5}[name] * noise
loss = 3.4 if options.skip_layers else 2.51
print(f"step 100: loss {loss}, step time {step_time_s:.4f} s")
print(json.dumps({"loss": loss, "step_time_s": step_time_s}))
