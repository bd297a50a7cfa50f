"""Whether the native trainer's steps win more by compiled blocks than compiling them takes."""

from __future__ import annotations

from paceline.core.layout import Layout, broken_rules, features
from paceline.core.shape import Shape

PAYS_FROM_STEPS = 1000
"""Steps from which compiling pays where nothing of an earlier run lies in Inductor's cache.

It takes 20 to 60 s on two cores, as on a GPU's host, and wins 0.04 to 0.1 s a step where a step is
half a second (docs/speed.md).
"""


def pays_off(model: Shape, layout: Layout, steps: int, document_mask: bool = False) -> bool:
    """Whether `training.compile: auto` compiles the blocks of a run of so many steps.

    It does where they gain by it and no rule of layouts is in the way.
    Measured in tokens/s, compiled over not (docs/speed.md): gated decoders 1.06 to 1.13, with
    adapters 1.17, Flux 1.2 to 1.4; GPT 1.01 to 1.04, and OPT 0.83 to 0.90, which stay as they are.
    """
    gains = model.kind == "mmdit" or model.gated_ffn
    present = features(
        layout, layout.pp * layout.tp * layout.cp, compiled=True, document_mask=document_mask
    )
    refused = any("compile" in rule.features for rule in broken_rules(present))
    return gains and steps >= PAYS_FROM_STEPS and not refused
