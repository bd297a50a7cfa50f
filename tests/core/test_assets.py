"""What a recipe may say of its assets: nothing that nobody would heed or check."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from paceline.core.assets import Asset

DIGEST = "sha256:" + "ab" * 32
URL = {"kind": "url", "source": "https://host/file"}
GIT = {"kind": "git", "source": "https://host/code", "revision": "0123456"}
MADE = {"kind": "made", "source": "jsonl"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (GIT | {"digest": DIGEST}, "digest is for url or container, not for git"),
        (MADE | {"digest": DIGEST}, "digest is for"),
        (URL | {"digest": DIGEST, "files": [{"path": "a"}]}, "one for each of files"),
        (URL | {"revision": "main"}, "revision is for"),
        (URL | {"settings": {"vocab_size": 7}}, "settings is for made"),
        (URL | {"needs": ["other"]}, "needs is for made"),
        (MADE | {"submodules": True}, "submodules is for git"),
        (URL | {"files": [{"path": "a", "url": "https://me:word@host/a"}]}, "contains credentials"),
        (URL | {"source": "https://host:abc/x"}, "[Pp]ort"),
        (URL | {"source": "https://host/\u00e4"}, "must be ASCII"),
    ],
)
def test_what_nobody_would_check_is_refused(fields: dict[str, object], words: str):
    with pytest.raises(ValidationError, match=words):
        Asset.model_validate({"name": "it", **fields})
