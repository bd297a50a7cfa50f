"""A mirror for each test, an environment without tokens and waits, and shards of drawings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.staging import connection, transfer
from paceline.staging.converters import ConversionJob, convert
from tests.staging.flux_samples import SIZES, converted
from tests.staging.mirror import Mirror, serving


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Mirror]:
    """An empty server that is the hub, for a user who has no credentials."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "PACELINE_STAGE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(transfer, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(connection, "FIRST_WAIT_S", 0.001)
    with serving(Mirror()) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture(scope="module")
def encodings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Encoded drawings as MLCommons ships encodings."""
    folder = tmp_path_factory.mktemp("encodings")
    convert("synthetic-encodings", ConversionJob(folder, {}, SIZES, lambda: None))
    return folder


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, encodings: Path) -> Path:
    """The same as shards of eight samples."""
    return converted(tmp_path_factory.mktemp("shards"), encodings)
