"""tokens/s of the native trainer against a plain loop over transformers, pair by pair.

    python benchmarks/trainer_vs_transformers.py [--pairs 4] [--steps 25]

Both train the same Llama in a process of its own, in turn (A B A B ...), with the same shape,
dtype, batch, threads and matrix-product setting.
"""

from __future__ import annotations

import sys

from _side_by_side import main

if __name__ == "__main__":
    sys.exit(main("trainer_vs_transformers", "transformers", "_plain_transformers.py", __doc__))
