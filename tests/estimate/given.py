"""Coefficients as `--calibration FILE` gives them."""

from __future__ import annotations

from pathlib import Path

from paceline.estimate.calibrate.lookup import FileEvidence
from paceline.estimate.fit.evidence import shipped_evidence

SHIPPED = FileEvidence(Path("shipped.json"), shipped_evidence())
"""Those that come with Paceline, of no one device."""
