"""Assets copied to a node by the real program, which a shell of this machine plays the node for."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.core.errors import SystemFaultError
from paceline.files.staged import CONTENT_FOLDER, PARTIAL_FOLDER, asset_state
from paceline.staging.ending import StageEnd, StageEndedError
from paceline.staging.nodes.fan_out import on_nodes
from paceline.staging.nodes.node_copy import NodeOrder, NodeShell
from paceline.staging.nodes.node_program import underway_name
from paceline.staging.plan import staging_plan
from paceline.staging.stager import Stager
from paceline.staging.verification import verify
from tests.staging.mirror import Mirror
from tests.staging.staged import noise, recipe_of

FILES = {"a.bin": 300_000, "deep/b.bin": 700_000, "c.txt": 10}
TOTAL = sum(FILES.values())
SHELL = ("bash", "--noprofile", "--norc", "-s")


def can_mount() -> bool:
    """Whether this user may have mounts of his own."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0


@pytest.fixture
def staged(mirror: Mirror, tmp_path: Path) -> tuple[Path, ...]:
    """The folder of an asset of three files, and that of a small one."""
    for number, (path, size) in enumerate(FILES.items()):
        mirror.files[f"/{path}"] = noise(size, number)
    mirror.files["/small"] = noise(100)
    files = [{"path": path, "url": f"{mirror.url}/{path}"} for path in FILES]
    recipe = recipe_of(
        {"name": "large", "kind": "url", "source": mirror.url, "files": files},
        {"name": "small", "kind": "url", "source": f"{mirror.url}/small"},
    )
    plan = staging_plan(recipe, None, tmp_path / "here")
    Stager().stage(plan)
    (plan.assets[0].folder / CONTENT_FOLDER / "a.bin").chmod(0o755)
    return tuple(part.folder for part in plan.assets)


def shell(*argv: str, host: str = "node", python: str = "python3", silence_s: float = 20):
    return NodeShell(host, argv or SHELL, python, silence_s)


def order(staged: tuple[Path, ...], local: Path, *, seen: bool = False, verify: bool = False):
    """What a node is to have; where the source is not `seen` all must be sent."""
    source = staged[0].parent if seen else local / "elsewhere"
    return NodeOrder(source, str(local), staged, verify)


def same(staged: tuple[Path, ...], local: Path) -> None:
    """The node has exactly what is staged, by Paceline's own reading of it."""
    for folder in staged:
        copy = local / folder.name
        assert asset_state(copy) == "staged" and verify(copy, folder.name) == []
        assert (copy / "manifest.json").read_text() == (folder / "manifest.json").read_text()
        assert not (copy / PARTIAL_FOLDER).exists()


@pytest.mark.parametrize("seen", [False, True], ids=["sent", "shared"])
def test_a_node_has_all_of_it_and_a_second_call_copies_nothing(
    staged: tuple[Path, ...], tmp_path: Path, seen: bool
):
    local = tmp_path / "there"
    (first,) = on_nodes([shell()], order(staged, local, seen=seen))
    assert (first.state, first.way) == ("staged", "shared" if seen else "sent")
    assert (first.copied, first.come_bytes) == (tuple(f.name for f in staged), TOTAL + 100)
    same(staged, local)
    assert os.access(local / staged[0].name / CONTENT_FOLDER / "a.bin", os.X_OK)
    (again,) = on_nodes([shell()], order(staged, local, seen=seen))
    assert (again.state, again.way, again.copied, again.come_bytes) == ("staged", None, (), 0)


def test_what_was_changed_there_is_found_and_mended_by_those_files_alone(
    staged: tuple[Path, ...], tmp_path: Path
):
    local = tmp_path / "there"
    on_nodes([shell()], order(staged, local))
    content = local / staged[0].name / CONTENT_FOLDER
    (content / "c.txt").write_bytes(b"x" * 10)
    (content / "deep" / "b.bin").unlink()
    (content / "more").write_text("more")
    (wrong,) = on_nodes([shell()], order(staged, local, verify=True))
    assert wrong.state == "damaged" and wrong.fault is None
    assert sorted(fault[1:] for fault in wrong.faults) == [
        ("c.txt", "changed"),
        ("deep/b.bin", "missing"),
        ("more", "extra"),
    ]
    assert asset_state(content.parent) == "damaged"
    (mended,) = on_nodes([shell()], order(staged, local))
    assert (mended.copied, mended.come_bytes) == ((staged[0].name,), 700_010)
    same(staged, local)


