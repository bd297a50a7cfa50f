"""What quotas leave, by each reader; the programs of clusters are played by what they print."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.core.errors import SystemFaultError
from paceline.staging import room, stager
from paceline.staging.quotas import holders, programs, reading
from paceline.staging.quotas.kernel import kernel_limit
from paceline.staging.quotas.limits import QuotaAmount, QuotaAnswer, QuotaLimit
from paceline.staging.quotas.reading import read_quotas
from paceline.staging.room import StageRoom, stage_room
from tests.staging.mirror import Mirror
from tests.staging.staged import noise, recipe_of, stage_all

UNLIMITED = QuotaAmount(0)
Printing = Callable[[str, str], None]
Mounting = Callable[[str], Path]


@pytest.fixture
def printing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Printing:
    """A program of that name which runs this text of the shell."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def put(name: str, text: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)

    return put


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mounting:
    """A folder that the list of mounts says to be a file system of this type."""

    def mount(kind: str) -> Path:
        folder = tmp_path / "a place"
        folder.mkdir()
        table = tmp_path / "mountinfo"
        place = str(folder).replace(" ", r"\040")
        table.write_text(
            f"20 1 98:0 / / rw,relatime - ext4 /dev/vda rw\n"
            f"21 20 0:9 / {place} rw shared:1 - autofs systemd-1 rw\n"
            f"22 21 0:9 / {place} rw shared:1 - {kind} /dev/gpfs1 rw\n"
        )
        monkeypatch.setattr(holders, "MOUNTS", table)
        status = tmp_path / "status"
        status.write_text("CapEff:\t0000000000000000\n")
        monkeypatch.setattr(holders, "STATUS", status)
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        monkeypatch.setattr(os, "getegid", lambda: 100)
        return folder

    return mount


def said(answer: QuotaAnswer) -> dict[str, tuple[QuotaAmount, QuotaAmount]]:
    assert answer.unknown is None
    return {limit.kind: (limit.bytes, limit.files) for limit in answer.limits}


def test_the_kernel_is_asked_about_a_local_folder(tmp_path: Path):
    system = holders.mounted_system(tmp_path)
    answer = read_quotas(tmp_path)
    if reading.READERS.get(system.type) is kernel_limit and answer.unknown is not None:
        told = "the kernel does not tell them", "has nothing there yet"
        assert any(reason in answer.unknown for reason in told)


@pytest.mark.parametrize("kind", ["overlay", "btrfs"])
def test_a_file_system_whose_quotas_nobody_tells_stays_unknown(mounted: Mounting, kind: str):
    assert read_quotas(mounted(kind)).unknown == f"nobody is asked on {kind}"


def test_nfs_is_read_from_what_quota_prints(printing: Printing, mounted: Mounting):
    folder, grace = mounted("nfs4"), int(time.time()) + 3600
    printing(
        "quota",
        f"""case "$*" in
"-u -v -w -p -f {folder}") cat <<'END' ;;
Disk quotas for user alice (uid 1000): 
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
server:/home dir 9 25600*  20000   40000 {grace}       1      10      20       0
END
"-g -v -w -p -f {folder}") cat <<'END' ;;
Disk quotas for group other (gid 7): none
Disk quotas for group users (gid 100): 
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
server:/home dir 9 25600       0   50000       0      1*       1       0       1
END
esac
exit 1""",
    )
    shown = said(read_quotas(folder))
    of_bytes, of_files = shown["user"]
    assert (of_bytes.used, of_bytes.soft, of_bytes.hard) == (26214400, 20480000, 40960000)
    assert of_bytes.grace_s is not None and 3000 < of_bytes.grace_s <= 3600
    assert of_bytes.left == 40960000 - 26214400
    assert of_files == QuotaAmount(1, 10, 20) and of_files.left == 19
    of_bytes, of_files = shown["group"]
    assert of_bytes == QuotaAmount(26214400, None, 51200000)
    assert of_files == QuotaAmount(1, 1, None, 0) and of_files.left == 0


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        (
            "echo 'quota: error while getting quota from s:/h for a (id 1): refused' >&2; exit 1",
            "quota says: quota: error while getting quota from s:/h for a (id 1): refused",
        ),
        ("echo 'quota: Mountpoint not found'; exit 1", "quota says: quota: Mountpoint not found"),
        ("exit 3", "quota says: nothing of user"),
        ("exec yes", "quota says: "),
    ],
)
def test_what_quota_does_not_tell_stays_unknown(
    printing: Printing, mounted: Mounting, text: str, unknown: str
):
    printing("quota", text)
    answer = read_quotas(mounted("nfs"))
    assert answer.limits == () and str(answer.unknown).startswith(unknown)


