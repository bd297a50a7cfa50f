"""Assets copied to a node by the real rsync; a shell of this machine plays the node."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from paceline.files.staged import CONTENT_FOLDER, MANIFEST_FILE, PARTIAL_FOLDER, asset_state
from paceline.staging.connection import StagingStoppedError, StopSignal
from paceline.staging.node_copies import PARTIAL, NodeShell, NodeSyncRequest, sync_nodes
from paceline.staging.plan import staging_plan
from paceline.staging.stager import Stager
from paceline.staging.verification import verify
from tests.clusters.bed.needs import need_programs
from tests.staging.mirror import Mirror
from tests.staging.staged import noise, recipe_of

FILES = {"a.bin": 300_000, "deep/b.bin": 700_000, "c.txt": 10}
TOTAL = sum(FILES.values())
SHELL = ("bash", "--noprofile", "--norc", "-s")


@pytest.fixture(autouse=True, scope="module")
def rsync() -> None:
    """Of this machine."""
    need_programs("rsync")


def can_mount() -> bool:
    """Whether this user may have mounts of his own."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    return (
        subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]).returncode
        == 0
    )


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


LATE = """shift
"$@" <&0 2>"$0" & exec <&- >&-
wait $!; code=$?
sleep 0.5; cat "$0" >&2; exit $code"""
"""A remote shell whose standard error comes after the end of the connection, as ssh's may."""


def shell(*argv: str, host: str = "node", silence_s: int = 20):
    return NodeShell(host, argv or SHELL, ("bash", "-c", 'exec "$@"'), silence_s)


def order(staged: tuple[Path, ...], local: Path, *, seen: bool = False, verify: bool = False):
    """What a node is to have; where the source is not `seen` all must be sent."""
    source = staged[0].parent if seen else local / "elsewhere"
    return NodeSyncRequest(source, str(local), staged, verify)


def same(staged: tuple[Path, ...], local: Path) -> None:
    """The node has exactly what is staged, by Paceline's own reading of it."""
    for folder in staged:
        copy = local / folder.name
        assert asset_state(copy) == "staged" and verify(copy, folder.name) == []
        assert (copy / "manifest.json").read_text() == (folder / "manifest.json").read_text()
        assert not (copy / PARTIAL_FOLDER).exists()


def test_an_ipv6_address_is_no_daemon_of_rsync(staged: tuple[Path, ...], tmp_path: Path):
    (node,) = sync_nodes([shell(host="fd00::5")], order(staged, tmp_path / "there"))
    assert (node.state, node.transfer, node.fault) == ("staged", "sent", None)
    same(staged, tmp_path / "there")


def test_a_digest_that_a_shell_would_run_makes_no_manifest(staged: tuple[Path, ...]):
    manifest = staged[1] / MANIFEST_FILE
    text = manifest.read_text()
    for digest in (word for word in text.split('"') if len(word) == 64):
        manifest.write_text(text.replace(digest, "0;touch x"))
        assert asset_state(staged[1]) == "damaged"


@pytest.mark.parametrize("seen", [False, True], ids=["sent", "shared"])
def test_a_node_has_all_of_it_and_a_second_call_copies_nothing(
    staged: tuple[Path, ...], tmp_path: Path, seen: bool
):
    local = tmp_path / "there"
    (first,) = sync_nodes([shell()], order(staged, local, seen=seen))
    assert (first.state, first.transfer) == ("staged", "shared" if seen else "sent")
    assert (first.copied_assets, first.bytes_copied) == (tuple(f.name for f in staged), TOTAL + 100)
    same(staged, local)
    assert os.access(local / staged[0].name / CONTENT_FOLDER / "a.bin", os.X_OK)
    (again,) = sync_nodes([shell()], order(staged, local, seen=seen))
    assert (again.state, again.transfer, again.copied_assets, again.bytes_copied) == (
        "staged",
        None,
        (),
        0,
    )


def test_what_was_changed_there_is_found_and_mended_by_those_files_alone(
    staged: tuple[Path, ...], tmp_path: Path
):
    local = tmp_path / "there"
    sync_nodes([shell()], order(staged, local))
    content = local / staged[0].name / CONTENT_FOLDER
    (content / "c.txt").write_bytes(b"x" * 10)
    (content / "deep" / "b.bin").unlink()
    (content / "more").write_text("more")
    (wrong,) = sync_nodes([shell()], order(staged, local, verify=True))
    assert wrong.state == "damaged" and wrong.fault is None
    assert sorted(fault[1:] for fault in wrong.faults) == [
        ("c.txt", "changed"),
        ("deep/b.bin", "missing"),
        ("more", "extra"),
    ]
    assert asset_state(content.parent) == "damaged"
    (node,) = sync_nodes([shell()], order(staged, local))
    assert (node.copied_assets, node.bytes_copied) == ((staged[0].name,), 700_010)
    same(staged, local)


