"""Fake of NVIDIA's llmb-run: its arguments, folders, logs and output.

The job that it submits runs the fake Megatron-Bridge, with the arguments that the recipe's
launch.sh would give.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

LAYOUT = {
    "tensor_model_parallel_size": "TP",
    "pipeline_model_parallel_size": "PP",
    "context_parallel_size": "CP",
    "virtual_pipeline_model_parallel_size": "VP",
    "micro_batch_size": "MBS",
    "global_batch_size": "GBS",
    "max_steps": "MAX_STEPS",
}
JOB = """\
#!/bin/bash
#SBATCH --output={folder}/sbatch_{name}_%j.out
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={tasks}
export TRANSFORMERS_OFFLINE=1
srun --output {folder}/log-me.{name}_%j_0.out --mpi=none --kill-on-bad-exit=1 --wait=60 \\
  bash -c 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS exec {python} -u \\
    scripts/performance/bootstrap.py {arguments}'
"""

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("verb", choices=["submit"])
parser.add_argument("-w", "--workload", required=True)
parser.add_argument("-s", "--model-size", required=True)
parser.add_argument("-d", "--dtype", required=True)
parser.add_argument("--scale", type=int, required=True)
parser.add_argument("-p", "--profile", action="store_true")
parser.add_argument("--force", action="store_true")
for word in ("nodelist", "exclude", "reservation", "segment"):
    parser.add_argument(f"--{word}")
for word in ("slurm-arg", "env", "mbridge-arg"):
    parser.add_argument(f"--{word}", action="append", default=[])
asked = parser.parse_args()
if "SLURM_JOB_ID" in os.environ or not Path("cluster_config.yaml").is_file():
    sys.exit("ERROR: Configuration error")
if asked.scale == 1:
    print("ERROR: No matching job configurations found.")
    sys.exit(1)
print(f"Jobs (1):\n  - {asked.workload}_{asked.model_size:<30} dtype={asked.dtype}")

tasks = 4  # of GB200 and GB300
name = f"pretrain_llama3_{asked.model_size}_{asked.dtype}_gpus{asked.scale}"
folder = Path.cwd() / "workloads" / asked.workload / "experiments" / name / f"{name}_1" / name
program = folder / "scripts" / "performance" / "bootstrap.py"
program.parent.mkdir(parents=True)
shutil.copy(Path(__file__).with_name("fake_bridge.py"), program)
seen = {"argv": sys.argv[1:], "env": dict(os.environ)}
(folder / "seen.json").write_text(json.dumps(seen))
recipe = {
    "model_family_name": "llama",
    "model_recipe_name": f"llama3_{asked.model_size}",
    "num_gpus": str(asked.scale),
    "gpus_per_node": str(tasks),
    "expert_model_parallel_size": "1",
    **{argument: os.environ[variable] for argument, variable in LAYOUT.items()},
}
words = [f"--{argument} {value}" for argument, value in recipe.items()]
script = JOB.format(
    folder=folder,
    name=name,
    nodes=asked.scale // tasks,
    tasks=tasks,
    python=sys.executable,
    arguments=" ".join([*words, *asked.mbridge_arg]),
)
(folder / "job.sh").write_text(script)
options = [f"--{word}" for word in asked.slurm_arg]
done = subprocess.run(
    ["sbatch", "--parsable", *options, "job.sh"], cwd=folder, capture_output=True, text=True
)
if done.returncode:
    print(f"\nLaunch Error:\n{done.stderr}")
    sys.exit(2)
number = done.stdout.partition(";")[0].strip()
print(f"\nLaunch Output:\nTask 0: {name}\n- Job id: {number}\n- Local Directory: {folder}\n")
print(f"LAUNCHED: {asked.workload}_{asked.model_size} scale={asked.scale} jobid={number}")
print(f"JobID: {number}, Workdir: {folder}")
