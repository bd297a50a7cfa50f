"""Fake pretrain_gpt.py of Megatron-DeepSpeed: checks how it is started and prints its log.

By its log, a step takes 100 ms per micro-batch and 10% more per stage; nothing sleeps.
Micro-batches of 16 run out of memory on the first rank.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import datetime
from pathlib import Path

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"
OPTIONS: dict[str, list[str]] = {}


def main() -> int:
    for word in sys.argv[1:]:
        if word.startswith("--"):
            OPTIONS[word] = []
        else:
            OPTIONS[list(OPTIONS)[-1]].append(word)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    tp, pp = number("--tensor-model-parallel-size"), number("--pipeline-model-parallel-size")
    batch, micro_batch = number("--global-batch-size"), number("--micro-batch-size")
    config = json.loads(Path(OPTIONS["--deepspeed_config"][0]).read_text())
    assert config["train_micro_batch_size_per_gpu"] == micro_batch, config
    assert Path(OPTIONS["--data-path"][0] + ".bin").is_file() and Path("pretrain_gpt.py").is_file()
    dp = world // (tp * pp)
    if rank == 0:
        say_settings(world, dp, tp, pp, batch, micro_batch)
    if micro_batch == 16:
        if rank > 0:
            time.sleep(600)  # in a collective operation, until the launcher ends it
        print(OOM, file=sys.stderr)
        return 1
    seconds = 0.1 * batch / (micro_batch * dp) * (0.9 + 0.1 * pp)
    if rank == world - 1:
        say_steps(batch, seconds)
    if rank < tp * pp or dp == 1:
        most = 9000 / pp + 1000 * micro_batch
        memory = f"allocated: 1.0 | max allocated: {most - 500} | reserved: 1.0"
        print(f"[Rank {rank}] (after 1 iterations) memory (MB) | {memory} | max reserved: {most}")
    if rank == 0:
        print(f"[after training is done] datetime: {datetime.now():%Y-%m-%d %H:%M:%S} ")
    return 0


def number(name: str) -> int:
    return int(OPTIONS[name][0])


def say_settings(world: int, dp: int, tp: int, pp: int, batch: int, micro_batch: int) -> None:
    print(
        f"using world size: {world}, data-parallel-size: {dp}, tensor-model-parallel size: {tp}, "
        f"pipeline-model-parallel size: {pp} "
    )
    print("------------------------ arguments ------------------------")
    for name, value in (("global_batch_size", batch), ("micro_batch_size", micro_batch)):
        print(f"  {name} {'.' * (48 - len(name))} {value}")
    print("-------------------- end of arguments ---------------------")


def say_steps(batch: int, seconds: float) -> None:
    seq_len, steps = number("--seq-length"), number("--train-samples") // batch
    for step in range(1, steps + 1):
        took = seconds * (1 + step % 3 / 1000)
        print(
            f" iteration {step:8d}/{steps:8d} | consumed samples: {step * batch:12d} | consumed "
            f"tokens: {step * batch * seq_len:12d} | elapsed time per iteration (s): {took:.4f} | "
            f"learning rate: 1.000E-04 | global batch size: {batch:5d} | lm loss: "
            f"{10 - step / 10:.6E} | loss scale: 4096.0 | grad norm: 1.234 | num zeros: 0.0 | "
            f"number of skipped iterations:   0 | number of nan iterations:   0 | samples per "
            f"second: {batch / took:.3f} | TFLOPs: 1.00 |"
        )


if __name__ == "__main__":
    sys.exit(main())
