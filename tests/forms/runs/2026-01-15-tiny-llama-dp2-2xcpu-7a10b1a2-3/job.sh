#!/usr/bin/env bash
# tiny-llama on this machine
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
export OMP_NUM_THREADS=1
export PYTHONUNBUFFERED=1
exec /usr/bin/python3 -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nnodes=1 --nproc-per-node=2 --max-restarts=0 native/main.py trainer.json
