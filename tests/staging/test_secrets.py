"""Tokens and passwords reach the host that they are for, and nothing else."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from pydantic import ValidationError

from paceline.core.assets import Asset
from paceline.staging.credentials import headers_for
from tests.command import paceline
from tests.staging.mirror import COMMIT, TOKEN, Mirror, serving
from tests.staging.staged import noise, recipe_of, stage_all

PASSWORD = "tr0ub4dor-and-3-more"
SIGNATURE = "X-Amz-Signature=9f8e7d6c5b4a39281706"
RECIPE = """
name: needs-secrets
title: A model behind a licence and a file behind a password
model: {{num_layers: 1, hidden_size: 64, num_heads: 1, ffn_size: 64, vocab_size: 512}}
training: {{seq_len: 32, batch_per_device: 1, steps: 1}}
data: {{source: synthetic}}
assets:
  - {{name: model, kind: hub-model, source: some/gated}}
  - {{name: file, kind: url, source: "{url}/file.bin"}}
"""


def test_a_token_is_sent_to_the_hub_alone_also_behind_a_redirect(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    content = noise(1000)
    mirror.repositories["model/some/gated"] = {"weights.bin": content}
    mirror.gated.add("model/some/gated")
    with serving(Mirror()) as store:
        store.files["/blob"] = content
        mirror.fail(
            f"/some/gated/resolve/{COMMIT}/weights.bin",
            ("redirect", f"{store.url}/blob?{SIGNATURE}"),
        )
        stage_all(
            recipe_of({"name": "model", "kind": "hub-model", "source": "some/gated"}), tmp_path
        )
        (sent,) = store.gets("/blob")
    assert "Authorization" not in sent
    asked = mirror.gets(f"/some/gated/resolve/{COMMIT}/weights.bin")
    assert asked[0]["Authorization"] == f"Bearer {TOKEN}"


def test_no_secret_is_left_in_any_file_or_message(mirror: Mirror, tmp_path: Path):
    netrc = tmp_path / "netrc"
    netrc.write_text(f"machine 127.0.0.1 login me password {PASSWORD}\n")
    netrc.chmod(0o600)
    with serving(Mirror()) as plain:
        plain.files["/file.bin"] = noise(2000)
        plain.fail("/file.bin", 403)
        mirror.repositories["model/some/gated"] = {"weights.bin": noise(3000)}
        mirror.fail(
            f"/some/gated/resolve/{COMMIT}/weights.bin",
            ("redirect", f"{plain.url}/gone?{SIGNATURE}"),
        )
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(RECIPE.format(url=plain.url))
        secrets = {"HF_TOKEN": TOKEN, "NETRC": str(netrc), "HF_ENDPOINT": mirror.url}
        root = tmp_path / "stage"
        failed = paceline("recipes", "stage", recipe, "--to", root, env=secrets)
        staged = paceline("recipes", "stage", recipe, "--to", root, "--json", env=secrets)
        basic = {headers.get("Authorization", "") for headers in plain.gets("/file.bin")}

    assert failed.returncode != 0 and "assets failed" in failed.stderr
    assert staged.returncode == 0, staged.stderr
    encoded = base64.b64encode(f"me:{PASSWORD}".encode()).decode()
    assert basic == {f"Basic {encoded}"}
    left = [failed.stdout, failed.stderr, staged.stdout, staged.stderr]
    left += [path.read_bytes().decode("latin-1") for path in root.rglob("*") if path.is_file()]
    left += [str(path) for path in root.rglob("*")]
    for secret in (TOKEN, PASSWORD, encoded, SIGNATURE.partition("=")[2]):
        assert not [text for text in left if secret in text]


def test_no_password_goes_over_an_open_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    netrc = tmp_path / "netrc"
    netrc.write_text(f"machine store.example login me password {PASSWORD}\n")
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("CF_ACCESS_CLIENT_ID", "id")
    monkeypatch.setenv("CF_ACCESS_CLIENT_SECRET", PASSWORD)
    for host in ("store.example", "training.mlcommons-storage.org"):
        assert headers_for(f"https://{host}/file") and not headers_for(f"http://{host}/file")


@pytest.mark.parametrize(
    "source", ["https://me:word@host/file", "https://hf_abc@host/file", "ssh://me:word@host/repo"]
)
def test_a_source_with_credentials_is_refused(source: str):
    with pytest.raises(ValidationError, match="contains credentials"):
        Asset(name="file", kind="url", source=source)