class EndsWith(StageEnd):
    """The end comes when a file is there."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def check(self, where: str) -> None:
        if self.file.exists():
            self.set()
        super().check(where)


def test_a_copy_that_was_broken_off_goes_on_with_what_is_whole(
    staged: tuple[Path, ...], tmp_path: Path
):
    local = tmp_path / "there"
    whole = local / staged[0].name / PARTIAL_FOLDER / "done" / "c.txt"
    with pytest.raises(StageEndedError):
        on_nodes([shell()], order(staged, local), ended=EndsWith(whole))
    assert whole.exists() and asset_state(local / staged[0].name) == "partial"
    (again,) = on_nodes([shell()], order(staged, local))
    assert (again.state, again.come_bytes) == ("staged", FILES["deep/b.bin"] + 100)
    same(staged, local)


@pytest.mark.parametrize("seen", [False, True], ids=["sent", "shared"])
@pytest.mark.parametrize("fault", ["cut", "changed", "too long"])
def test_a_file_goes_on_where_it_was_cut_unless_that_part_is_at_fault(
    staged: tuple[Path, ...], tmp_path: Path, seen: bool, fault: str
):
    content = (staged[0] / CONTENT_FOLDER / "deep" / "b.bin").read_bytes()
    begin = {"cut": content[:400_000], "changed": b"x" * 400_000, "too long": content + b"x"}[fault]
    local = tmp_path / "there"
    partial = local / staged[0].name / PARTIAL_FOLDER
    partial.mkdir(parents=True)
    digest = hashlib.sha256(content).hexdigest()
    (partial / underway_name("deep/b.bin", digest)).write_bytes(begin)
    (partial / underway_name("deep/b.bin", "0" * 64)).write_bytes(b"of another revision")
    (there,) = on_nodes([shell()], order(staged, local, seen=seen))
    more = {"cut": -400_000, "changed": 300_000, "too long": 0}[fault]
    assert (there.state, there.come_bytes) == ("staged", TOTAL + 100 + more)
    same(staged, local)


def test_a_file_that_became_a_link_after_it_was_cut_is_told(
    staged: tuple[Path, ...], tmp_path: Path
):
    source, local = staged[0] / CONTENT_FOLDER / "deep" / "b.bin", tmp_path / "there"
    content = source.read_bytes()
    partial = local / staged[0].name / PARTIAL_FOLDER
    partial.mkdir(parents=True)
    digest = hashlib.sha256(content).hexdigest()
    (partial / underway_name("deep/b.bin", digest)).write_bytes(content[:400_000])
    source.unlink()
    source.symlink_to("elsewhere")
    ends_anyway = shell("timeout", "20", *SHELL)
    (there,) = on_nodes([ends_anyway], order(staged, local, seen=True))
    assert "deep/b.bin is not what the manifest says" in str(there.fault)


def test_a_file_that_became_a_shorter_link_is_never_sent(staged: tuple[Path, ...], tmp_path: Path):
    source = staged[0] / CONTENT_FOLDER / "c.txt"
    source.unlink()
    source.symlink_to("short")
    ends_anyway = shell("timeout", "20", *SHELL)
    with pytest.raises(SystemFaultError, match=r"c\.txt: ends before the 10 bytes"):
        on_nodes([ends_anyway], order(staged, tmp_path / "there"))


def test_nodes_that_fail_are_told_with_the_cause_and_the_others_end(
    staged: tuple[Path, ...], tmp_path: Path
):
    local = tmp_path / "there"
    refused = "echo noise; echo 'me@bad: Permission denied (publickey).' >&2; exit 255"
    shells = [
        shell(host="good", python="/another/python3"),
        shell("sh", "-c", refused, host="bad"),
        shell("sleep", "60", host="silent", silence_s=0.5),
        shell("env", "PATH=/none", "/bin/bash", "-s", host="without", python="/no/python3"),
    ]
    good, bad, silent, without = on_nodes(shells, order(staged, local))
    assert good.state == "staged" and {bad.state, silent.state, without.state} == {"failed"}
    same(staged, local)
    assert bad.fault == "refuses the log-in without a password"
    assert silent.fault == "said nothing for 0.5 s"
    assert without.fault == "has neither /no/python3 nor a python3"


def test_what_is_not_what_the_manifest_says_is_never_staged(
    staged: tuple[Path, ...], tmp_path: Path
):
    local = tmp_path / "there"
    file = staged[0] / CONTENT_FOLDER / "a.bin"
    content = file.read_bytes()
    file.write_bytes(b"x" + content[1:])
    (wrong,) = on_nodes([shell()], order(staged, local))
    assert wrong.state == "failed" and "a.bin: what was sent is not" in str(wrong.fault)
    assert wrong.assets[staged[0].name] != "staged"
    file.write_bytes(content[:1000])
    with pytest.raises(SystemFaultError, match="ends before the"):
        on_nodes([shell()], order(staged, tmp_path / "short"))
    assert asset_state(tmp_path / "short" / staged[0].name) == "partial"


@pytest.mark.skipif(not can_mount(), reason="no disk can be mounted here")
@pytest.mark.parametrize(
    ("disk", "told"),
    [
        ("size=512k", "1.0 MB are to come and 0.5 MB are free"),
        ("nr_inodes=6", "3 files are to come and 1 is free (inodes)"),
    ],
)
def test_a_disk_of_a_node_that_has_no_room_is_told_before_anything_is_sent(
    staged: tuple[Path, ...], tmp_path: Path, disk: str, told: str
):
    local = tmp_path / "there"
    local.mkdir()
    mounting = f"mount -t tmpfs -o {disk} none {local} && exec bash -s"
    small = shell("unshare", "--mount", "bash", "-c", mounting)
    (full,) = on_nodes([small], order(staged, local))
    assert (full.state, full.come_bytes) == ("failed", 0) and told in str(full.fault)


def test_a_node_gets_no_file_that_is_none_of_the_asset(staged: tuple[Path, ...], tmp_path: Path):
    say = f"""read -r program; echo '{{"word": "send", "folder": "{staged[0].name}", """
    say += """"files": [["../../passwords", 0]]}'; sleep 9"""
    with pytest.raises(SystemFaultError, match="asks for what is no file"):
        on_nodes([shell("bash", "-c", say)], order(staged, tmp_path / "there"))


@pytest.mark.parametrize(
    "line",
    [
        '{"word": "here"}',
        '{"word": "here", "states": 7, "shared": true}',
        '{"word": "at", "phase": "x", "present": "many", "come": 1}',
        '{"word": "send", "folder": "none", "files": []}',
        '{"word": "send", "folder": "FOLDER", "files": ["a.bin"]}',
        '{"word": "send", "folder": "FOLDER", "files": [["a.bin", -1]]}',
        '{"word": "send", "folder": "FOLDER", "files": [["a.bin", 300001]]}',
        '{"word": "fault", "what": 7}',
        '{"word": "asset", "folder": ["a"], "state": "staged"}',
    ],
)
def test_a_node_that_answers_otherwise_than_its_program_fails_alone(
    staged: tuple[Path, ...], tmp_path: Path, line: str
):
    line = line.replace("FOLDER", staged[0].name)
    hostile = shell("bash", "-c", f"echo '{line}'; exec cat >/dev/null")
    (outcome,) = on_nodes([hostile], order(staged, tmp_path / "there"))
    assert (outcome.state, outcome.fault) == ("failed", "says what its program never would")
