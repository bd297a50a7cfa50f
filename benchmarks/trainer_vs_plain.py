"""Step time of the native trainer's single process against a plain loop in PyTorch, pair by pair.

    python benchmarks/trainer_vs_plain.py [--pairs 4] [--steps 25]

The plain side is _plain_torch.py: a Llama and a loop as one writes them by hand. Both train in a
process of its own, in turn (A B A B ...), with the same shape, dtype, batch, threads and
matrix-product setting. tokens/s of one batch size, so their ratio is that of the step times.
"""

from __future__ import annotations

import sys

from _side_by_side import main

if __name__ == "__main__":
    sys.exit(main("trainer_vs_plain", "plain PyTorch", "_plain_torch.py", __doc__))
