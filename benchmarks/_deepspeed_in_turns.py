"""transformers' model under DeepSpeed with ZeRO 0, waiting for its turn: FILE BLOCK."""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from _peer_in_turns import build
from _plain_loop import fused_adamw
from _turns import BlockTimer, own_output

from paceline.trainer.measure.machine import keep_freed_memory


def main(path: str, block: int) -> None:
    """Train until nobody wants another block; bf16 is torch's autocast, as in the plain loops."""
    turn = BlockTimer(block, own_output())
    import deepspeed  # prints already while it is imported

    # Its own exchange for CPUs is compiled for minutes, and one process exchanges nothing.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    content = json.loads(Path(path).read_text())
    training = content["training"]
    keep_freed_memory()
    turn.step()
    torch.set_num_threads(content["threads"])
    torch.set_float32_matmul_precision(training["matmul_precision"])
    torch.manual_seed(training["seed"])
    model = build(content)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    bf16 = training["dtype"] == "bf16"
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=fused_adamw(trainable, training),
        config={
            "train_micro_batch_size_per_gpu": training["global_batch"],
            "zero_optimization": {"stage": 0},
            "gradient_clipping": training["grad_clip"],
            "steps_per_print": 10**9,
            "torch_autocast": {"enabled": bf16, "dtype": "bfloat16"},
        },
    )
    gc.collect()
    gc.disable()
    shape = (training["global_batch"], training["seq_len"])
    while True:
        ids = torch.randint(0, content["model"]["vocab_size"], shape)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        loss.item()
        turn.step()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
