"""The hub's protocol: what is listed, chosen, checked and refused, from a mirror on loopback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.core.assets import Asset
from paceline.core.errors import SystemFaultError, UserError
from paceline.files.staged import asset_state, read_manifest
from paceline.staging.sources.hub import copy_cached
from tests.staging.mirror import COMMIT, LARGE_BYTES, TOKEN, Mirror
from tests.staging.staged import content_of, folder_of, noise, recipe_of, stage_all

MODEL = {
    "config.json": b'{"model_type": "opt"}',
    "model.safetensors": noise(LARGE_BYTES + 100),
    "tokenizer.json": b'{"version": "1.0"}',
    "onnx/model.onnx": noise(500, 1),
    ".gitattributes": b"*.bin filter=lfs",
    "__pycache__/modeling.pyc": b"code",
}


def model(mirror: Mirror, **changes: Any) -> Any:
    mirror.repositories["model/some/opt"] = MODEL
    return recipe_of({"name": "opt", "kind": "hub-model", "source": "some/opt", **changes})


def test_a_model_is_staged_at_the_commit_that_the_hub_tells(mirror: Mirror, tmp_path: Path):
    one = model(mirror, include=["*.json", "*.safetensors"])
    stage_all(one, tmp_path)

    assert set(content_of(one, tmp_path, "opt")) == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    manifest = read_manifest(folder_of(one, tmp_path, "opt"))
    assert manifest is not None and manifest.revision == COMMIT
    assert manifest.origin == f"{mirror.url}/some/opt"
    assert mirror.gets(f"/some/opt/resolve/{COMMIT}/config.json")


def test_a_tokenizer_is_its_files_alone(mirror: Mirror, tmp_path: Path):
    one = model(mirror, kind="hub-tokenizer")
    stage_all(one, tmp_path)
    assert set(content_of(one, tmp_path, "opt")) == {"config.json", "tokenizer.json"}


def test_a_data_set_is_asked_for_as_one(mirror: Mirror, tmp_path: Path):
    mirror.repositories["dataset/Dahoas/rm-static"] = {"data/train.parquet": noise(2000)}
    one = recipe_of({"name": "rm", "kind": "hub-dataset", "source": "Dahoas/rm-static"})
    stage_all(one, tmp_path)
    assert content_of(one, tmp_path, "rm") == {"data/train.parquet": noise(2000)}


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_small_and_large_files_are_checked_against_the_hubs_digests(
    mirror: Mirror, tmp_path: Path, file: str
):
    one = model(mirror)
    mirror.fail(f"/some/opt/resolve/{COMMIT}/{file}", ("damage",), ("damage",))
    with pytest.raises(SystemFaultError, match="does not match the expected checksum"):
        stage_all(one, tmp_path)
    stage_all(one, tmp_path)
    assert content_of(one, tmp_path, "opt")[file] == MODEL[file]


def test_a_gated_model_tells_the_page_and_what_to_do(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    mirror.gated.add("model/some/opt")
    one = model(mirror)
    with pytest.raises(UserError) as caught:
        stage_all(one, tmp_path)

    assert "https://huggingface.co/some/opt" in str(caught.value)
    assert "HF_TOKEN" in str(caught.value) and "accept" in str(caught.value)
    assert asset_state(folder_of(one, tmp_path, "opt")) == "partial"
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    stage_all(one, tmp_path)
    assert asset_state(folder_of(one, tmp_path, "opt")) == "staged"


@pytest.mark.parametrize(("status", "words"), [(401, "a token is needed"), (403, "HTTP 403")])
def test_a_refused_listing_is_told_before_anything_is_fetched(
    mirror: Mirror, tmp_path: Path, status: int, words: str
):
    one = model(mirror)
    mirror.fail("/api/models/some/opt", status)
    with pytest.raises(UserError, match=words):
        stage_all(one, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_busy_hub_is_asked_again(mirror: Mirror, tmp_path: Path):
    one = model(mirror)
    mirror.fail("/api/models/some/opt", 503, 429)
    stage_all(one, tmp_path)
    assert asset_state(folder_of(one, tmp_path, "opt")) == "staged"


def test_a_repository_that_is_not_there_is_told(mirror: Mirror, tmp_path: Path):
    one = recipe_of({"name": "opt", "kind": "hub-model", "source": "some/nothing"})
    with pytest.raises(SystemFaultError, match=r"does not exist \(HTTP 404\)"):
        stage_all(one, tmp_path)


def test_a_hub_that_does_not_answer_is_told(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    one = model(mirror)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(SystemFaultError, match="does not respond"):
        stage_all(one, tmp_path)


OFFLINE = """
import sys
from huggingface_hub import snapshot_download
from pathlib import Path
from tests.staging.staged import content_of, recipe_of, stage_all
one = recipe_of({"name": "opt", "kind": "hub-model", "source": "some/opt"})
try:
    stage_all(one, Path(sys.argv[1]))
    print(sorted(content_of(one, Path(sys.argv[1]), "opt")))
except Exception as error:
    print(type(error).__name__, error)
"""


def test_offline_the_hubs_cache_is_taken_and_the_network_is_not(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The library reads its environment when it is imported, hence processes of their own."""
    model(mirror)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "UserError" in (told := python(OFFLINE, tmp_path / "a")) and "HF_ENDPOINT" in told

    snapshot = tmp_path / "cache/hub/models--some--opt/snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).write_bytes(MODEL[name])
    references = snapshot.parents[1] / "refs"
    references.mkdir()
    (references / "main").write_text(COMMIT)
    assert "['config.json', 'model.safetensors']" in python(OFFLINE, tmp_path / "b")
    assert mirror.asked == []


@pytest.mark.parametrize(
    ("kind", "files", "words"),
    [
        ("hub-model", ["config.json"], "no weights found"),
        ("hub-model", ["config.json", "a.safetensors"], "b.safetensors is missing"),
        ("hub-model", ["config.json", "a.safetensors", "b.safetensors"], None),
        ("hub-tokenizer", ["config.json"], "no tokenizer"),
        ("hub-dataset", ["train.parquet"], "list of the data set's files is missing"),
    ],
)
def test_a_cache_that_is_not_whole_is_refused_and_what_was_there_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, files: list[str], words: str | None
):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    repository = f"{'dataset' if kind == 'hub-dataset' else 'model'}s--some--opt"
    snapshot, done = tmp_path / "cache" / repository / "snapshots" / COMMIT, tmp_path / "done"
    snapshot.mkdir(parents=True)
    done.mkdir()
    (done / "older").touch()
    for name in files:
        (snapshot / name).touch()
    weights = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(weights))
    if "a.safetensors" not in files:
        (snapshot / "model.safetensors.index.json").unlink()
    asset = Asset(name="opt", kind=kind, source="some/opt", revision=COMMIT)
    if words is None:
        assert copy_cached(asset, done) == COMMIT
        assert {path.name for path in done.iterdir()} == {path.name for path in snapshot.iterdir()}
        return
    with pytest.raises(UserError, match=words):
        copy_cached(asset, done)
    assert (done / "older").exists()


def python(code: str, root: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, str(root)], capture_output=True, text=True, timeout=60
    )
    return done.stdout + done.stderr
