"""Log formats that are declared in a file: what a file may say, and what is read by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline import engines
from paceline.core.errors import UserError
from paceline.engines import log_format
from paceline.engines.log_reading.table_format import FormatTable, read_table
from paceline.engines.log_reading.table_reader import table_format
from paceline.logs.facts import UserSettings
from paceline.logs.parser import parse_log
from tests.engines.promises import check_read

TABLE = """\
title: My trainer
mark: ' sec/iter'
line: 'it={step}\\|'
fields: ['loss={loss}\\|', '\\|{step_time_s} sec/iter', 'rate={tokens_per_s:suffix}\\|']
settings: ['world of {num_devices} ranks']
numbering: from 0
steps_per_line: 1
example: 'it=1|loss=2.0|0.5 sec/iter'
"""
LOG = "world of 8 ranks\n" + "".join(
    f"it={n}|loss={2 - n / 100:.2f}|rate=16.0K|0.5{n % 3} sec/iter\n" for n in range(30)
)


def forget_formats() -> None:
    engines.format_tables.cache_clear()
    engines.table_formats.cache_clear()


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_file_of_ten_lines_reads_a_log_of_its_own(tmp_path: Path):
    table, log = write(tmp_path, "mine.yaml", TABLE), write(tmp_path, "a.log", LOG)
    parsing = parse_log(log, UserSettings(engine=str(table)))
    document = parsing.document
    assert document.status == "ok" and document.n_steps == 30
    assert document.step_time_s and document.step_time_s.median == pytest.approx(0.51)
    assert document.settings.num_devices == 8
    assert document.tokens_per_s == pytest.approx(16_000, rel=0.01)
    assert parsing.steps["loss"][:2].tolist() == pytest.approx([2.0, 1.99])


def test_a_file_in_the_users_folder_is_known_by_its_name_and_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "paceline" / "log_formats"
    folder.mkdir(parents=True)
    write(folder, "mine.yaml", TABLE)
    forget_formats()
    try:
        document = parse_log(write(tmp_path, "a.log", LOG), UserSettings()).document
        assert document.engine == "mine" and document.status == "ok"
        assert log_format("mine").title == "My trainer"
    finally:
        forget_formats()


def test_a_mark_with_digits_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "paceline" / "log_formats"
    folder.mkdir(parents=True)
    write(folder, "mine.yaml", TABLE.replace("' sec/iter'", "'|0.51 sec'"))
    forget_formats()
    try:
        document = parse_log(write(tmp_path, "a.log", LOG), UserSettings()).document
        assert document.engine == "mine" and document.status == "ok"
    finally:
        forget_formats()


def test_a_log_without_its_lines_shows_the_first_line_with_the_mark(tmp_path: Path):
    table = write(tmp_path, "mine.yaml", TABLE)
    log = write(tmp_path, "a.log", LOG.replace("it=", "iteration "))
    document = parse_log(log, UserSettings(engine=str(table))).document
    assert document.status == "not-a-training-log"
    assert "the first line with the mark is: iteration 0|loss=2.00" in str(document.reason)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("it={step}", "it={stpe}"), "line: {stpe} is unknown; did you mean 'step'?"),
        (("{loss}", "{loss:hex}"), "allowed kinds: number, count, suffix, clock, date, text"),
        (("it={step}", "it=({step}"), "is not a regular expression"),
        (("it={step}", "(it|iter)={step}"), "has groups of its own"),
        (("it={step}", r"it={step} \1"), "is not a regular expression: invalid group reference"),
        (("'loss={loss}", "'loss={step}"), "{step} is unknown"),
        (("it={step}", "it={step:text}"), "line: {step:text}: allowed kinds: number, count"),
        (("{loss}", "{loss:text}"), "fields: {loss:text}: allowed kinds: number, count, suffix"),
        (("it={step}", "[[]it={step}"), "is ambiguous (possible nested set): in [...], write \\["),
        (("it={step}", "[a||b]it={step}"), "is ambiguous (possible set union)"),
        (("world of {num_devices}", "world of {ranks}"), "settings: {ranks} is unknown"),
        (("'loss={loss}", "'loss="), "must have one placeholder"),
        (("title:", "name:"), "title"),
        (("it={step}", "(?:a+)+it={step}"), "unlimited time on a long line: it repeats a rep"),
        (("it={step}", "(?:ab|a)*it={step}"), "unlimited time on a long line: it repeats alt"),
        (("it={step}", ".*.*.*it={step}"), "more than 2 repetitions such as .* without a limit"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path: Path, change: tuple[str, str], words: str):
    path = write(tmp_path, "mine.yaml", TABLE.replace(*change))
    with pytest.raises(UserError) as error:
        read_table(path)
    assert "mine.yaml" in str(error.value) and words in str(error.value)


def test_the_line_of_an_unknown_placeholder_is_named(tmp_path: Path):
    lines = TABLE.splitlines()
    number = next(n for n, line in enumerate(lines, 1) if line.startswith("line:"))
    path = write(tmp_path, "mine.yaml", TABLE.replace("it={step}", "it={stpe}"))
    with pytest.raises(UserError, match=rf"mine.yaml:{number}: line: "):
        read_table(path)


@pytest.mark.parametrize(
    "line",
    [r"(?:a{1,3})? {step}", r"x[^|]*\| {step} .*", r"\[ *{step}/ *\d+ *\] +", r"(?:a|b)? {step}"],
)
def test_patterns_that_take_little_time_are_accepted(line: str):
    table = FormatTable(title="x", mark="mark", line=line + "{step_time_s}", example="x")
    assert table.line == line + "{step_time_s}"


def test_lines_without_step_numbers_are_counted_and_parts_are_added():
    table = FormatTable(
        title="x",
        mark="bwd ",
        line="fwd {forward_ms} bwd {backward_ms} opt {optimizer_ms};",
        example="fwd 1 bwd 2 opt 3;",
    )
    log = check_read(table_format(table), b"fwd 100 bwd 200 opt 50;\n" * 5)
    assert log.steps().index.tolist() == [1, 2, 3, 4, 5]
    assert log.column("step_time_s").tolist() == pytest.approx([0.35] * 5)


def test_a_printed_time_comes_before_a_rounded_rate():
    line = "step {step} tokens {tokens} rate {tokens_per_s:suffix} "
    fields = {"title": "x", "mark": "rate ", "example": "step 1 rate 2K"}
    text = b"".join(b"step %d tokens 1000 rate 2.0K time 0.512;\n" % n for n in range(1, 6))
    timed = FormatTable.model_validate({**fields, "line": line, "fields": ["time {step_time_s};"]})
    log = check_read(table_format(timed), text)
    assert log.column("step_time_s").tolist() == [0.512] * 5
    log = check_read(table_format(FormatTable.model_validate({**fields, "line": line})), text)
    assert log.column("step_time_s").tolist() == [0.5] * 5


def test_thousands_in_step_numbers_and_lines_without_one():
    table = FormatTable(
        title="x",
        mark="time ",
        line="(?:step {step:count} )?time {step_time_s};",
        example="step 1,000 time 0.5;",
    )
    text = b"time 9;\n" + b"".join(b"step 1,%03d time 0.5;\n" % n for n in range(9))
    log = check_read(table_format(table), text)
    assert log.steps().index.tolist() == list(range(1000, 1009))
    assert log.column("step_time_s").tolist() == [0.5] * 9


def test_a_users_format_may_not_have_the_name_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "paceline" / "log_formats"
    folder.mkdir(parents=True)
    write(folder, "My-Trainer.yaml", TABLE)
    forget_formats()
    try:
        assert log_format("my-trainer").title == "My trainer"
        write(folder, "megatron.yaml", TABLE)
        forget_formats()
        with pytest.raises(UserError, match="has the name of another log format"):
            engines.log_formats()
    finally:
        forget_formats()
