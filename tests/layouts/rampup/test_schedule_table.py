"""Schedules as people write them: Markdown from notes, CSV from tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.core.layout import Layout
from paceline.layouts.rampup.check import ScheduleLine, read_schedule
from tests.layouts.rampup.study import SCHEDULE_16GB, SCHEDULE_32GB


def table(tmp_path: Path, text: str) -> Path:
    """A file of it."""
    path = tmp_path / "schedule"
    path.write_text(text)
    return path


def test_the_tables_of_the_study_are_read(tmp_path: Path):
    schedule = read_schedule(table(tmp_path, SCHEDULE_16GB), Layout(pp=2))
    assert [(line.nodes, line.batch, line.layout.micro_batch) for line in schedule] == [
        (16, 32, 1),
        (16, 64, 2),
        (16, 128, 4),
        (32, 256, 4),
        (64, 512, 4),
    ]
    assert all(line.layout.pp == 2 for line in schedule)
    assert len(read_schedule(table(tmp_path, SCHEDULE_32GB), Layout())) == 3


def test_words_of_a_title_may_be_joined_as_people_write_them(tmp_path: Path):
    schedule = read_schedule(table(tmp_path, "Nodes,Global batch,Micro-batch\n1,32,4\n"), Layout())
    assert schedule == [ScheduleLine(1, 32, Layout(micro_batch=4))]


def test_axes_may_stand_in_the_table_in_any_order_of_lines(tmp_path: Path):
    text = "batch,nodes,tp,pp,recompute,zero\n512,8,2,4,full,1\n\n64,1,1,1,none,\n"
    schedule = read_schedule(table(tmp_path, text), Layout(zero_stage=3, micro_batch=2))
    assert schedule == [
        ScheduleLine(1, 64, Layout(zero_stage=3, micro_batch=2)),
        ScheduleLine(8, 512, Layout(tp=2, pp=4, recompute="full", zero_stage=1, micro_batch=2)),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "contains no schedule line"),
        ("nodes,batch\n", "contains no schedule line"),
        ("BS,MBS\n32,1\n", "has no column nodes"),
        ("nodes,batch\n1\n", "schedule:2: has 1 cell under 2 columns"),
        ("nodes,batch\nmany,32\n", "schedule:2: contains a value"),
        ("nodes,batch\n0,32\n", "not a number from 1"),
        ("nodes,batch,tp\n1,32,1.5\n", "not a number from 1"),
        ("nodes,batch,recompute\n1,32,some\n", "schedule:2: recompute"),
        ("nodes,batch,tp\n1,32,-2\n", "schedule:2: tp"),
        ("nodes,batch\n1,32\n2,32\n", "batch 32 twice"),
        ("nodes,NNODES,batch\n1,2,32\n", "schedule:1: has two columns nodes"),
    ],
)
def test_what_is_no_schedule_is_refused_with_the_line(tmp_path: Path, text: str, message: str):
    with pytest.raises(UserError, match=message):
        read_schedule(table(tmp_path, text), Layout())


def test_a_missing_or_unreadable_file_is_told(tmp_path: Path):
    with pytest.raises(UserError, match="cannot be read"):
        read_schedule(tmp_path / "none.csv", Layout())
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not UTF-8 text"):
        read_schedule(tmp_path / "binary", Layout())
