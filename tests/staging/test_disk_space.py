"""Free space is looked at before anything is fetched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.core.errors import SystemFaultError
from paceline.staging import stager
from paceline.staging.plan import DiskSpace, disk_space
from paceline.staging.transfer import unwritable
from tests.staging.mirror import Mirror
from tests.staging.staged import noise, recipe_of, stage_all


@pytest.mark.parametrize("free", [8, 1])
def test_too_few_inodes_are_refused_before_anything_is_fetched(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int
):
    for number in range(3):
        mirror.files[f"/{number}"] = noise(1000, number)
    files = [{"path": name, "url": f"{mirror.url}/{name}"} for name in "012"]
    recipe = recipe_of({"name": "it", "kind": "url", "source": mirror.url, "files": files})
    monkeypatch.setattr(stager, "disk_space", lambda folder: DiskSpace(1 << 40, free))
    with pytest.raises(SystemFaultError, match=rf"needs 9 inodes, but only {free} (is|are) free"):
        stage_all(recipe, tmp_path / "stage")
    assert not (tmp_path / "stage").exists()
    assert not any(mirror.gets(path) for path in mirror.files)


def test_the_space_of_a_folder_that_is_not_there_is_that_of_the_one_around_it(tmp_path: Path):
    disk = os.statvfs(tmp_path)
    space = disk_space(tmp_path / "not" / "there")
    assert space.files_free is None or space.files_free <= disk.f_files
    assert 0 < space.bytes_free <= disk.f_blocks * disk.f_frsize


@pytest.mark.parametrize("number", [28, 122])
def test_a_full_disk_and_a_met_quota_say_that_what_has_come_is_kept(tmp_path: Path, number: int):
    told = str(unwritable(tmp_path / "file", OSError(number, os.strerror(number))))
    assert ("the disk is full" if number == 28 else "the disk quota is exceeded") in told
    assert told.endswith("a rerun resumes")
