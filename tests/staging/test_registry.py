"""Container images from a real registry behind a login, by the real skopeo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from paceline.core.errors import SystemFaultError, UserError
from paceline.files.staged import CONTENT_FOLDER, PARTIAL_FOLDER, asset_state, read_manifest
from paceline.staging.plan import UNDERWAY_FOLDER
from paceline.staging.sources import container
from tests.staging.registry import (
    LAYER_BYTES,
    PASSWORD,
    TAG,
    Registry,
    need_registry,
    serving_registry,
)
from tests.staging.staged import folder_of, recipe_of, stage_all
from tests.waiting import wait_until

RECIPE = """
name: in-a-container
title: A workload whose image lies behind a login
model: {{num_layers: 1, hidden_size: 64, num_heads: 1, ffn_size: 64, vocab_size: 512}}
training: {{seq_len: 32, batch_per_device: 1, steps: 1}}
data: {{source: synthetic}}
assets: [{{name: image, kind: container, source: "{image}", revision: "{tag}"}}]
"""
BETWEEN = LAYER_BYTES[0] + 100_000
"""Bytes of an answer that the small layer fits in and the large one does not."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    need_registry()
    with serving_registry(tmp_path_factory.mktemp("registry")) as registry:
        yield registry


@pytest.fixture
def registry(running: Registry, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """Without faults, for a user who has logged in nowhere."""
    running.cut_after = running.hold_after = None
    running.relayed = 0
    monkeypatch.setenv("HOME", str(running.home))
    for name in ("REGISTRY_AUTH_FILE", "DOCKER_CONFIG", "DOCKER_AUTH_CONFIG", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    return running


@pytest.fixture
def logged_in(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(registry.folder / "login.json"))


def image(registry: Registry, **changes: object):
    asset = {"name": "image", "kind": "container", "source": registry.image, "revision": TAG}
    return recipe_of({**asset, **changes})


def stage(registry: Registry, root: Path, **changes: object) -> Path:
    """Stage the image by skopeo; the asset's folder."""
    recipe = image(registry, **changes)
    stage_all(recipe, root, runtime="skopeo")
    return folder_of(recipe, root, "image")


def check_archive(registry: Registry, folder: Path) -> None:
    """The archive is the image, whole, and the manifest says which it was."""
    (file,) = (folder / CONTENT_FOLDER).iterdir()
    told = subprocess.run(
        ["skopeo", "inspect", f"oci-archive:{file}"], capture_output=True, text=True, check=True
    )
    assert json.loads(told.stdout)["Digest"] == registry.digest
    assert json.loads(told.stdout)["Layers"] == list(registry.layers)
    manifest = read_manifest(folder)
    assert manifest is not None and asset_state(folder) == "staged"
    assert (manifest.revision, manifest.tool) == (registry.digest, "skopeo")
    assert not (folder / PARTIAL_FOLDER).exists()


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def has_small_layer(registry: Registry, folder: Path) -> bool:
    """Whether an interrupted call has kept the complete small layer."""
    name = f"*/blobs/sha256/{registry.layers[0].partition(':')[2]}"
    return bool(list((folder / PARTIAL_FOLDER / UNDERWAY_FOLDER).glob(name)))


def test_an_image_behind_a_login_is_staged_with_its_digest(
    registry: Registry, tmp_path: Path, logged_in: None
):
    check_archive(registry, stage(registry, tmp_path, digest=registry.digest))
    tagged = f"{registry.image}:{TAG}"
    check_archive(registry, stage(registry, tmp_path, source=tagged, revision=None))


def test_no_login_and_a_wrong_one_are_told_with_what_to_do(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(UserError, match=rf"unauthorized.*`skopeo login 127.0.0.1:{registry.port}`"):
        stage(registry, tmp_path)
    (tmp_path / "wrong.json").write_text(registry.login("another-Passw0rd"))
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "wrong.json"))
    with pytest.raises(UserError, match="access denied") as caught:
        stage(registry, tmp_path)
    assert "another-Passw0rd" not in str(caught.value)


def test_another_digest_and_an_unknown_tag_are_refused_before_a_layer_comes(
    registry: Registry, tmp_path: Path, logged_in: None
):
    stated = "sha256:" + "cd" * 32
    with pytest.raises(
        SystemFaultError, match=rf"has digest {registry.digest}; .* expects {stated}"
    ):
        stage(registry, tmp_path, digest=stated)
    with pytest.raises(SystemFaultError, match="manifest unknown"):
        stage(registry, tmp_path, digest=stated, revision=None)
    with pytest.raises(SystemFaultError, match="manifest unknown"):
        stage(registry, tmp_path, revision="2.0")
    assert registry.relayed < LAYER_BYTES[0]


def test_a_cut_connection_is_told_and_a_second_call_takes_what_is_whole(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged_in: None
):
    monkeypatch.setattr(container, "RETRIES", "--retry-times=0")
    registry.cut_after = BETWEEN
    with pytest.raises(SystemFaultError, match=r"skopeo cannot fetch it: .*EOF"):
        stage(registry, tmp_path)
    folder = folder_of(image(registry), tmp_path, "image")
    assert asset_state(folder) == "partial" and has_small_layer(registry, folder)
    registry.cut_after, registry.relayed = None, 0
    check_archive(registry, stage(registry, tmp_path))
    assert LAYER_BYTES[1] < registry.relayed < sum(LAYER_BYTES)


def test_a_killed_call_leaves_no_program_and_no_secret_and_the_next_goes_on(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged_in: None
):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    recipe, root = tmp_path / "recipe.yaml", tmp_path / "stage"
    recipe.write_text(RECIPE.format(image=registry.image, tag=TAG))
    command = [sys.executable, "-m", "paceline", "recipes", "stage", recipe, "--to", root, "--json"]
    command += ["--runtime", "skopeo"]
    registry.hold_after = BETWEEN
    folder = folder_of(image(registry), root, "image")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as stager:
        wait_until(lambda: has_small_layer(registry, folder), "the small layer")
        (skopeo,) = psutil.Process(stager.pid).children()
        shown = " ".join(skopeo.cmdline())
        os.kill(stager.pid, signal.SIGKILL)
        wait_until(lambda: has_ended(skopeo), "the end of skopeo")
        left = [output.decode() for output in stager.communicate()]
    registry.hold_after, registry.relayed = None, 0
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert registry.relayed < sum(LAYER_BYTES)
    check_archive(registry, folder)
    left += [shown, done.stdout, done.stderr]
    left += [path.read_bytes().decode("latin-1") for path in root.rglob("*") if path.is_file()]
    encoded = registry.login().partition('"auth": "')[2].partition('"')[0]
    assert "skopeo copy" in shown and f"@{registry.digest}" in shown
    assert not [text for text in left for secret in (PASSWORD, encoded) if secret in text]
    assert not list((tmp_path / "tmp").rglob("*"))
