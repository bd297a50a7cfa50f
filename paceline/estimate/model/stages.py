"""How many layers the ranks of a pipeline have, as arrays over many cases."""

from __future__ import annotations

import numpy as np

from paceline.estimate.model.case import Cases, Floats


def stage_layers(x: Cases) -> tuple[Floats, Floats]:
    """Layers of the fullest rank but the last, and of the last one, which has the head.

    Chunks have equally many layers where they divide them; else as if embedding and head were
    layers of the first and of the last chunk, where these divide; else the first chunks have one
    more (core/pipeline.py: stage_sizes).
    """
    chunks = np.maximum(x.pp * x.vp, 1.0)
    each, rest = np.divmod(x.layers, chunks)
    most = each * x.vp + np.ceil(rest / np.maximum(x.pp, 1))
    last = each * x.vp + np.floor(rest / np.maximum(x.pp, 1))
    ends = (rest > 0) & ((x.layers + 2) % chunks == 0) & (x.pp > 1)
    whole = (x.layers + 2) / chunks * x.vp
    most = np.where(ends, whole - (x.pp <= 2), most)
    return most, np.where(ends, whole - 1, last)
