"""Dates in logs are those of the machine's clock unless they state their time zone."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from paceline.logs.dates import log_date


@pytest.mark.parametrize(
    ("line", "date"),
    [
        ("[2026-07-01 02:00:00,123] step 1", "2026-07-01T09:00:00+00:00"),
        ("[07/01/2026-02:00:00] step 1", "2026-07-01T09:00:00+00:00"),
        ("2026-07-01T02:00:00Z step 1", "2026-07-01T02:00:00+00:00"),
        ("2026-07-01T02:00:00.5+02:00 step 1", "2026-07-01T00:00:00+00:00"),
        ('{"time_ms": 1782864000000}', "2026-07-01T00:00:00+00:00"),
        ("2026-13-01 02:00:00 step 1", None),
        ("step 1", None),
    ],
)
def test_a_date_without_a_zone_is_local(
    line: str, date: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "train.log"
    path.write_text(f"{line}\n")
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "PDT7")
        time.tzset()
        assert log_date(path) == date
    time.tzset()
