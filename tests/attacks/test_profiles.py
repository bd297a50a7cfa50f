"""Profiles of somebody else: bounded memory and time, and one clear line."""

from __future__ import annotations

import gzip
import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.reproductions import bounded, refused
from tests.command import paceline

MARKS = [
    {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{i}", "ts": 1000 * i, "dur": 900}
    for i in range(1, 9)
]
REPORT = """
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL(start, end, globalPid, correlationId, demangledName);
CREATE TABLE NVTX_EVENTS(start, end, textId, text);
INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES(1000000, 1000900, 16777216, 1, 1);
INSERT INTO NVTX_EVENTS VALUES(900000, 2000000, 7, NULL);
"""


def _long_fields() -> Iterator[bytes]:
    yield b"{"
    for number in range(40):
        yield b'"f%d":"' % number
        yield from [b"x" * 1_000_000] * 60
        yield b'",'
    yield json.dumps({"traceEvents": MARKS})[1:].encode()


def _many_lists() -> Iterator[bytes]:
    yield b'{"traceEvents":[['
    yield from [b"[]," * 1_000_000] * 21
    yield b"[]]]}"


def _blanks() -> Iterator[bytes]:
    yield from [b" " * (1 << 20)] * 300


@pytest.mark.parametrize("content", [_long_fields, _many_lists, _blanks])
def test_a_compressed_trace_takes_little_memory_and_time(tmp_path: Path, content: Any):
    trace = tmp_path / "trace.json.gz"
    with gzip.open(trace, "wb", 1) as file:
        file.writelines(content())
    words = ["probe", "profile", "--from", trace]
    refused(bounded(*words, runs=tmp_path), 1, "is not a complete")


@pytest.mark.parametrize(
    "document",
    [
        {"traceEvents": [*MARKS, {**MARKS[0], "name": "ProfilerStep#" + "9" * 20, "ts": 99000}]},
        {"distributedInfo": {"rank": 2**63}, "traceEvents": MARKS},
    ],
    ids=["step", "rank"],
)
def test_numbers_beyond_all_steps_and_ranks_are_passed_over(tmp_path: Path, document: Any):
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps(document))
    done = paceline("probe", "profile", "--from", trace, runs=tmp_path)
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("tool", ["nccl", "nsys", "torch"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_only_regular_files_are_profiles(tmp_path: Path, tool: str, kind: str):
    file = tmp_path / "profile.sqlite"
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")
    words = ["probe", "profile", "--tool", tool, "--from", file]
    refused(bounded(*words, runs=tmp_path, limit_s=30), 1, "not a regular file")


def _report(path: Path, script: str) -> Path:
    database = sqlite3.connect(path)
    database.executescript(REPORT + script)
    database.close()
    return path


def test_a_string_number_may_occur_twice(tmp_path: Path):
    strings = "(7, 'step 1'), (7, 'step 1'), (1, 'gemm')"
    script = f"CREATE TABLE StringIds(id, value); INSERT INTO StringIds VALUES {strings};"
    report = _report(tmp_path / "r.sqlite", script)
    done = paceline("probe", "profile", "--tool", "nsys", "--from", report, runs=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_column_that_computes_its_value_takes_little_memory(tmp_path: Path):
    column = "value TEXT GENERATED ALWAYS AS (hex(zeroblob(450000000))) VIRTUAL"
    script = f"CREATE TABLE StringIds(id INTEGER, {column}); INSERT INTO StringIds(id) VALUES (7);"
    report = _report(tmp_path / "r.sqlite", script)
    words = ["probe", "profile", "--tool", "nsys", "--from", report]
    refused(bounded(*words, runs=tmp_path), 1, "too big")


def test_marks_with_one_number_are_not_multiplied(tmp_path: Path):
    rows = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 20000)"
    script = (
        "CREATE TABLE StringIds(id, value);"
        f"{rows} INSERT INTO StringIds SELECT 7, 'step 1' FROM n;"
        f"{rows} INSERT INTO NVTX_EVENTS SELECT i, i + 5, 7, NULL FROM n;"
    )
    report = _report(tmp_path / "r.sqlite", script)
    words = ["probe", "profile", "--tool", "nsys", "--from", report]
    done = bounded(*words, runs=tmp_path)
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
