"""Code at one commit, from real repositories of the git program on this machine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from paceline.core.errors import SystemFaultError, UserError
from paceline.files.staged import asset_state, read_manifest
from paceline.staging.verification import verify
from tests.staging.staged import content_of, folder_of, recipe_of, stage_all

PATCH = """--- a/train.py
+++ b/train.py
@@ -1 +1 @@
-print("second")
+print("patched")
"""


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=tests", "-c", "user.email=tests@localhost")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of two commits with a submodule; git may clone it from the disk."""
    monkeypatch.setenv("GIT_ALLOW_PROTOCOL", "file")
    library, folder = tmp_path / "library", tmp_path / "origin"
    for path, name in ((library, "lib.py"), (folder, "train.py")):
        path.mkdir()
        git(path, "init", "--quiet", "--initial-branch", "main")
        (path / name).write_text('print("first")\n')
        git(path, "add", ".")
        git(path, "commit", "--quiet", "-m", "first")
    git(folder, "submodule", "--quiet", "add", library.as_uri(), "library")
    (folder / "train.py").write_text('print("second")\n')
    git(folder, "commit", "--quiet", "-am", "second")
    return folder


def code(origin: Path, revision: str, **changes: object):
    source = {"name": "code", "kind": "git", "source": origin.as_uri(), "revision": revision}
    return recipe_of({**source, **changes})


def test_an_old_commit_is_staged_by_its_whole_name_or_the_beginning(origin: Path, tmp_path: Path):
    first = git(origin, "rev-parse", "HEAD~1")
    for revision in (first, first[:9]):
        one = code(origin, revision)
        stage_all(one, tmp_path / "stage")
        assert content_of(one, tmp_path / "stage", "code")["train.py"] == b'print("first")\n'
        manifest = read_manifest(folder_of(one, tmp_path / "stage", "code"))
        assert manifest is not None and manifest.revision == first


def test_a_tag_that_is_called_like_a_commit_is_not_taken_for_it(origin: Path, tmp_path: Path):
    first = git(origin, "rev-parse", "HEAD~1")
    git(origin, "tag", first[:9], "HEAD")
    with pytest.raises(SystemFaultError, match=f"resolves {first[:9]} to"):
        stage_all(code(origin, first[:9]), tmp_path / "stage")


def test_submodules_and_patches_are_part_of_it(origin: Path, tmp_path: Path):
    head = git(origin, "rev-parse", "HEAD")
    one = code(origin, head, submodules=True, patches=[PATCH])
    stage_all(one, tmp_path / "stage")

    content = content_of(one, tmp_path / "stage", "code")
    assert content["train.py"] == b'print("patched")\n'
    assert content["library/lib.py"] == b'print("first")\n'
    folder = folder_of(one, tmp_path / "stage", "code")
    manifest = read_manifest(folder)
    assert manifest is not None and manifest.asset.patches == (PATCH,)
    assert verify(folder, "code") == []
    plain = code(origin, head)
    assert folder_of(plain, tmp_path, "code").name != folder.name


def test_what_git_cannot_do_is_told_and_nothing_is_staged(origin: Path, tmp_path: Path):
    head = git(origin, "rev-parse", "HEAD")
    cases = [
        (code(origin, "0" * 40), SystemFaultError, "cannot be fetched"),
        (code(origin / "nothing", head), SystemFaultError, "cannot be fetched"),
        (code(origin, head, patches=[PATCH.replace("second", "other")]), UserError, "patch 1"),
    ]
    for one, kind, words in cases:
        with pytest.raises(kind, match=words):
            stage_all(one, tmp_path / "stage")
        assert asset_state(folder_of(one, tmp_path / "stage", "code")) == "partial"


def test_a_name_that_no_manifest_can_hold_is_told(origin: Path, tmp_path: Path):
    (origin / "back\\slash").touch()
    git(origin, "add", ".")
    git(origin, "commit", "--quiet", "-m", "name")
    with pytest.raises(SystemFaultError, match="must be a relative path"):
        stage_all(code(origin, git(origin, "rev-parse", "HEAD")), tmp_path / "stage")


def test_without_git_it_is_asked_for(origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(os.environ, "PATH", str(tmp_path))
    with pytest.raises(UserError, match="install git"):
        stage_all(code(origin, "0" * 40), tmp_path / "stage")
