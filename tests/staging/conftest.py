"""A mirror for each test, and an environment without tokens and waits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.staging import listing, transfer
from tests.staging.mirror import Mirror, serving


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Mirror]:
    """An empty server that is the hub, for a user who has no credentials."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "PACELINE_STAGE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(transfer, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(listing, "FIRST_WAIT_S", 0.001)
    with serving(Mirror()) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server
