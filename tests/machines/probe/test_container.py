"""The image is named where something names it, and never guessed."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.machines.probe import container as module
from paceline.machines.probe.container import container

DIGEST = "sha256:" + "ab" * 32


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No container, whatever these tests run in; the folder where its files would lie."""
    for name in (*module.IMAGE_VARIABLES, "KUBERNETES_SERVICE_HOST", "container"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "PODMAN_FILE", tmp_path / "containerenv")
    monkeypatch.setattr(module, "DOCKER_FILE", tmp_path / "dockerenv")
    return tmp_path


def test_outside_containers_there_is_none():
    assert container() is None


def test_docker_is_seen_and_its_image_is_not(outside: Path):
    (outside / "dockerenv").write_text("")
    assert container() == {"kind": "docker", "image": None, "digest": None}


def test_the_user_can_state_the_image(outside: Path, monkeypatch: pytest.MonkeyPatch):
    (outside / "dockerenv").write_text("")
    monkeypatch.setenv("PACELINE_IMAGE", f"registry.example/trainer@{DIGEST}")
    record = container()
    assert record is not None and record["digest"] == DIGEST
    assert record["image"] == f"registry.example/trainer@{DIGEST}"


def test_podman_names_image_and_digest(outside: Path):
    text = f'engine="podman-5"\nimage="localhost/trainer:7"\nimageid="{"cd" * 32}"\n'
    (outside / "containerenv").write_text(text)
    assert container() == {"kind": "podman", "image": "localhost/trainer:7", "digest": "cd" * 32}


def test_an_apptainer_image_is_a_file(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("APPTAINER_CONTAINER", "/images/nemo.sif")
    assert container() == {"kind": "apptainer", "image": "/images/nemo.sif", "digest": None}


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [("KUBERNETES_SERVICE_HOST", "10.0.0.1", "kubernetes"), ("container", "lxc", "lxc")],
)
def test_other_kinds_are_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, kind: str):
    monkeypatch.setenv(name, value)
    assert container() == {"kind": kind, "image": None, "digest": None}


def test_a_password_in_the_images_address_stays_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PACELINE_IMAGE", "docker://me:hunter2@registry.example/trainer:1")
    record = container()
    assert record is not None and record["image"] == "docker://registry.example/trainer:1"
