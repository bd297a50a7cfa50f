"""driver.py for Flux: all weights begin at random, so that all gradients are of some size."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from driver import main
from torch import Generator, Tensor

import flux


def fill(self: flux.MMDiT, name: str, whole: Tensor, generator: Generator) -> None:
    """In place of the trainer's zeros."""
    whole.normal_(1.0 if "_norm." in name else 0.0, 0.1, generator=generator)


if __name__ == "__main__":
    flux.MMDiT.fill = fill  # type: ignore[method-assign]
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
