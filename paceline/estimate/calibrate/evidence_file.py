"""The file of `--evidence`: coefficients alone, or a calibration with the rates beside them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.core.errors import UserError
from paceline.core.hardware import Dtype
from paceline.estimate.calibrate.calibration import Calibration, parse_calibration
from paceline.estimate.calibrate.lookup import automatic_dtype, evidence_for, is_cpu, of_other_dtype
from paceline.estimate.fit.evidence import Evidence, no_evidence, parse_evidence
from paceline.files.documents import parse_json, read_text


@dataclass(frozen=True)
class GivenEvidence:
    """What such a file holds."""

    path: Path
    evidence: Evidence
    calibration: Calibration | None = None
    """None where the file holds coefficients alone, which are then of no one device."""

    def of(self, device: str, dtype: Dtype | Literal["auto"]) -> Evidence:
        """Its coefficients for a training on a device.

        Raises UserError for a calibration of another kind of device, and for a processor's in
        another dtype.
        """
        found = self.calibration
        if found is None:
            return self.evidence
        if (found.kind == "cpu") != is_cpu(device):
            raise self._of_another_kind(device)
        dtype = automatic_dtype(device) if dtype == "auto" else dtype
        if found.kind == "cpu" and found.dtype != dtype:
            raise of_other_dtype(self._where, found, dtype)
        return self.evidence

    def of_gpus(self) -> Evidence:
        """Its coefficients for any GPU; raises UserError for a processor's calibration."""
        if self.calibration and self.calibration.kind == "cpu":
            raise self._of_another_kind("a GPU")
        return self.evidence

    @property
    def _where(self) -> str:
        return f"--evidence {self.path}"

    def _of_another_kind(self, device: str) -> UserError:
        of = self.calibration.device if self.calibration else ""
        return UserError(
            self._where,
            f"is of {of}, by which {device} cannot be estimated",
            allowed="a calibration of the same kind of device",
        )


def read_evidence(path: Path) -> GivenEvidence:
    """The coefficients of a file, which is read once.

    Raises UserError for a file without any, and for one that is meant to be a calibration and is
    none, as one of a later version.
    """
    try:
        text = read_text(path)
        whole = "evidence" in parse_json(text)
    except (OSError, ValueError, TypeError) as error:
        raise no_evidence(path) from error
    if not whole:
        return GivenEvidence(path, parse_evidence(text, path))
    calibration = parse_calibration(text, path)
    return GivenEvidence(path, calibration.labelled_evidence(), calibration)


def given_or_own(
    given: GivenEvidence | None,
    device: str,
    dtype: Dtype | Literal["auto"],
    label: str | None = None,
) -> Evidence:
    """A file's coefficients, else as `evidence_for`; raises UserError as `GivenEvidence.of`."""
    return given.of(device, dtype) if given else evidence_for(device, dtype, label)