def test_a_quota_that_says_nothing_is_not_waited_for(
    printing: Printing, mounted: Mounting, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(programs, "LIMIT_S", 0.3)
    printing("quota", "sleep 60 & wait")
    assert read_quotas(mounted("nfs")).unknown == "quota says nothing for 0.3 s"


def test_a_group_that_quota_does_not_name_leaves_the_user_known(
    printing: Printing, mounted: Mounting
):
    row = "s:/h 1 0 9 0 1 0 0 0"
    printing("quota", f"[ $1 = -u ] && echo 'Disk quotas for user a (uid 1000): ' && echo '{row}'")
    answer = read_quotas(mounted("nfs"))
    assert [(limit.kind, limit.bytes.left) for limit in answer.limits] == [("user", 8 << 10)]
    assert str(answer.unknown).startswith("quota says: nothing of group")


def test_a_program_that_is_not_there_is_named(mounted: Mounting, monkeypatch: pytest.MonkeyPatch):
    folder = mounted("lustre")
    monkeypatch.setenv("PATH", "/none")
    assert "the program lfs is not there" in str(read_quotas(folder).unknown)


def test_lustre_is_read_from_what_lfs_prints(printing: Printing, mounted: Mounting):
    printing(
        "lfs",
        """case "$*" in
  project*) echo "  4711 P $3" ;;
  *"-u 1000 "*) echo "$5"; echo "   5242880*  4194304 6291456  6d23h59m   12  0  1000000   -" ;;
  *"-g 100 "*) echo "$5  10  0  0  -  5  0  0  -"
     echo "gid 100 is using default block quota setting" ;;
  *"-p 4711 "*) echo "$5  90  80 100  expired  5*  4  9  none" ;;
esac""",
    )
    shown = said(read_quotas(mounted("lustre")))
    week = 7 * 86400
    assert shown == {
        "user": (
            QuotaAmount(5242880 << 10, 4194304 << 10, 6291456 << 10, week - 60),
            QuotaAmount(12, None, 1000000),
        ),
        "project": (QuotaAmount(90 << 10, 80 << 10, 100 << 10, 0), QuotaAmount(5, 4, 9)),
    }
    assert shown["project"][0].left == 0 and shown["project"][1].left == 4


def test_lustre_whose_figures_are_inaccurate_stays_unknown(printing: Printing, mounted: Mounting):
    printing("lfs", 'echo "$5  [10]  0  [20]  -  5  0  0  -"')
    assert "lfs says" in str(read_quotas(mounted("lustre")).unknown)


GPFS_HEADING = (
    "mmlsquota::HEADER:version:reserved:reserved:filesystemName:quotaType:id:name:blockUsage:"
    "blockQuota:blockLimit:blockInDoubt:blockGrace:filesUsage:filesQuota:filesLimit:"
    "filesInDoubt:filesGrace:remarks:quota:defQuota:fid:filesetname:"
)
GPFS_USER = "mmlsquota::0:1:::gpfs1:USR:1000:alice:104:100:200:0:2 days:40:0:500:0:none:e:on:off:::"


def test_gpfs_is_read_by_the_names_of_its_heading(printing: Printing, mounted: Mounting):
    group = "mmlsquota::0:1:::gpfs1:GRP:100:users:9:0:0:0:none:1:0:0:0:none:e:on:off:::"
    printing(
        "mmlsquota",
        f"""[ "$4" = gpfs1 ] || exit 1
echo '{GPFS_HEADING}'
case $2 in -u) echo '{GPFS_USER}' ;; -g) echo '{group}' ;; esac""",
    )
    assert said(read_quotas(mounted("gpfs"))) == {
        "user": (
            QuotaAmount(104 << 10, 100 << 10, 200 << 10, 2 * 86400),
            QuotaAmount(40, None, 500),
        )
    }


def test_gpfs_with_quotas_of_each_fileset_stays_unknown(printing: Printing, mounted: Mounting):
    printing("mmlsquota", f"echo '{GPFS_HEADING}'; echo '{GPFS_USER}'; echo '{GPFS_USER}'")
    assert "quotas of each fileset" in str(read_quotas(mounted("gpfs")).unknown)


def answers(bytes_: QuotaAmount = UNLIMITED, files: QuotaAmount = UNLIMITED) -> StageRoom:
    limit = QuotaLimit("user", "alice", bytes_, files)
    return StageRoom(1 << 40, None, QuotaAnswer((limit,)))


@pytest.mark.parametrize(
    ("place", "told"),
    [
        (
            answers(QuotaAmount(9000, None, 10_000)),
            "3.00 kB are to come and the quota of user alice leaves 1.00 kB; "
            "allowed: 10.0 kB (limit), 9.00 kB are used; make room, or give another place",
        ),
        (
            answers(QuotaAmount(9000, 8000, 100_000, 0)),
            "user alice leaves 0 B; allowed: 8.00 kB (soft limit, whose grace time is over)",
        ),
        (
            answers(files=QuotaAmount(2, None, 10)),
            "9 files are to come and the quota of user alice",
        ),
        (StageRoom(1 << 40, 8, QuotaAnswer()), "9 files are to come and 8 are free (inodes)"),
        (StageRoom(1 << 40, 1, QuotaAnswer()), "9 files are to come and 1 is free (inodes)"),
    ],
)
def test_what_a_quota_leaves_no_room_for_is_refused_before_anything_is_fetched(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: StageRoom, told: str
):
    monkeypatch.setattr(stager, "stage_room", lambda folder: place)
    with pytest.raises(SystemFaultError) as caught:
        stage_all(three_files(mirror), tmp_path / "stage")
    assert told in str(caught.value)
    assert not (tmp_path / "stage").exists()
    assert not any(mirror.gets(path) for path in mirror.files)


def test_what_exceeds_a_soft_limit_is_staged_and_told(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    notes: list[str] = []
    place = answers(QuotaAmount(9000, 10_000, 100_000), QuotaAmount(1, 40, 90))
    monkeypatch.setattr(stager, "stage_room", lambda folder: place)
    stage_all(three_files(mirror), tmp_path / "stage", tell=notes.append)
    assert [note[:55] for note in notes] == [
        "note: 3.00 kB more exceed the soft limit of user alice "
    ]


def three_files(mirror: Mirror):
    for number in range(3):
        mirror.files[f"/{number}"] = noise(1000, number)
    files = [{"path": name, "url": f"{mirror.url}/{name}"} for name in "012"]
    return recipe_of({"name": "it", "kind": "url", "source": mirror.url, "files": files})


def test_the_room_of_a_folder_that_is_not_there_is_that_of_the_one_around_it(tmp_path: Path):
    disk = os.statvfs(tmp_path)
    measured = stage_room(tmp_path / "not" / "there")
    assert measured.files_free is None or measured.files_free <= disk.f_files
    assert 0 < measured.bytes_free <= disk.f_blocks * disk.f_frsize
    assert room.quota_sentences(answers(QuotaAmount(1, None, 2001), QuotaAmount(1, None, 2))) == (
        "the quota of user alice leaves 2.00 kB and 1 file",
    )
