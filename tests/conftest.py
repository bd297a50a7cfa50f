"""Fixtures that any test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

BESIDE_THE_REPOSITORY = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def reference_data() -> Path:
    """The folder of public logs and tables that some tests read; they skip where it is missing."""
    folder = Path(os.environ.get("PACELINE_REFERENCE_DATA", BESIDE_THE_REPOSITORY))
    if not folder.is_dir():
        pytest.skip(f"no reference data in {folder}; set PACELINE_REFERENCE_DATA")
    return folder
