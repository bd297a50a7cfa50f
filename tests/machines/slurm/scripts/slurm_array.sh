#!/usr/bin/env bash
#SBATCH --job-name=a
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --mem=0
#SBATCH --gres=gpu:8
#SBATCH --export=ALL
#SBATCH --output=slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --exclusive
#SBATCH --no-requeue
#SBATCH --array=0-2%2
set -euo pipefail
folders=(
  '/runs/a b'
  '/runs/$(touch x)
#SBATCH -N9'
  /runs/c
)
cd -- "${folders[$SLURM_ARRAY_TASK_ID]}"
exec >>"slurm-$SLURM_JOB_ID.log" 2>&1
exec bash job.sh
