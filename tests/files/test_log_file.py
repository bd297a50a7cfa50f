"""Log files come as blocks of whole lines, whatever is in them."""

from __future__ import annotations

import gzip
import os
import re
import tracemalloc
from contextlib import AbstractContextManager
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.files import documents, log_file
from paceline.files.log_file import BLOCK_BYTES, MAX_LINE_BYTES, LogFile

BLOCK, LONGEST, RECORD = 64, 64, 48
"""The sizes under which the rules are tried with texts that fit on a screen."""

PIECES = st.sampled_from([b"\n", b"\r", b"\r\n", b"step 1", b"\x00\xff", b"x" * 30, b"y" * 70, b""])
TEXTS = st.lists(PIECES, max_size=30).map(b"".join)


def small_sizes() -> AbstractContextManager[None]:
    return mock.patch.multiple(
        log_file, BLOCK_BYTES=BLOCK, MAX_LINE_BYTES=LONGEST, RECORD_BYTES=RECORD
    )


def lines_of(text: bytes) -> list[bytes]:
    return [line for line in re.split(rb"[\r\n]", text) if line]


def write(folder: Path, content: bytes, name: str = "a.log") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gzip"])
@given(text=TEXTS)
@settings(deadline=None)
def test_nothing_is_lost_but_what_is_beyond_the_longest_line(folder, compress, text):
    with small_sizes():
        file = LogFile(write(folder, compress(text)))
        blocks = list(file)

    lines = lines_of(text)
    assert lines_of(b"".join(blocks)) == [line[:LONGEST] for line in lines]
    assert file.cut_lines == sum(len(line) > LONGEST for line in lines)
    assert file.num_bytes == len(text)
    assert file.read_error is None
    assert file.ends_in_line == (text != b"" and text[-1:] not in b"\r\n")


@given(text=TEXTS)
@settings(deadline=None)
def test_every_block_ends_with_a_line(folder, text):
    with small_sizes():
        blocks = list(LogFile(write(folder, text)))

    assert all(blocks)
    assert all(block[-1:] in b"\r\n" for block in blocks[:-1])
    assert all(len(block) <= BLOCK + LONGEST + 1 for block in blocks)


@given(st.lists(st.sampled_from([b"\r\n", b"word\r\n", b"\r"]), max_size=60).map(b"".join))
@settings(deadline=None)
def test_a_line_end_of_two_characters_is_not_split(folder, text):
    with small_sizes():
        blocks = list(LogFile(write(folder, text)))

    assert b"".join(blocks) == text
    assert not any(block.startswith(b"\n") for block in blocks)


@given(st.lists(st.sampled_from([b" a 1 |\n", b" a 2 |\n   b 3 |\n", b" a 4\n b\n c |\r\n"])))
@settings(deadline=None)
def test_a_wrapped_record_stays_in_one_block(folder, records):
    with small_sizes():
        blocks = list(LogFile(write(folder, b"".join(records)), begins=b" a "))

    assert b"".join(blocks) == b"".join(records)
    assert all(block.startswith(b" a ") for block in blocks)


def test_a_record_that_never_ends_is_not_waited_for(tmp_path):
    content = b"begin\n" + b"more\n" * 1_000_000
    blocks = list(LogFile(write(tmp_path, content), begins=b"begin"))

    assert b"".join(blocks) == content
    assert max(map(len, blocks)) < 2 * BLOCK_BYTES


