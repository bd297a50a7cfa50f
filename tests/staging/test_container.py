"""Container images by programs that stand in for the real ones and take the same arguments."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from paceline.core.errors import SystemFaultError, UserError
from paceline.files.staged import asset_state, read_manifest
from tests.staging.staged import content_of, folder_of, recipe_of, stage_all

DIGEST = "sha256:" + hashlib.sha256(b"a manifest").hexdigest()
ENROOT = '[ "$1" = import ] && [ "$2" = --output ] && printf "%s" "$4" > "$3"'
APPTAINER = '[ "$1" = build ] && printf "%s" "$4" > "$3"'
SKOPEO = '[ "$1 $2" = "inspect --raw" ] && printf "a manifest"'
DOCKER = f"""case "$1" in
  pull) true ;;
  image) echo elsewhere/nemo@sha256:{"cd" * 32}; echo nvcr.io/nvidia/nemo@{DIGEST} ;;
esac"""
REFUSES = 'echo "Error: unauthorized: authentication required" >&2; exit 1'


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in PATH in addition to the shell's own."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def install(programs: Path, **scripts: str) -> None:
    for name, script in scripts.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)


def nemo(**changes: object):
    image = {"name": "nemo", "kind": "container", "source": "nvcr.io/nvidia/nemo"}
    return recipe_of({**image, "revision": "24.09", **changes})


@pytest.mark.parametrize(
    ("scripts", "file", "content", "digest"),
    [
        ({"enroot": ENROOT}, "nvidia+nemo+24.09.sqsh", "docker://nvcr.io#nvidia/nemo:24.09", None),
        (
            {"enroot": ENROOT, "skopeo": SKOPEO, "docker": DOCKER},
            "nvidia+nemo+24.09.sqsh",
            "docker://nvcr.io#nvidia/nemo:24.09",
            DIGEST,
        ),
        (
            {"apptainer": APPTAINER},
            "nvidia+nemo+24.09.sif",
            "docker://nvcr.io/nvidia/nemo:24.09",
            None,
        ),
    ],
    ids=["enroot", "enroot and skopeo", "apptainer"],
)
def test_the_program_that_is_there_makes_the_file(
    programs: Path,
    tmp_path: Path,
    scripts: dict[str, str],
    file: str,
    content: str,
    digest: str | None,
):
    install(programs, **scripts)
    stage_all(nemo(), tmp_path)
    assert content_of(nemo(), tmp_path, "nemo") == {file: content.encode()}
    manifest = read_manifest(folder_of(nemo(), tmp_path, "nemo"))
    assert manifest is not None
    assert manifest.revision == digest and manifest.tool == next(iter(scripts))


def test_what_docker_keeps_itself_is_noted_with_its_digest(programs: Path, tmp_path: Path):
    install(programs, docker=DOCKER)
    stage_all(nemo(), tmp_path)
    note = json.loads(content_of(nemo(), tmp_path, "nemo")["image.json"])
    assert note == {"runtime": "docker", "image": "nvcr.io/nvidia/nemo:24.09", "digest": DIGEST}


def test_another_digest_than_stated_is_refused(programs: Path, tmp_path: Path):
    install(programs, skopeo=SKOPEO, enroot=ENROOT)
    one = nemo(digest="sha256:" + "cd" * 32)
    with pytest.raises(SystemFaultError, match=rf"has digest {DIGEST}; the recipe expects .*cdcd"):
        stage_all(one, tmp_path)
    assert asset_state(folder_of(one, tmp_path, "nemo")) == "partial"


def test_a_digest_that_nobody_tells_is_refused_unless_it_names_the_image(
    programs: Path, tmp_path: Path
):
    install(programs, enroot=ENROOT)
    with pytest.raises(UserError, match="enroot cannot check the recipe's digest"):
        stage_all(nemo(digest=DIGEST), tmp_path)
    stage_all(nemo(digest=DIGEST, revision=None), tmp_path)


def test_a_refused_login_and_a_missing_program_are_told(programs: Path, tmp_path: Path):
    with pytest.raises(UserError, match="install enroot"):
        stage_all(nemo(), tmp_path)
    install(programs, docker=REFUSES)
    with pytest.raises(
        UserError, match=r"unauthorized.*`docker login nvcr.io` \(user \$oauthtoken"
    ):
        stage_all(nemo(), tmp_path)
    install(programs, docker='echo "Error: Head ...: no basic auth credentials" >&2; exit 1')
    with pytest.raises(UserError, match="access denied"):
        stage_all(nemo(), tmp_path)
    with pytest.raises(UserError, match="--runtime sh: is not a supported container program"):
        stage_all(nemo(), tmp_path, runtime="sh")
    with pytest.raises(UserError, match="apptainer is not installed"):
        stage_all(nemo(), tmp_path, runtime="apptainer")
