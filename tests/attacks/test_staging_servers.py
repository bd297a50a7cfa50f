"""Servers and hosts that answer a stage with anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx2
import pytest

from paceline.core.errors import PacelineError
from paceline.staging import connection
from tests.staging.staged import recipe_of, stage_all

HUB = "http://hub.test"
COMMIT = "0" * 40


def stage_from(
    monkeypatch: pytest.MonkeyPatch, folder: Path, asset: dict[str, Any], **answer: Any
) -> None:
    """Stage an asset from a server that always gives one answer."""

    def respond(request: httpx2.Request) -> httpx2.Response:
        status, content = answer.get("status", 200), answer["content"]
        return httpx2.Response(
            status,
            headers=answer.get("headers", {}),
            stream=httpx2.ByteStream(content),
            extensions={"network_stream": Mock()},
        )

    monkeypatch.setenv("HF_ENDPOINT", HUB)
    web = httpx2.Client(transport=httpx2.MockTransport(respond))
    monkeypatch.setattr(connection, "_client", lambda: web)
    monkeypatch.setattr(connection, "FIRST_WAIT_S", 0.001)
    stage_all(recipe_of({"name": "a", **asset}), folder)


@pytest.mark.parametrize(
    "field",
    [{"size": "2x"}, {"size": 10**400}, {"rfilename": 5}],
    ids=["size", "huge", "name"],
)
def test_a_listing_of_other_types_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: dict[str, Any]
) -> None:
    file = {"rfilename": "a", "size": 2, "blobId": COMMIT} | field
    listing = {"id": "o/m", "sha": COMMIT, "siblings": [file]}  # language: allow
    asset = {"kind": "hub-model", "source": "o/m"}
    content = json.dumps(listing).encode()
    with pytest.raises(PacelineError, match="o/m"):
        stage_from(monkeypatch, tmp_path, asset, content=content)


def test_a_part_that_was_not_requested_is_not_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = {"Content-Range": "bytes 5-9/10", "Content-Length": "5"}
    asset = {"kind": "url", "source": f"{HUB}/f.bin"}
    with pytest.raises(PacelineError, match="HTTP 206"):
        stage_from(monkeypatch, tmp_path, asset, status=206, headers=headers, content=b"hello")
    assert not list(tmp_path.glob("*/manifest.json"))


def test_a_length_of_many_digits_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asset = {"kind": "url", "source": f"{HUB}/f.bin"}
    headers = {"Content-Length": "9" * 400}
    stage_from(monkeypatch, tmp_path, asset, headers=headers, content=b"hello")
    assert next(tmp_path.rglob("f.bin")).read_bytes() == b"hello"