@pytest.mark.parametrize("length", [MAX_LINE_BYTES, MAX_LINE_BYTES + 1, 3 * MAX_LINE_BYTES])
@pytest.mark.parametrize("before", [0, 1, MAX_LINE_BYTES // 2, MAX_LINE_BYTES - 1])
@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n", b""])
def test_whether_a_line_is_cut_depends_on_its_length_alone(tmp_path, length, before, end):
    first = b"f" * (before - 1) + b"\n" if before else b""
    last = b"last\n" if end else b""
    file = LogFile(write(tmp_path, first + b"m" * length + end + last))
    text = b"".join(file)

    assert file.cut_lines == (length > MAX_LINE_BYTES)
    assert text.count(b"m") == min(length, MAX_LINE_BYTES)
    assert text.count(b"f") == max(before - 1, 0)
    assert text.endswith(last or b"m" * 10 + b"\n" * file.cut_lines)


@pytest.mark.parametrize("content", [b"", b"\r", b"\n", b"\0"], ids=["sparse", "CR", "LF", "NUL"])
def test_a_file_without_lines_takes_little_memory(tmp_path, content):
    path = write(tmp_path, content * (48 << 20))
    os.truncate(path, 48 << 20)
    tracemalloc.start()
    try:
        total = sum(len(block) for block in LogFile(path))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert total == (48 << 20 if content in (b"\r", b"\n") else MAX_LINE_BYTES + 1)
    assert peak < 8 << 20


def test_the_same_object_can_be_read_again(tmp_path):
    file = LogFile(write(tmp_path, b"x" * (2 * MAX_LINE_BYTES) + b"\ny"))
    first = list(file)

    assert list(file) == first
    assert file.cut_lines == 1
    assert file.num_bytes == 2 * MAX_LINE_BYTES + 2


def numbered_lines(n: int) -> bytes:
    return b"".join(b"line %d of a log\n" % i for i in range(n))


def test_a_gzip_file_may_have_many_members(tmp_path):
    content = numbered_lines(200_000)
    parts = [content[i : i + 100_000] for i in range(0, len(content), 100_000)]
    file = LogFile(write(tmp_path, b"".join(map(gzip.compress, [*parts, b""]))))

    assert b"".join(file) == content
    assert file.read_error is None


def test_a_log_of_one_repeated_line_is_read_to_its_end(tmp_path):
    content = b"WARNING: the tokenizer has no padding token\n" * 2_000_000
    assert sum(map(len, LogFile(write(tmp_path, gzip.compress(content, 9))))) == len(content)


def test_lines_count_towards_the_limit_of_a_gzip_file(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MIN_EXPANDED_BYTES", 1000)
    monkeypatch.setattr(documents, "MAX_EXPANSION", 1)
    path = write(tmp_path, gzip.compress(b"a line\n" * 1000))
    with documents.open_expanded(path) as file, pytest.raises(OSError, match="expands to more"):
        while file.readline():
            pass
    with documents.open_expanded(path) as file, pytest.raises(OSError, match="expands to more"):
        list(file)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_gzip_file_cut_short_gives_what_it_holds(tmp_path, share):
    content = numbered_lines(20_000)
    packed = gzip.compress(content)
    file = LogFile(write(tmp_path, packed[: int(share * len(packed))]))
    text = b"".join(file)

    assert content.startswith(text)
    assert len(text) > 0.8 * share * len(content)
    assert file.read_error is not None and "truncated" in file.read_error


def test_a_damaged_gzip_file_gives_the_text_before_the_damage(tmp_path):
    content = numbered_lines(2_000_000)
    packed = bytearray(gzip.compress(content))
    packed[len(packed) // 2] ^= 0xFF
    packed[len(packed) // 2 + 1] ^= 0xFF
    file = LogFile(write(tmp_path, bytes(packed)))
    text = b"".join(file)

    assert file.read_error is not None
    assert text[: int(0.45 * len(content))] == content[: int(0.45 * len(content))]


@pytest.mark.parametrize("tail", [b"garbage", b"\x1f\x8b", b"\x1f\x8b\x08"])
def test_garbage_after_a_gzip_member_is_reported(tmp_path, tail):
    file = LogFile(write(tmp_path, gzip.compress(b"a\n") + tail))

    assert b"".join(file) == b"a\n"
    assert file.read_error is not None


@pytest.mark.parametrize("content", [b"\x1f", b"\x1f\x8b", b"\x1f\x8b\x08\x00" + b"x" * 40])
def test_the_start_of_a_gzip_file_does_not_crash(tmp_path, content):
    file = LogFile(write(tmp_path, content))
    text = b"".join(file)

    assert text == content if content == b"\x1f" else file.read_error is not None


def test_a_packed_file_takes_as_little_memory_as_a_plain_one(tmp_path):
    path = write(tmp_path, gzip.compress(b"\0" * (64 << 20)))
    tracemalloc.start()
    try:
        total = sum(len(block) for block in LogFile(path))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert path.stat().st_size < 1 << 17
    assert total == MAX_LINE_BYTES + 1
    assert peak < 8 << 20


def test_what_cannot_be_opened_is_an_operating_system_error(tmp_path):
    with pytest.raises(OSError, match="is not a regular file"):
        list(LogFile(tmp_path))
    with pytest.raises(FileNotFoundError):
        list(LogFile(tmp_path / "nothing"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_an_operating_system_error(tmp_path):
    path = write(tmp_path, b"a\n")
    path.chmod(0)
    with pytest.raises(PermissionError):
        list(LogFile(path))


def test_a_pipe_is_no_log_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="is not a regular file"):
        list(LogFile(tmp_path / "pipe"))
