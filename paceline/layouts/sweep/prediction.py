"""What is expected of runs before they begin, and which of them are not worth their time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from paceline.core.errors import UserError
from paceline.core.hardware import Cluster
from paceline.core.run import RunSpec
from paceline.core.units import gib
from paceline.estimate.calibrate.calibration import Calibration, cpu_machine, find
from paceline.estimate.estimate import case_of
from paceline.estimate.fit.evidence import Evidence, shipped
from paceline.estimate.fit.interval import bounds, log_sd
from paceline.estimate.memory.device_memory import MemoryEstimate, memory, p_oom
from paceline.estimate.memory.framework import frameworks_of
from paceline.estimate.model.case import Floats, cases_of
from paceline.estimate.model.coefficients import named
from paceline.estimate.model.machine import Machine, machine
from paceline.estimate.model.step import step_time
from paceline.layouts.sweep.result import Prediction


@dataclass(frozen=True)
class Basis:
    """Coefficients, and the calibration of a processor; or why there are no predictions."""

    evidence: Evidence
    calibration: Calibration | None = None
    unknown: str | None = None

    def machine(self, cluster: Cluster) -> Machine:
        """The device of a run with its links; raises UserError for one in no catalog."""
        if self.calibration:
            return cpu_machine(self.calibration, cluster.world_size)
        return machine(
            cluster.device, cluster.intra_link, cluster.inter_link, cluster.devices_per_node
        )


SURE_OOM = 0.95
"""A combination that runs out of memory with a higher probability is left out."""
HOPELESS = 2.0
"""So is one whose optimistic bound is this many times the fastest one's pessimistic bound."""
LIKELY_OOM = 0.5


def basis(specs: Sequence[RunSpec], evidence: Evidence | None) -> Basis:
    """What predictions of these runs rest on, or why there are none.

    A processor has no data sheet of use, so it needs its calibration; `evidence` None is the
    calibration of the device where there is one, else what comes with Paceline.
    """
    cluster, dtype = specs[0].cluster, specs[0].training.dtype
    label = cluster.device_label or cluster.device
    found = find(label, dtype)
    coefficients = evidence or (found.told() if found else shipped())
    if cluster.device != "cpu":
        return Basis(coefficients)
    if found is None:
        return Basis(coefficients, unknown="no expected times: this processor is not calibrated in "
                     f"{dtype} (`paceline calibrate` measures it)")  # fmt: skip
    if any(spec.training.dtype != dtype for spec in specs):
        return Basis(coefficients, unknown="no expected times: a processor's calibration is of one "
                     "dtype, and these runs have several")  # fmt: skip
    if cluster.nodes > 1:
        return Basis(coefficients, unknown="no expected times: a processor's calibration says nothing "
                     "of the network between hosts")  # fmt: skip
    threads = found.placement(cluster.world_size).threads
    if cluster.threads_per_device not in (None, threads):
        return Basis(coefficients, unknown=f"no expected times: this processor is calibrated with "
                     f"{threads} threads a process, not {cluster.threads_per_device}")  # fmt: skip
    return Basis(coefficients, found)


def predict(specs: Sequence[RunSpec], on: Basis) -> list[Prediction | None]:
    """The expectation of each run; all None where nothing is known of the device."""
    if not specs or on.unknown:
        return [None] * len(specs)
    evidence = on.evidence
    try:
        machines = [on.machine(spec.cluster) for spec in specs]
        # What comes with Paceline computes by PyTorch's modules, the other engines by fused ones.
        cases = [
            case_of(spec, here, "torch" if spec.engine == "native" else "fused",
                    spec.training.compile != "none")
            for spec, here in zip(specs, machines, strict=True)
        ]  # fmt: skip
    except UserError:
        return [None] * len(specs)
    x, fit = cases_of(cases), evidence.fit()
    times = step_time(x, named(fit.centre)).total
    needed = memory(x, frameworks_of(machines[0].generation, native=True))
    low, high = bounds(times, log_sd(x, fit, evidence.residual_sd))
    columns = (times, low, high, needed.device_used, p_oom(needed, limits(specs, machines, needed)))
    return [
        Prediction(step_time_s=time, low_s=a, high_s=b, memory_bytes=used, p_oom=odds)
        for time, a, b, used, odds in zip(*(column.tolist() for column in columns), strict=True)
    ]


def limits(specs: Sequence[RunSpec], machines: Sequence[Machine], needed: MemoryEstimate) -> Floats:
    """Bytes that a device of each run may have in use; a recipe's own limit speaks of what is allocated.

    Processes of one machine share its memory, so runs of more of them have less each.
    """
    sizes = [
        spec.cluster.device_memory_bytes or here.device.memory_bytes or inf
        for spec, here in zip(specs, machines, strict=True)
    ]
    own = np.array([spec.memory_limit_bytes or inf for spec in specs])
    return np.minimum(sizes, own + needed.device_used - needed.allocated)


def hopeless(
    predictions: Sequence[Prediction | None], tokens: Sequence[int], limit_bytes: float | None
) -> list[str | None]:
    """Why each is not worth running, None where it is or nothing was predicted.

    `tokens` are those of a step, so that batches of different sizes can be compared.
    """
    fitting = [
        one.high_s / n
        for one, n in zip(predictions, tokens, strict=True)
        if one is not None and one.p_oom <= LIKELY_OOM
    ]
    fastest = min(fitting, default=None)
    return [
        None if one is None else _why(one, one.low_s / n, fastest, limit_bytes)
        for one, n in zip(predictions, tokens, strict=True)
    ]


def _why(
    one: Prediction, optimistic: float, fastest: float | None, limit_bytes: float | None
) -> str | None:
    """The sentence for one prediction, its optimistic and the fastest one's pessimistic s/token."""
    if one.p_oom > SURE_OOM:
        room = f" of {gib(limit_bytes)}" if limit_bytes else ""
        return f"out of memory with {one.p_oom:.0%}: needs about {gib(one.memory_bytes)}{room}"
    if fastest is not None and optimistic > HOPELESS * fastest:
        return (
            f"at best {optimistic / fastest:.1f} times as slow as the fastest at worst "
            f"({one.step_time_s:.4g} s a step expected)"
        )
    return None
