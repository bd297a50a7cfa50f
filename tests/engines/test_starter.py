"""The starter's environment: what a program finds on a node, whatever launched it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.engines.launch import starter_program

SHOW = "import os, sys; print(os.environ['PATH'], os.environ.get('USER'), sys.argv[1])"


def start(tmp_path: Path, *program: str, devices: int = 1, **environment: str) -> str:
    """Start a program as a job does, with these variables only; return what it prints."""
    (tmp_path / "logs").mkdir(exist_ok=True)
    place = ("rank", "1", str(devices), "0")
    command = [sys.executable, starter_program.__file__, *place, *program]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    return (tmp_path / "logs" / "rank-00000.log").read_text().splitlines()[-1]


def test_the_interpreters_tools_come_first_on_the_path_of_its_programs(tmp_path: Path):
    bin_folder = str(Path(sys.executable).parent)
    path = start(tmp_path, "{python}", "-c", SHOW, "x", PATH="/usr/bin:/bin").split()[0]
    assert path == f"{bin_folder}:/usr/bin:/bin"


def test_other_programs_keep_their_path(tmp_path: Path):
    assert start(tmp_path, "sh", "-c", "echo $PATH", PATH="/usr/bin:/bin") == "/usr/bin:/bin"


def test_ranks_that_share_a_node_have_a_thread_each_unless_a_number_is_set(tmp_path: Path):
    show = ("sh", "-c", "echo ${OMP_NUM_THREADS-unset}")
    assert start(tmp_path, *show, PATH="/usr/bin:/bin") == "unset"
    assert start(tmp_path, *show, devices=2, PATH="/usr/bin:/bin") == "1"
    assert start(tmp_path, *show, devices=2, PATH="/usr/bin:/bin", OMP_NUM_THREADS="4") == "4"


def test_the_user_has_a_name_where_the_scheduler_gives_none(tmp_path: Path):
    words = start(tmp_path, "{python}", "-c", SHOW, "x", PATH="/bin").split()
    assert words[1] not in ("", "None")
    words = start(tmp_path, "{python}", "-c", SHOW, "x", PATH="/bin", USER="ada").split()
    assert words[1] == "ada"


def test_the_temporary_folder_is_the_nodes_and_the_users(tmp_path: Path):
    words = start(tmp_path, "{python}", "-c", SHOW, "{tmp}/x", PATH="/bin", TMPDIR=str(tmp_path))
    folder = tmp_path / f"paceline-{os.getuid()}"
    assert words.split()[2] == str(folder / "x")
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_temporary_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    starter_program.make_private(str(tmp_path / "mine"))
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="another user; set TMPDIR"):
        starter_program.make_private(str(tmp_path))
