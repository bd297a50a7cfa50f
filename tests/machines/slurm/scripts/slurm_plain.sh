#!/usr/bin/env bash
#SBATCH --job-name=tiny-opt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --mem=0
#SBATCH --gres=gpu:8
#SBATCH --export=ALL
#SBATCH --output=slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --exclusive
#SBATCH --no-requeue
set -uo pipefail
restart=${SLURM_RESTART_COUNT:-0}
id=$SLURM_JOB_ID
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then id=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi
earlier=attempts/$id.$((restart - 1))
if [ "$restart" -gt 0 ] && mkdir -p attempts && mkdir "$earlier" 2>/dev/null; then
  mv logs steps "$earlier"
  for name in mlperf telemetry; do if [ -d "$name" ]; then mv "$name" "$earlier"; fi; done
fi
mkdir -p logs steps
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
echo "start $id $restart $SLURM_JOB_NODELIST" >>slurm.status
address="${hosts[0]}"
export PACELINE_PEER="${hosts[1]:-}"
port=$((20000 + (29212 + SLURM_JOB_ID + restart) % 10000))
srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --export=ALL --kill-on-bad-exit=1 --cpu-bind=none --nodelist="$(IFS=,; echo "${hosts[*]}")" \
  bash -c 'exec bash node.sh "$SLURM_PROCID" "$@" >>"logs/host-$SLURMD_NODENAME.log" 2>&1' node "$address" "$port" >>logs/launcher.log 2>&1
code=$?
echo "end $id $restart $code" >>slurm.status
exit "$code"
