#!/usr/bin/env bash
set -uo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
read -r nodes cpus list < <(squeue -h -j 4711 -o '%D %C %N')
mapfile -t -n 2 hosts < <(scontrol show hostnames "$list")
address="${hosts[0]}"
export PACELINE_PEER="${hosts[1]:-}"
port=29212
exec srun --jobid=4711 --exact --cpus-per-task=$((cpus / nodes)) --nodes=2 --ntasks=2 --ntasks-per-node=1 --export=ALL --kill-on-bad-exit=1 --cpu-bind=none --gres=gpu:8 --time=10 --nodelist="$(IFS=,; echo "${hosts[*]}")" \
  bash -c 'exec bash node.sh "$SLURM_PROCID" "$@" >>"logs/host-$SLURMD_NODENAME.log" 2>&1' node "$address" "$port" >>logs/launcher.log 2>&1
