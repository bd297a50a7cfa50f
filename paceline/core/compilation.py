"""Whether the native trainer's steps win more by compiled blocks than compiling them takes."""

from __future__ import annotations

from paceline.core.layout import Layout
from paceline.core.shape import Shape

PAYS_FROM_STEPS = 1000
"""Steps from which compiling pays where nothing of an earlier run lies in Inductor's cache.

It takes 20 to 60 s on two cores, as on a GPU's host, and wins 0.04 to 0.1 s a step where a step is
half a second (docs/speed.md).
"""


def pays_off(model: Shape, layout: Layout, steps: int) -> bool:
    """Whether `training.compile: auto` compiles the blocks of a run of so many steps.

    Measured in tokens/s, compiled over not (docs/speed.md): gated decoders 1.06 to 1.13, with
    adapters 1.17, Flux 1.2 to 1.4; GPT 1.01 to 1.04, and OPT 0.83 to 0.90, which stay as they are.
    """
    gains = model.kind == "mmdit" or model.gated_ffn
    return gains and steps >= PAYS_FROM_STEPS and layout.schedule != "zero-bubble"
