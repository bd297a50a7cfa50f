#!/usr/bin/env bash
set -uo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
read -r nodes cpus list < <(squeue -h -j 4711 -o '%D %C %N')
hosts=(a-2 a-1)
read -r _ _ _ address _ < <(
  srun --jobid=4711 --overlap --nodes=1 --ntasks=1 --nodelist="${hosts[0]}" --export=ALL \
    ip -4 -o addr show dev ib0)
address="${address%%/*}"
if [ -z "$address" ]; then echo "error: ${hosts[0]} has no address on "ib0 >&2; exit 1; fi
port=26708
exec srun --jobid=4711 --exact --cpus-per-task=$((cpus / nodes)) --nodes=2 --ntasks=2 --ntasks-per-node=1 --export=ALL --kill-on-bad-exit=1 --cpu-bind=none --gres=gpu:8 --nodelist="$(IFS=,; echo "${hosts[*]}")" --distribution=arbitrary \
  bash -c 'exec bash node.sh "$SLURM_PROCID" "$@" >>"logs/host-$SLURMD_NODENAME.log" 2>&1' node "$address" "$port" >>logs/launcher.log 2>&1