def test_an_interrupted_copy_resumes_inside_a_file(staged: tuple[Path, ...], tmp_path: Path):
    local = tmp_path / "there"
    partial = local / staged[0].name / CONTENT_FOLDER / "deep" / PARTIAL
    partial.mkdir(parents=True)
    begin = (staged[0] / CONTENT_FOLDER / "deep" / "b.bin").read_bytes()[:400_000]
    (partial / "b.bin").write_bytes(begin)
    assert asset_state(local / staged[0].name) == "partial"
    (there,) = sync_nodes([shell()], order(staged, local))
    assert there.state == "staged"
    assert there.bytes_copied == pytest.approx(TOTAL + 100 - 400_000, abs=5_000)
    same(staged, local)


def test_the_end_kills_what_copies(staged: tuple[Path, ...], tmp_path: Path):
    ended = StopSignal()
    threading.Timer(0.3, ended.set).start()
    with pytest.raises(StagingStoppedError):
        sync_nodes([shell("sleep", "60")], order(staged, tmp_path / "there"), stop=ended)


def test_a_file_that_became_a_link_is_told(staged: tuple[Path, ...], tmp_path: Path):
    source = staged[0] / CONTENT_FOLDER / "c.txt"
    source.unlink()
    source.symlink_to("elsewhere")
    (there,) = sync_nodes([shell()], order(staged, tmp_path / "there"))
    assert "c.txt differs from the manifest" in str(there.fault)


def test_nodes_that_fail_are_told_with_the_cause_and_the_others_end(
    staged: tuple[Path, ...], tmp_path: Path
):
    local = tmp_path / "there"
    refused = "echo noise; echo 'me@bad: Permission denied (publickey).' >&2; exit 255"
    shells = [
        shell(host="good"),
        shell("sh", "-c", refused, host="bad"),
        shell("sleep", "60", host="silent", silence_s=1),
        shell("bash", "-c", "while echo a; do sleep 0.1; done", host="endless", silence_s=1),
        shell("env", "PATH=/none", "/bin/bash", "-s", host="without"),
        shell("bash", "-c", "echo staged; cat >/dev/null", host="odd"),
    ]
    good, *failed = sync_nodes(shells, order(staged, local))
    assert good.state == "staged" and {outcome.state for outcome in failed} == {"failed"}
    same(staged, local)
    assert [outcome.fault for outcome in failed] == [
        "refuses to log in without a password",
        "no response for 1 s",
        "no response for 1 s",
        "has no rsync or sha256sum",
        "unexpected output from the node's shell",
    ]


def test_what_is_not_what_the_manifest_says_is_never_staged(
    staged: tuple[Path, ...], tmp_path: Path
):
    local = tmp_path / "there"
    file = staged[0] / CONTENT_FOLDER / "a.bin"
    file.write_bytes(b"x" + file.read_bytes()[1:])
    (wrong,) = sync_nodes([shell()], order(staged, local))
    assert wrong.state == "failed" and "a.bin differs from the manifest" in str(wrong.fault)
    assert wrong.assets[staged[0].name] == "partial"
    assert asset_state(local / staged[0].name) == "partial"


@pytest.mark.skipif(not can_mount(), reason="no disk can be mounted here")
@pytest.mark.parametrize("disk", ["size=512k", "nr_inodes=6"])
def test_a_full_disk_of_a_node_is_told(staged: tuple[Path, ...], tmp_path: Path, disk: str):
    local = tmp_path / "there"
    local.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", disk, "none", str(local)], check=True)
    try:
        (full,) = sync_nodes([shell()], order(staged, local))
    finally:
        subprocess.run(["umount", str(local)], check=True)
    assert (full.state, full.fault) == ("failed", "the disk is full")


@pytest.mark.skipif(not can_mount(), reason="no disk can be mounted here")
def test_what_a_node_says_at_its_end_is_heard(staged: tuple[Path, ...], tmp_path: Path):
    local = tmp_path / "there"
    local.mkdir()
    late = NodeShell("node", SHELL, ("bash", "-c", LATE, str(tmp_path / "messages")), 20)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(local)], check=True)
    try:
        (full,) = sync_nodes([late], order(staged, local))
    finally:
        subprocess.run(["umount", str(local)], check=True)
    assert (full.state, full.fault) == ("failed", "the disk is full")


@pytest.mark.parametrize(
    ("errors", "fault"),
    [
        ("mkdir: no\nsrun: error: node: task 0: Exited with exit code 1\n", "mkdir: no"),
        ("srun: error: Unable to create step\n", "srun: error: Unable to create step"),
        ("rsync: [receiver] odd\nrsync error: odd (code 12)\n", "rsync: [receiver] odd"),
        ("", "exited with code 7 without output"),
    ],
    ids=["task", "srun", "rsync", "silent"],
)
def test_a_fault_without_a_known_cause_is_told_as_the_node_says_it(
    staged: tuple[Path, ...], tmp_path: Path, errors: str, fault: str
):
    words = ("bash", "-c", 'cat >/dev/null; printf %s "$0" >&2; exit 7', errors)
    (failed,) = sync_nodes([shell(*words)], order(staged, tmp_path / "there"))
    assert (failed.state, failed.fault) == ("failed", fault)
