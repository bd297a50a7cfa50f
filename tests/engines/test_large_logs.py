"""The benchmark of speed and memory in short form: the program itself on files made for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.files.log_file import MAX_LINE_BYTES
from tests.engines.promises import check_parse

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "parse_speed.py"
SIZE = 12 << 20
FILES = ("maxtext", "no line end", "carriage returns only", "near matches", "zeros in gzip")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("large")
    result = folder / "result.json"
    command = [
        sys.executable,
        str(BENCHMARK),
        "--size",
        str(SIZE),
        "--only",
        ",".join(FILES),
        "--folder",
        str(folder),
        "--result",
        str(result),
    ]
    subprocess.run(command, capture_output=True, text=True)
    by_file = {row["file"]: row for row in json.loads(result.read_text())["rows"]}
    assert sorted(folder.iterdir()) == [result]
    return by_file


def test_every_file_asked_for_is_read(rows):
    assert set(FILES) <= rows.keys()
    assert all(row["bytes"] > 0.9 * SIZE for row in map(rows.get, FILES) if row)


def test_a_log_keeps_its_steps_and_its_share_of_bytes(rows):
    assert rows["maxtext"]["status"] == "ok"
    assert rows["maxtext"]["steps"] == SIZE // 358
    assert rows["maxtext, steps only"]["steps"] == SIZE // 358


@pytest.mark.parametrize("file", FILES[1:])
def test_what_is_no_log_is_said_to_be_none(rows, file):
    assert rows[file]["status"] in ("not-a-training-log", "truncated")


def test_the_memory_of_the_reading_process_is_measured(rows):
    assert all(20 < row["peak_mib"] < 120 for row in rows.values())


@pytest.mark.parametrize(
    "content", [b"x", b"completed step: 1, seconds: 1.5, "], ids=["x", "steps"]
)
def test_lines_that_were_cut_are_reported(content, tmp_path):
    path = tmp_path / "a.log"
    path.write_bytes(content * (3 * MAX_LINE_BYTES // len(content)) + b"\n")
    document = check_parse(path)

    assert "lines longer than 1 MiB, which were truncated: 1" in document["warnings"]
