"""What is known of coefficients on a CPU before it is calibrated.

Published steps are of GPUs, whose starts, hosts and overlaps say nothing about processes that
compute, exchange and wait on the same cores.
"""

from __future__ import annotations

import numpy as np

from paceline.core.hardware import Dtype
from paceline.estimate.fit.evidence import Evidence, evidence_of_fit
from paceline.estimate.fit.posterior import Fit
from paceline.estimate.model.block import STACKS
from paceline.estimate.model.coefficients import CENTRE, NAMES, WIDTH

ON_CPU: dict[str, tuple[float, float]] = {
    # Rates are relative to a large product and a large copy on as many cores.
    "gemm_cpu": (0.9, 0.3),
    "gemm_torch": (1.0, 0.05),
    "gemm_odd": (0.9, 0.2),
    "gemm_start_s": (2e-7, 1.0),  # 10 us at 100 GFLOP/s, by the formula's root of the peak
    "memory": (1.0, 0.1),
    "flash": (0.25, 0.5),
    "elementwise": (1.0, 0.6),
    "elementwise_eager": (1.0, 0.05),
    "logits": (1.0, 0.5),
    "optimizer": (1.5, 0.5),
    "host_torch_s": (1e-3, 0.8),
    "host_tp": (0.3, 0.5),
    "host_microbatch_s": (1e-3, 0.8),
    "step_torch_s": (5e-3, 0.8),
    # Processes on one machine, through the loopback device.
    "intra": (0.7, 0.4),
    "intra_start_s": (2e-4, 0.8),
    "inter": (0.7, 0.4),
    # A training's exchanges wait until all sides are awake, unlike a loop of nothing else.
    "inter_start_s": (8e-4, 0.8),
    # Who exchanges does not compute meanwhile: nothing is hidden.
    "tp_exposed": (1.0, 0.3),
    "cp_exposed": (1.0, 0.5),
    "pp_exposed_fused": (1.0, 0.4),
    "dp_exposed": (1.3, 0.3),
    "zero3_exposed": (1.0, 0.2),
    "host_sharded_s": (2e-4, 0.8),
}
"""Median and standard deviation of the logarithm."""
BY_BYTES = ("elementwise", "tp_exposed", "cp_exposed", "pp_exposed_fused")
"""Twice as much in fp32: the formulas count two bytes a number."""
MISSED = 0.2
"""What the formulas may miss of a step on a CPU."""
TITLE = "public prior: CPUs in general"


def cpu_prior(dtype: Dtype) -> Evidence:
    """Coefficients for a CPU of which nothing but rates is known."""
    centre, width = CENTRE.copy(), WIDTH.copy()
    for name, (median, sd) in ON_CPU.items():
        at = NAMES.index(name)
        twice = 2.0 if dtype == "fp32" and name in BY_BYTES else 1.0
        centre[at], width[at] = np.log(twice * median), sd
    residual: dict[str, float] = dict.fromkeys(STACKS, MISSED)
    return evidence_of_fit(TITLE, Fit(centre, np.diag(width**2)), residual, 0, 0)
