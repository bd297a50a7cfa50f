"""Archives of others: nothing leaves its folder, nothing fills the disk or the memory."""

from __future__ import annotations

import gzip
import io
import shutil
import subprocess
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.core.errors import SystemFaultError, UserError
from paceline.files.archive import ArchivedFile, ArchiveLimits, first_name, unpack, write_archive


def packed(tmp_path: Path, *members: tarfile.TarInfo, content: bytes = b"x" * 8) -> Path:
    """An archive of these members; those that are files hold `content`."""
    path = tmp_path / "hostile.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for member in members:
            member.size = len(content) if member.isreg() else 0
            archive.addfile(member, io.BytesIO(content))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)
    header.type, header.linkname = kind, target
    return header


HOSTILE = {
    "a path to the root": (member("/etc/passwd"),),
    "a path upwards": (member("run/../../outside"),),
    "a backslash": (member("run\\..\\outside"),),
    "a letter that is none": (member("run/\x1b[2J"),),
    "a symbolic link": (member("run/link", tarfile.SYMTYPE, "/etc"), member("run/link/passwd")),
    "a hard link": (member("run/link", tarfile.LNKTYPE, "/etc/passwd"),),
    "a device": (member("run/zero", tarfile.CHRTYPE),),
    "a pipe": (member("run/pipe", tarfile.FIFOTYPE),),
    "a name twice": (member("run/a"), member("./run/a")),
    "a file that is a folder": (member("run/a"), member("run/a/b")),
    "a sparse file": (member("run/sparse", tarfile.GNUTYPE_SPARSE),),
}


@pytest.mark.parametrize("members", HOSTILE.values(), ids=HOSTILE)
def test_what_leads_out_of_its_folder_is_refused(
    tmp_path: Path, members: tuple[tarfile.TarInfo, ...]
):
    folder = tmp_path / "here"
    folder.mkdir()

    with pytest.raises(UserError):
        unpack(packed(tmp_path, *members), folder)

    assert {path.name for path in tmp_path.iterdir()} == {"here", "hostile.tar.gz"}
    assert not any(path.is_symlink() for path in folder.rglob("*"))


def test_links_can_be_skipped_and_are_reported(tmp_path: Path):
    path = packed(tmp_path, member("a"), member("b", tarfile.SYMTYPE, "/etc"), member("./c/d"))

    held = unpack(path, tmp_path / "here", skip_links=True)

    assert held.files == ("a", "c/d") and held.skipped_links == ("b",)
    assert not (tmp_path / "here/b").exists()


@pytest.mark.parametrize(
    ("limits", "words"),
    [(ArchiveLimits(files=2), "2 members"), (ArchiveLimits(total_bytes=20), "20 bytes")],
)
def test_a_bomb_is_refused_before_it_is_written(tmp_path: Path, limits: ArchiveLimits, words: str):
    path = packed(tmp_path, *(member(f"run/{number}") for number in range(3)))

    with pytest.raises(UserError, match=words):
        unpack(path, tmp_path / "here", limits=limits)


def test_a_header_that_would_fill_the_memory_is_refused(tmp_path: Path):
    """A header of a name is read into memory whole, whatever its size."""
    header = member("x", tarfile.XHDTYPE)
    header.size = 1 << 33
    path = tmp_path / "bomb.tar.gz"
    path.write_bytes(gzip.compress(header.tobuf(tarfile.GNU_FORMAT) + bytes(1 << 20)))

    with pytest.raises(UserError, match="has a header of"):
        unpack(path, tmp_path / "here")


def extended(name: str, fields: dict[str, str]) -> bytes:
    """An empty file behind a header that holds `fields`."""
    header = member(name)
    header.pax_headers = fields
    return header.tobuf(tarfile.PAX_FORMAT)


def behind_global(name: str, fields: dict[str, str]) -> bytes:
    """An empty file behind a header for all that follow, as `git archive` writes one."""
    return tarfile.TarInfo.create_pax_global_header(fields) + member(name).tobuf()


@pytest.mark.parametrize("form", [extended, behind_global])
def test_what_the_headers_of_a_member_say_is_forgotten_with_it(
    tmp_path: Path, form: Callable[[str, dict[str, str]], bytes]
):
    parts = (form(f"run/{at}", {f"a{at}.{n}": "" for n in range(2_000)}) for at in range(20))
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(b"".join(parts) + bytes(1024)))

    tracemalloc.start()
    try:
        held = unpack(path, tmp_path / "here")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    # One member's headers take less than 1 MB, all of them more than 5 MB.
    assert len(held.files) == 20 and peak < 3_000_000


