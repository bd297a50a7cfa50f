"""Uncertainty of a predicted step time: an 80% interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.estimate.fit.posterior import Fit, predict_each
from paceline.estimate.model.case import Cases, Floats
from paceline.estimate.model.coefficients import NAMES

Z80 = 1.2816
"""Standard deviations on either side that contain 80% of a normal distribution."""
NUDGE = 0.02
"""Step of a coefficient's logarithm, in either direction, for the slope of a prediction."""
MAX_MEASURED_DEVICES = 16_384
"""Largest number of devices with published step times; each doubling beyond widens the interval by
SD_PER_DOUBLING."""
SD_PER_DOUBLING = 0.03
UNFITTED_MODEL_SD = {"adapters": 0.08, "experts": 0.10, "images": 0.15}
"""Additional deviation for kinds of models. 17 published rows with adapters, which are not fitted,
are missed by 7%. Rows with experts are missed by 12% by fits without their source or device,
because dispatchers and balance are rarely stated; with 0.10, 81 to 84% of them are in the
interval."""
CAPTURED_STEP_SD = 0.06
"""Additional deviation for steps without experts that are one CUDA graph: no fitted row is one.
With it, 13 of 17 such steps of MLPerf 6.0 are in the interval."""
ASSUMED_LINK_SD = 0.5
"""Standard deviation of the logarithm of a link's rate if it is assumed from its generation."""
ASSUMED_DEVICE_SD = 0.08
"""Additional deviation for a device of which only the family is stated."""


@dataclass(frozen=True)
class Levels:
    """Model error that all steps of one source, one software or one device have in common.

    Values are standard deviations of the logarithm of the step time. Those of software and devices
    are for names without fitted rows; names with fitted rows have none.
    """

    source_sd: float = 0.0
    """Deviation of a source, such as a publication or a user's own cluster. No estimate is for a
    fitted source, so it always counts."""
    software_sd: float = 0.0
    device_sd: float = 0.0
    software: tuple[str, ...] = ()
    """Names of `fit/origin.py` with fitted rows."""
    devices: tuple[str, ...] = ()
    """Device families of the catalog with fitted rows."""

    def variance(self, x: Cases) -> Floats:
        """Return the variance due to each case's unseen source, software and device."""
        return self.source_sd**2 + self._software_variance(x) + self._device_variance(x)

    def variance_between(self, first: Cases, second: Cases) -> Floats:
        """Return the variance of the difference of cases; software and devices in common cancel.

        The deviation of a source cancels only for one software on one device: in ratios of devices
        it does not (docs/dev/estimator-log.md, Deviation of sources).
        """
        stacks, devices = (
            first.categories[word] != second.categories[word] for word in ("software", "family")
        )
        of_stacks = self._software_variance(first) + self._software_variance(second)
        of_devices = self._device_variance(first) + self._device_variance(second)
        of_sources = (stacks | devices) * 2 * self.source_sd**2
        return of_sources + stacks * of_stacks + devices * of_devices

    def _software_variance(self, x: Cases) -> Floats:
        return np.where(np.isin(x.categories["software"], self.software), 0.0, self.software_sd**2)

    def _device_variance(self, x: Cases) -> Floats:
        return np.where(np.isin(x.categories["family"], self.devices), 0.0, self.device_sd**2)


ALL_SEEN = Levels()
"""No additional error, for evidence of one machine."""


def log_sd(x: Cases, fit: Fit, residual: Mapping[str, float], levels: Levels = ALL_SEEN) -> Floats:
    """Return the standard deviation of the logarithm of the predicted step time.

    The variance is s C s (delta method), with the coefficients' covariance C and the slopes s of
    the prediction's logarithm, plus `model_variance`.
    """
    slope = slopes(x, fit.centre)
    return np.sqrt(coefficient_variance(slope, fit) + model_variance(x, slope, residual, levels))


def coefficient_variance(slope: Floats, fit: Fit) -> Floats:
    """Return the variance of each logarithm due to the uncertainty of the coefficients."""
    return np.asarray(np.einsum("ij,jk,ik->i", slope, fit.covariance, slope), dtype=np.float64)


def model_variance(
    x: Cases, slope: Floats, residual: Mapping[str, float], levels: Levels = ALL_SEEN
) -> Floats:
    """Return the variance of each logarithm that does not depend on the coefficients' uncertainty.

    It is the sum of the model error, the error of unseen sources, software and devices, the
    distance beyond the largest published cluster, the error of kinds of models that are not fitted,
    and the error of assumed links and device variants. `slope` is the result of `slopes`.
    """
    residual_deviation = np.select(
        [x.is_category("implementation", name) for name in residual], list(residual.values())
    )
    far = SD_PER_DOUBLING * np.maximum(
        0.0, np.log2(np.maximum(x.devices, 1) / MAX_MEASURED_DEVICES)
    )
    # Only the first matching kind of model counts, so the deviations of two kinds do not add up.
    unseen = np.select(
        [x.experts > 1, x.causal == 0, x.frozen > 0],
        [UNFITTED_MODEL_SD["experts"], UNFITTED_MODEL_SD["images"], UNFITTED_MODEL_SD["adapters"]],
        0.0,
    )
    # An assumed rate matters only as far as the step depends on it: its deviation times the slope.
    links = [
        ASSUMED_LINK_SD * is_assumed * slope[:, NAMES.index(name)]
        for is_assumed, name in ((x.assumed_intra, "intra"), (x.assumed_inter, "inter"))
    ]
    variant = ASSUMED_DEVICE_SD * x.assumed_device
    captured_step = np.where(
        x.is_category("cuda_graphs", "iteration") & (x.experts <= 1), CAPTURED_STEP_SD, 0.0
    )
    deviations = [residual_deviation, far, unseen, variant, captured_step, *links]
    return np.sum([deviation**2 for deviation in deviations], axis=0) + levels.variance(x)


def slopes(x: Cases, centre: Floats, columns_of_interest: Sequence[int] | None = None) -> Floats:
    """Return d log(prediction) / d log(coefficient), of shape (cases, coefficients).

    `columns_of_interest` are those that may differ from 0; None means all.
    """
    columns = (
        np.arange(len(centre))
        if columns_of_interest is None
        else np.array(columns_of_interest, dtype=int)
    )
    nudges = NUDGE * np.eye(len(centre))[columns]
    up, down = np.split(predict_each(x, np.concatenate([centre + nudges, centre - nudges])), 2)
    slope = np.zeros((x.size, len(centre)))
    slope[:, columns] = np.log(up / down).T / (2 * NUDGE)
    return slope


def bounds(seconds: Floats, sd: Floats) -> tuple[Floats, Floats]:
    """Return the bounds of the 80% interval of a log-normal prediction."""
    return seconds * np.exp(-Z80 * sd), seconds * np.exp(Z80 * sd)
