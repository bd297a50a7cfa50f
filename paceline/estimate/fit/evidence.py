"""Files of coefficients with their uncertainty: shipped, or of a calibrated machine."""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat, field_validator

from paceline.core.errors import UserError
from paceline.core.value import Value
from paceline.estimate.fit.interval import Levels
from paceline.estimate.fit.posterior import PRIOR, Fit
from paceline.estimate.model.coefficients import NAMES

COEFFICIENTS_FILE = "coefficients.json"

EvidenceKind = Literal["measured here", "stored profile", "public prior"]
"""Origin of the coefficients: this machine, a stored calibration, or published tables."""


class Evidence(Value):
    """Fitted coefficients with their uncertainty and origin."""

    title: str
    """Description of the measurements."""
    rows: int
    """Number of measured steps in the fit."""
    sources: int
    """Number of sources of these steps."""
    medians: dict[str, PositiveFloat]
    """Posterior median of each coefficient by name (model/coefficients.py)."""
    covariance: dict[str, dict[str, float]]
    """Covariance of the coefficients' logarithms; missing pairs are 0."""
    residual_sd: Annotated[dict[str, NonNegativeFloat], Field(min_length=1)]
    """Model error by implementation, as a standard deviation of the logarithm."""
    unseen_sd: dict[str, NonNegativeFloat] = {}
    """Additional model error for an unseen `source`, unseen `software` and an unseen `device`, as
    standard deviations of the logarithm; empty for evidence of one machine."""
    unseen_sources_in_interval: int | None = None
    """Number of the `sources` with most steps in the 80% interval of a fit without the source; None
    if that was not tested."""
    software: tuple[str, ...] = ()
    """Software with measurements."""
    devices: tuple[str, ...] = ()
    """Device families with measurements."""
    own_rows: int = 0
    """Number of rows measured on the calibrated machine."""
    provenance: EvidenceKind = "public prior"
    """Origin of the coefficients."""

    @field_validator("covariance")
    @classmethod
    def _has_variances(cls, rows: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
        if any(row.get(name, 0.0) < 0 for name, row in rows.items()):
            raise ValueError("variances must be 0 or larger")
        return rows

    @property
    def levels(self) -> Levels:
        """Additional model error for unseen sources, software and devices."""
        source, stack, device = (
            self.unseen_sd.get(name, 0.0) for name in ("source", "software", "device")
        )
        return Levels(source, stack, device, self.software, self.devices)

    def fit(self) -> Fit:
        """Return the coefficients as vectors; a coefficient that the file lacks keeps its prior.

        A missing coefficient m that shares a prior with known ones k follows them: it becomes
        m + C_mk C_kk^-1 (k - their prior).
        """
        is_known = np.array([name in self.medians for name in NAMES])
        centre, covariance = PRIOR.centre.copy(), np.diag(np.diag(PRIOR.covariance))
        rows = {name: row for row, name in enumerate(NAMES)}
        for name in rows.keys() & self.medians.keys():
            centre[rows[name]] = np.log(self.medians[name])
        for name in rows.keys() & self.covariance.keys():
            covariance[rows[name]] = 0.0
            for other, value in self.covariance[name].items():
                if other in rows:
                    covariance[rows[name], rows[other]] = value
        among = PRIOR.covariance[np.ix_(is_known, is_known)]
        follows = np.linalg.solve(among, PRIOR.covariance[np.ix_(is_known, ~is_known)]).T
        centre[~is_known] += follows @ (centre[is_known] - PRIOR.centre[is_known])
        return Fit(centre, covariance)


def evidence_of_fit(
    title: str, fit: Fit, residual: dict[str, float], rows: int, sources: int
) -> Evidence:
    """Return a fit as Evidence, with medians to five digits and covariances to three."""
    covariance = {
        name: {
            other: float(f"{fit.covariance[i, j]:.3g}")
            for j, other in enumerate(NAMES)
            if abs(fit.covariance[i, j]) > 1e-6
        }
        for i, name in enumerate(NAMES)
    }
    medians = {n: float(f"{np.exp(v):.5g}") for n, v in zip(NAMES, fit.centre, strict=True)}
    residual = {stack: round(sd, 4) for stack, sd in residual.items()}
    return Evidence(
        title=title,
        rows=rows,
        sources=sources,
        medians=medians,
        covariance=covariance,
        residual_sd=residual,
    )


@cache
def shipped_evidence() -> Evidence:
    """Return the shipped coefficients, fitted to published step times."""
    text = (resources.files("paceline.estimate.fit") / COEFFICIENTS_FILE).read_text(
        encoding="utf-8"
    )
    return Evidence.model_validate_json(text)


def parse_evidence(text: str, path: Path) -> Evidence:
    """Parse a file of coefficients; raises UserError if it is not one."""
    try:
        return Evidence.model_validate_json(text)
    except ValueError as error:
        raise invalid_evidence(path) from error


def invalid_evidence(path: Path) -> UserError:
    """Return the error for a file without coefficients of the time model."""
    return UserError(
        str(path),
        "does not contain coefficients of the time model",
        remedy="create it with `paceline probe calibrate`",
    )