def test_many_headers_before_one_member_are_refused(tmp_path: Path):
    whole = extended("run/a", {"comment": "x" * 200_000})
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(whole[:-512] * 8 + whole[-512:] + bytes(1024)))

    with pytest.raises(UserError, match="whose headers have more than"):
        unpack(path, tmp_path / "here")


def test_the_map_of_a_sparse_file_cannot_fill_the_memory(tmp_path: Path):
    """Pax's sparse files begin with a map of any length, which the library reads into a list."""
    header = extended("run/a", {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"})
    path = tmp_path / "bomb.tar.gz"
    path.write_bytes(gzip.compress(header + b"1000000000\n" + b"0\n" * (1 << 22)))

    with pytest.raises(UserError, match="whose headers have more than"):
        unpack(path, tmp_path / "here")


ODD = (
    {"GNU.sparse.size": "abc"},
    {"GNU.sparse.map": "x"},
    {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"},
)


@pytest.mark.parametrize("fields", ODD, ids=lambda fields: " ".join(fields))
def test_invalid_headers_are_reported_as_a_broken_archive(tmp_path: Path, fields: dict[str, str]):
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(extended("run/a", fields) + b"x" * 512 + bytes(1024)))

    for read in (lambda: unpack(path, tmp_path / "here"), lambda: first_name(path)):
        with pytest.raises(UserError, match="cannot be read as an archive"):
            read()


@pytest.mark.parametrize(
    "content",
    [b"", b"no archive", gzip.compress(b"no archive" * 99, mtime=0)],
    ids=["empty", "text", "packed text"],
)
def test_a_file_that_is_not_an_archive_is_refused(tmp_path: Path, content: bytes):
    (tmp_path / "a.tar.gz").write_bytes(content)

    with pytest.raises(UserError, match="cannot be read as an archive"):
        unpack(tmp_path / "a.tar.gz", tmp_path / "here")


def tar_of(*members: tarfile.TarInfo) -> bytes:
    return b"".join(header.tobuf() for header in members)


TORN = {
    "inside a file": lambda whole: gzip.compress(gzip.decompress(whole)[:9_000]),
    "of the packed bytes": lambda whole: whole[:-300],
    "between two members": lambda _: tar_of(member("run/a")),
    "a header's checksum": lambda _: tar_of(member("run/a")) + b"x" * 512 + bytes(1024),
    "before its checksum": lambda whole: whole[:-8],
    "its checksum": lambda whole: whole[:-8] + bytes(4) + whole[-4:],
}


@pytest.mark.parametrize("tear", TORN.values(), ids=TORN)
def test_a_truncated_or_corrupt_archive_is_refused(tmp_path: Path, tear: Callable[[bytes], bytes]):
    path = packed(tmp_path, member("run/a"), content=bytes(range(256)) * 400)
    path.write_bytes(tear(path.read_bytes()))

    with pytest.raises(UserError):
        unpack(path, tmp_path / "here")


def test_zstd_is_read_by_its_program_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = shutil.which("zstd")
    path = packed(tmp_path, member("run/a"))
    zst = tmp_path / "a.tar.zst"
    zst.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(9))
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        with pytest.raises(SystemFaultError, match="apt install zstd"):
            unpack(zst, tmp_path / "nowhere")
    if program is None:
        pytest.skip("no program zstd here")
    tar = gzip.decompress(path.read_bytes()) + bytes(1 << 20)
    whole = subprocess.run([program, "-c"], input=tar, stdout=subprocess.PIPE, check=True).stdout

    zst.write_bytes(whole)
    assert unpack(zst, tmp_path / "here").files == ("run/a",)

    zst.write_bytes(whole[:-4] + bytes(4))
    with pytest.raises(UserError, match="is damaged"):
        unpack(zst, tmp_path / "there")


def test_the_same_files_give_the_same_bytes(tmp_path: Path):
    long = "folder/" * 30 + "file"
    members = [ArchivedFile("a", 3, lambda: io.BytesIO(b"abc")), ArchivedFile(long, 0, io.BytesIO)]
    for name in ("one.tar.gz", "two.tar.gz"):
        write_archive(tmp_path / name, members)

    assert (tmp_path / "one.tar.gz").read_bytes() == (tmp_path / "two.tar.gz").read_bytes()
    assert unpack(tmp_path / "one.tar.gz", tmp_path / "here").files == ("a", long)
    with pytest.raises(UserError, match="already exists"):
        write_archive(tmp_path / "one.tar.gz", members)
    assert len(list(tmp_path.iterdir())) == 3
