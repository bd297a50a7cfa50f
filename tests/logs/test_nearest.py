"""Refused logs: the reason names what was compared, the nearest format and its first mismatch."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.logs.facts import UserSettings
from paceline.logs.nearest import OTHER_TABLES
from paceline.logs.parser import parse_log


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "Iter(train) [  10/1000]  lr: 2e-05  duration: 3.0",
            "nearest: MMEngine, XTuner (--log-format mmengine), but in the line 'Iter(train) "
            "[ 10/1000] lr: 2e-05 duration: 3.0' there is no ' time: {step_time_s}'",
        ),
        (
            "Iter 10: Train loss 1.9; It/sec 0.5",
            "(--log-format mlx_lm), but in the line 'Iter 10: Train loss 1.9; It/sec 0.5' "
            "only 'Iter 10' matches; expected next: ': Train loss {loss}, '",
        ),
        ("completed step: one", "the rest does not match `completed step: 15107, seconds: 2.167"),
        ("hello", "no line contains the identifying text of a format"),
    ],
)
def test_a_refusal_names_the_nearest_format(tmp_path: Path, line: str, words: str):
    path = tmp_path / "a.log"
    path.write_text(f"{line}\n" * 5)
    document = parse_log(path, UserSettings()).document
    assert document.status == "not-a-training-log"
    reason = str(document.reason)
    assert "5 lines compared with" in reason and words in reason, reason


def test_a_refusal_of_a_chosen_format_is_about_it_alone(tmp_path: Path):
    path = tmp_path / "a.log"
    path.write_text("Iter(train) [  10/1000]  duration: 3.0\n" * 5)
    reason = str(parse_log(path, UserSettings(engine="mlx_lm")).document.reason)
    assert "MLX-LM" in reason and "nearest" not in reason


TABLES = {
    "paceline probe network --from FILE": [
        "#       size         count      type   redop    root     time   algbw   busbw  #wrong",
        " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]",
    ],
    "`paceline run -- COMMAND` records power": [
        "# gpu   pwr gtemp mtemp    sm   mem   enc   dec   jpg   ofa  mclk  pclk",
        "#Date       Time        gpu   pwr gtemp mtemp    sm   mem",
        "timestamp, index, power.draw [W], clocks.current.sm [MHz]",
    ],
    "`paceline runs goodput LOG...`": [
        "JobID           JobName  Partition    Account  AllocCPUS      State ExitCode",
        "JobID|Elapsed|ElapsedRaw|State|NodeList",
    ],
}


@pytest.mark.parametrize(
    ("use", "header"), [(use, header) for use in TABLES for header in TABLES[use]]
)
def test_a_table_of_another_program_is_refused_with_its_use(tmp_path: Path, use: str, header: str):
    path = tmp_path / "table.txt"
    path.write_text("a banner\n" + header + "\n" + "    0   650    60\n" * 6)
    document = parse_log(path, UserSettings()).document
    assert document.status == "not-a-training-log"
    assert str(document.reason).startswith("it is output of ") and use in str(document.reason)


def test_headers_of_other_tables_are_searched_line_by_line():
    """A search that crosses line ends would take minutes for a megabyte of them."""
    assert [pattern for pattern, *_ in OTHER_TABLES if r"\s" in pattern] == []
