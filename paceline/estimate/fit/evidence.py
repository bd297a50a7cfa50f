"""Coefficients and their uncertainty as a file: those shipped, those of a calibrated machine."""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat, field_validator, model_validator

from paceline.core.errors import UserError
from paceline.core.value import Value
from paceline.estimate.fit.interval import Levels
from paceline.estimate.fit.posterior import PRIOR, Fit
from paceline.estimate.model.coefficients import NAMES

SHIPPED = "coefficients.json"

EvidenceKind = Literal["measured here", "stored profile", "public prior"]
"""Whether coefficients are of this machine, of one that was calibrated, or of published tables."""


class Evidence(Value):
    """What estimates rest on."""

    title: str
    """What was measured, in words."""
    rows: int
    sources: int
    medians: dict[str, PositiveFloat]
    covariance: dict[str, dict[str, float]]
    """Of the coefficients' logarithms; pairs that are left out are 0."""
    residual_sd: Annotated[dict[str, NonNegativeFloat], Field(min_length=1)]
    """What the formulas miss, as a deviation of the logarithm, by stack."""
    unseen_sd: dict[str, NonNegativeFloat] = {}
    """How far a stack and a device lie from the formulas that no row was of, as deviations of the
    logarithm: `stack`, `device`; neither for evidence of one machine."""
    software: tuple[str, ...] = ()
    """Software that rows were of."""
    devices: tuple[str, ...] = ()
    """Families of devices that rows were of."""
    own_rows: int = 0
    """How many of the rows were measured on the machine that it is for."""
    provenance: EvidenceKind = "public prior"

    @model_validator(mode="before")
    @classmethod
    def _has_a_provenance(cls, fields: dict[str, Any] | Evidence) -> dict[str, Any] | Evidence:
        """Files from before that field: a calibration has rows of its own, a prior none."""
        if isinstance(fields, dict) and fields.get("own_rows"):
            return {"provenance": "stored profile", **fields}
        return fields

    @field_validator("covariance")
    @classmethod
    def _has_variances(cls, rows: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
        if any(row.get(name, 0.0) < 0 for name, row in rows.items()):
            raise ValueError("variances are numbers from 0 on")
        return rows

    @property
    def levels(self) -> Levels:
        """What is not known of stacks and devices that no row was of."""
        stack, device = (self.unseen_sd.get(name, 0.0) for name in ("software", "device"))
        return Levels(stack, device, self.software, self.devices)

    def fit(self) -> Fit:
        """The coefficients as vectors; one that the file does not have keeps its prior.

        But it follows those that it shares a prior with, as far as these moved: with known ones k,
        m + C_mk C_kk^-1 (k - their prior).
        """
        known = np.array([name in self.medians for name in NAMES])
        centre, covariance = PRIOR.centre.copy(), np.diag(np.diag(PRIOR.covariance))
        rows = {name: row for row, name in enumerate(NAMES)}
        for name in rows.keys() & self.medians.keys():
            centre[rows[name]] = np.log(self.medians[name])
        for name in rows.keys() & self.covariance.keys():
            covariance[rows[name]] = 0.0
            for other, value in self.covariance[name].items():
                if other in rows:
                    covariance[rows[name], rows[other]] = value
        among = PRIOR.covariance[np.ix_(known, known)]
        follows = np.linalg.solve(among, PRIOR.covariance[np.ix_(known, ~known)]).T
        centre[~known] += follows @ (centre[known] - PRIOR.centre[known])
        return Fit(centre, covariance)


def evidence_of_fit(
    title: str, fit: Fit, residual: dict[str, float], rows: int, sources: int
) -> Evidence:
    """A fit as it is stored, with five digits of the medians and three of the covariance."""
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
def shipped() -> Evidence:
    """The coefficients that come with the package, fitted to published step times."""
    text = (resources.files("paceline.estimate.fit") / SHIPPED).read_text(encoding="utf-8")
    return Evidence.model_validate_json(text)


def parse_evidence(text: str, path: Path) -> Evidence:
    """The coefficients that a file's text is; raises UserError when it is none."""
    try:
        return Evidence.model_validate_json(text)
    except ValueError as error:
        raise no_evidence(path) from error


def no_evidence(path: Path) -> UserError:
    """That a file holds no coefficients."""
    return UserError(
        str(path),
        "holds no coefficients of the time model",
        remedy="`paceline calibrate` writes them",
    )
