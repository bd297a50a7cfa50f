"""Published memories that several tests hold the estimate against."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from paceline.estimate.fit.published import UnsupportedRowError
from paceline.estimate.validation import PublishedMemory, read_memory_row


@pytest.fixture(scope="session")
def rows(reference_data: Path) -> list[PublishedMemory]:
    """All open rows that state memory or ran out of it."""
    published: list[PublishedMemory] = []
    table = reference_data / "references" / "measured_open.csv"
    with table.open(encoding="utf-8") as lines:
        for line in csv.DictReader(lines):
            try:
                published.append(read_memory_row(line))
            except UnsupportedRowError:
                continue
    return published
