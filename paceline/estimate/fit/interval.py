"""How far a predicted step time may be off: an 80 % interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.estimate.fit.posterior import Fit, predict_each
from paceline.estimate.model.case import Cases, Floats
from paceline.estimate.model.coefficients import NAMES, coefficient_values

Z80 = 1.2816
"""Standard deviations on either side that hold 80 % of a normal distribution."""
NUDGE = 0.02
"""Of a coefficient's logarithm to either side, to take the slope of a prediction."""
FAR = 16_384
"""Devices up to which published step times reach; each doubling beyond widens the interval."""
PER_DOUBLING = 0.03
UNSEEN = {"adapters": 0.08, "experts": 0.12, "images": 0.15}
"""More for kinds of models. Seventeen published rows of adapters, which are not fitted, are missed
by 7 %, those with experts, where their source or device is left out, by 12 %: dispatchers and
balance are rarely stated."""
CAPTURED = 0.06
"""More for steps without experts that are one CUDA graph: no fitted row is of one. With it 13 of 17
such steps of MLPerf 6.0 lie in the interval."""
STACK_SOURCES = 4
"""Sources that all stacks together count for beside those of one: few tell little of its width."""
ASSUMED_LINK = 0.5
"""Deviation of the logarithm of a link's rate that is only the usual one of its generation."""
ASSUMED_DEVICE = 0.08
"""More for a device of which only the family is stated."""


@dataclass(frozen=True)
class Levels:
    """How far whole stacks and whole devices lie from what the formulas say of them.

    Deviations of the logarithm of the step time, of a stack and a device that no row was of; what
    was looked at has none.
    """

    software_sd: float = 0.0
    device_sd: float = 0.0
    software: tuple[str, ...] = ()
    """Names of `fit/origin.py` of which there were rows."""
    devices: tuple[str, ...] = ()
    """Families of the catalog of which there were rows."""

    def variance(self, x: Cases) -> Floats:
        """What is not known of each case's stack and device."""
        return self._software_variance(x) + self._device_variance(x)

    def variance_between(self, first: Cases, second: Cases) -> Floats:
        """What is not known of how cases differ: a stack or a device that both have cancels."""
        stacks, devices = (
            first.categories[word] != second.categories[word] for word in ("software", "family")
        )
        of_stacks = self._software_variance(first) + self._software_variance(second)
        return stacks * of_stacks + devices * (
            self._device_variance(first) + self._device_variance(second)
        )

    def _software_variance(self, x: Cases) -> Floats:
        return np.where(np.isin(x.categories["software"], self.software), 0.0, self.software_sd**2)

    def _device_variance(self, x: Cases) -> Floats:
        return np.where(np.isin(x.categories["family"], self.devices), 0.0, self.device_sd**2)


ALL_SEEN = Levels()
"""Of evidence that is of one machine."""


def between_sd(missed: Floats, groups: Sequence[str], known: Floats, least_rows: int = 5) -> float:
    """How far groups lie from fits that never saw them, beyond what these fits leave open.

    The root of the mean of the groups' squared mean errors. `missed` are logarithms of predicted
    over measured by fits without a row's own group. Taken off are `known`, the variance that an
    interval has by the coefficients' covariance already, and what chance adds to a group's mean,
    its variance over its rows; groups with few rows do not count. 0 where nothing is left.
    """
    names, squares = np.array(groups), list[float]()
    for name in np.unique(names):
        rows = missed[names == name]
        if len(rows) >= least_rows:
            explained = rows.var() / len(rows) + known[names == name].mean()
            squares.append(float(rows.mean() ** 2 - explained))
    return float(np.sqrt(max(0.0, np.mean(squares)))) if squares else 0.0


