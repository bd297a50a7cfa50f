"""A plain training loop over transformers' LlamaForCausalLM: the peer of the native trainer.

Reads the native trainer's own settings file and prints one JSON line with every step's seconds, so
that shape, dtype, batch, threads, optimizer, fp32 matrix-product setting, allocator setting and
garbage collection are the same.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "paceline" / "native"))

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from machine import keep_freed_memory


def build(model: dict[str, Any]) -> LlamaForCausalLM:
    """The same shape as the native model."""
    config = LlamaConfig(
        vocab_size=model["padded_vocab"],
        hidden_size=model["hidden_size"],
        intermediate_size=model["ffn_size"],
        num_hidden_layers=model["num_layers"],
        num_attention_heads=model["num_heads"],
        num_key_value_heads=model["num_kv_heads"] or model["num_heads"],
        max_position_embeddings=model["max_positions"],
        tie_word_embeddings=model["tied_embeddings"],
        use_cache=False,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def main() -> None:
    """Train for the settings' steps on one process and print the step times."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    training = settings["training"]
    keep_freed_memory()
    torch.set_num_threads(settings["threads"])
    torch.set_float32_matmul_precision(training["matmul_precision"])
    torch.manual_seed(training["seed"])
    model = build(settings["model"])
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=training["lr"], betas=tuple(training["betas"]),
        eps=training["eps"], weight_decay=training["weight_decay"], fused=True,
    )  # fmt: skip
    gc.collect()
    gc.disable()  # as the native trainer does between steps
    bf16 = training["dtype"] == "bf16"
    shape = (training["global_batch"], training["seq_len"])
    times: list[float] = []
    for _ in range(training["steps"]):
        begin = time.perf_counter()
        ids = torch.randint(0, settings["model"]["vocab_size"], shape)
        with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training["grad_clip"])
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        times.append(time.perf_counter() - begin)
    parameters = sum(p.numel() for p in model.parameters())
    print(json.dumps({"step_time_s": times, "num_parameters": parameters}))


if __name__ == "__main__":
    main()
