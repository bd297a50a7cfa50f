#!/usr/bin/env bash
#SBATCH --job-name=tiny-opt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --mem=0
#SBATCH --nodelist=node-004,node-002
#SBATCH --partition=gpu
#SBATCH --account=bench
#SBATCH --qos=high
#SBATCH --reservation=mlperf
#SBATCH --constraint=[rack1|rack2]
#SBATCH --gres=gpu:h100:8,nic:1
#SBATCH --exclude=node-007,node-[011-012]
#SBATCH --segment=2
#SBATCH --time=2
#SBATCH --export=ALL
#SBATCH --output=slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --exclusive
#SBATCH --requeue
set -uo pipefail
restart=${SLURM_RESTART_COUNT:-0}
id=$SLURM_JOB_ID
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then id=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi
if [ "$restart" -gt 1 ]; then
  echo "restarted $restart times; cluster.slurm.retries is 1" >&2
  exit 1
fi
earlier=attempts/$id.$((restart - 1))
if [ "$restart" -gt 0 ] && mkdir -p attempts && mkdir "$earlier" 2>/dev/null; then
  mv logs steps "$earlier"
  for name in mlperf telemetry; do if [ -d "$name" ]; then mv "$name" "$earlier"; fi; done
fi
mkdir -p logs steps
hosts=(node-004 node-002)
echo "start $id $restart $SLURM_JOB_NODELIST" >>slurm.status
read -r _ _ _ address _ < <(
  srun --overlap --nodes=1 --ntasks=1 --nodelist="${hosts[0]}" --export=ALL \
    ip -4 -o addr show dev ib0)
address="${address%%/*}"
if [ -z "$address" ]; then echo "error: ${hosts[0]} has no address on "ib0 >&2; exit 1; fi
port=$((20000 + (29212 + SLURM_JOB_ID + restart) % 10000))
srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --export=ALL --kill-on-bad-exit=1 --cpu-bind=none --nodelist="$(IFS=,; echo "${hosts[*]}")" --distribution=arbitrary --container-image='nvcr.io#nvidia/pytorch:24.10' --container-mounts="$PWD:$PWD",/data:/data:ro',/it'"'"'s here:/x' --container-workdir="$PWD" \
  bash -c 'exec bash node.sh "$SLURM_PROCID" "$@" >>"logs/host-$SLURMD_NODENAME.log" 2>&1' node "$address" "$port" >>logs/launcher.log 2>&1
code=$?
echo "end $id $restart $code" >>slurm.status
exit "$code"