def residual_sd(
    x: Cases, missed: Floats, known: Floats, sources: Sequence[str]
) -> dict[str, float]:
    """What the formulas miss, by stack, beyond what fits leave open.

    So wide that with `known`, the variance that an interval has by the coefficients' covariance
    already, four in five of the rows lie within 1.28 deviations. `missed` are logarithms of
    predicted over measured by fits without a row's own source. A stack of n sources counts with n,
    all rows together with STACK_SOURCES, which is all that is known of a stack without rows. Rows
    with experts, which have a width of their own, do not count where there are others.
    """
    dense, names = x.experts <= 1, np.array(sources)
    if dense.any():
        x, missed, known, names = x.pick(dense), missed[dense], known[dense], names[dense]
    pooled, variances = _beyond(missed, known), dict[str, float]()
    for stack in ("softmax", "fused", "torch"):
        rows = x.is_category("implementation", stack)
        count = len(np.unique(names[rows]))
        own = _beyond(missed[rows], known[rows]) if count else 0.0
        variances[stack] = (count * own + STACK_SOURCES * pooled) / (count + STACK_SOURCES)
    return {stack: float(np.sqrt(variance)) for stack, variance in variances.items()}


def _beyond(missed: Floats, known: Floats) -> float:
    """The variance beside `known` with which 80 % of the rows lie within 1.28 deviations."""
    return max(0.0, float(np.quantile((missed / Z80) ** 2 - known, 0.8)))


def log_sd(x: Cases, fit: Fit, residual: Mapping[str, float], levels: Levels = ALL_SEEN) -> Floats:
    """Standard deviation of the logarithm of the predicted step time.

    The coefficients' covariance C through the slopes s of the prediction's logarithm, s C s (delta
    method), and `own_variance`.
    """
    slope = slopes(x, fit.centre)
    return np.sqrt(open_variance(slope, fit) + own_variance(x, slope, residual, levels))


def open_variance(slope: Floats, fit: Fit) -> Floats:
    """Variance of each logarithm by what a fit leaves open of its coefficients."""
    return np.asarray(np.einsum("ij,jk,ik->i", slope, fit.covariance, slope), dtype=np.float64)


def own_variance(
    x: Cases, slope: Floats, residual: Mapping[str, float], levels: Levels = ALL_SEEN
) -> Floats:
    """Variance of each logarithm that is the case's own, whatever the coefficients are.

    What the formulas miss, how far a stack or device that no row was of may lie from others, the
    distance beyond the largest cluster that was looked at, more for kinds of models that were not,
    and more for links and variants of devices that nobody states.
    `slope` as from `slopes`.
    """
    missed = np.select(
        [x.is_category("implementation", name) for name in residual], list(residual.values())
    )
    far = PER_DOUBLING * np.maximum(0.0, np.log2(np.maximum(x.devices, 1) / FAR))
    unseen = np.select(
        [x.experts > 1, x.causal == 0, x.frozen > 0],
        [UNSEEN["experts"], UNSEEN["images"], UNSEEN["adapters"]],
        0.0,
    )
    links = [
        ASSUMED_LINK * assumed * slope[:, NAMES.index(name)]
        for assumed, name in ((x.assumed_intra, "intra"), (x.assumed_inter, "inter"))
    ]
    variant = ASSUMED_DEVICE * x.assumed_device
    captured = np.where(x.is_category("cuda_graphs", "iteration") & (x.experts <= 1), CAPTURED, 0.0)
    deviations = [missed, far, unseen, variant, captured, *links]
    return np.sum([deviation**2 for deviation in deviations], axis=0) + levels.variance(x)


def slopes(x: Cases, centre: Floats, among: Sequence[int] | None = None) -> Floats:
    """(cases, coefficients): how the logarithm of a prediction follows that of each coefficient.

    `among` are the columns that are not known to be 0, all without it.
    """
    columns = np.arange(len(centre)) if among is None else np.array(among, dtype=int)
    nudges = NUDGE * np.eye(len(centre))[columns]
    up, down = np.split(predict_each(x, np.concatenate([centre + nudges, centre - nudges])), 2)
    slope = np.zeros((x.size, len(centre)))
    slope[:, columns] = np.log(up / down).T / (2 * NUDGE)
    return slope


def bounds(seconds: Floats, sd: Floats) -> tuple[Floats, Floats]:
    """The ends of the 80 % interval of a log-normal prediction."""
    return seconds * np.exp(-Z80 * sd), seconds * np.exp(Z80 * sd)


def undetermined(fit: Fit, widths: Floats) -> list[str]:
    """Coefficients that the data left where their prior was: not even a tenth narrower."""
    sd = np.sqrt(np.diag(fit.covariance))
    names = list(coefficient_values(fit.centre))
    return [name for name, now, before in zip(names, sd, widths, strict=True) if now > 0.9 * before]
