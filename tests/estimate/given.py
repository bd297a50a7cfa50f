"""Coefficients as `--calibration FILE` gives them."""

from __future__ import annotations

from pathlib import Path

from paceline.estimate.calibrate.lookup import GivenEvidence
from paceline.estimate.fit.evidence import shipped

SHIPPED = GivenEvidence(Path("shipped.json"), shipped())
"""Those that come with Paceline, of no one device."""
