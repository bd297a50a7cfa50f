"""A plain training loop over transformers' LlamaForCausalLM: a peer of the native trainer."""

from __future__ import annotations

import sys
from pathlib import Path

from _plain_loop import main

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.trainer import peers

if __name__ == "__main__":
    main(peers.build, lambda model, ids: model(input_ids=ids, labels=ids).loss)
