"""`paceline formats`, and log formats as the commands take them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from typer.testing import CliRunner

from paceline.cli import app
from paceline.engines import log_formats

TABLE = """\
title: My trainer
mark: ' sec/iter'
line: 'it={step}/{total_steps}\\|'
fields: ['loss={loss}\\|', '\\|{step_time_s} sec/iter']
settings: ['world of {num_devices} ranks']
example: 'it=1/100|loss=2.0|0.5 sec/iter'
"""


def files(folder: Path) -> tuple[str, str]:
    """A user's format, and a log of it."""
    (folder / "my.yaml").write_text(TABLE)
    lines = "".join(f"it={n}/100|loss=2.0|0.5{n % 3} sec/iter\n" for n in range(1, 31))
    (folder / "a.log").write_text(f"world of 8 ranks\n{lines}")
    return str(folder / "my.yaml"), str(folder / "a.log")


def out(*words: str) -> str:
    done = CliRunner().invoke(app, [*words], prog_name="paceline", terminal_width=300)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_every_format_is_listed_and_explained():
    rows = {row["name"]: row for row in json.loads(out("formats", "--json"))}
    assert rows.keys() == log_formats().keys()
    assert all(row["program"] and row["source"] and row["figures"] for row in rows.values())
    assert "tokens_per_s_per_device: per device" in rows["picotron"]["figures"]
    assert "steps per line: 1" in rows["picotron"]["figures"]
    assert "train.py of karpathy/nanoGPT" in out("formats", "nanogpt")
    assert out("formats", "megatron") == out("recipes", "formats", "megatron")


def test_trying_a_format_shows_the_lines_of_each_pattern_and_what_was_read(tmp_path: Path):
    table, log = files(tmp_path)
    tried = json.loads(out("formats", "try", log, "--format", table, "--json"))
    rows = {(row["part"], row["pattern"]): row for row in tried["patterns"]}
    assert rows["mark", " sec/iter"]["lines"] == 30
    assert rows["field", r"\|{step_time_s} sec/iter"] == {
        "part": "field",
        "pattern": r"\|{step_time_s} sec/iter",
        "lines": 30,
        "first": "0.51",
    }
    assert rows["setting", "world of {num_devices} ranks"]["first"] == "8"
    assert tried["read"]["n_steps"] == 30
    assert "8 devices" in out("formats", "try", log, "--log-format", table)


def test_trying_a_log_detects_its_format(tmp_path: Path):
    path = tmp_path / "a.log"
    path.write_text("iter 10: loss 4.1234, time 250.12ms, mfu 12.34%\n" * 9)
    tried = json.loads(out("formats", "try", str(path), "--json"))
    assert tried["format"] == "nanogpt"
    assert {row["lines"] for row in tried["patterns"] if row["part"] == "line"} == {9}


def test_a_table_form_prints_nothing_but_the_table(tmp_path: Path):
    table, log = files(tmp_path)
    tried = out("formats", "try", log, "--log-format", table, "--format", "csv")
    assert [len(row) for row in csv.reader(tried.splitlines())] == [4] * 6
    shown = list(csv.DictReader(out("formats", "nanogpt", "--format", "csv").splitlines()))
    assert [row["name"] for row in shown] == ["nanogpt"]


def test_a_file_after_format_is_a_log_format(tmp_path: Path):
    table, log = files(tmp_path)
    assert json.loads(out("parse", log, f"--format={table}", "--json"))["engine"] == table
    assert out("parse", log, "--format=csv").startswith("file,")
    for option in ("--format", "--log-format", "--engine"):
        document = json.loads(out("parse", log, option, table, "--json"))
        assert document["status"] == "ok" and document["engine"] == table
    assert out("parse", log, "--log-format", table, "--format", "csv").startswith("file,")
    wrong = CliRunner().invoke(app, ["parse", log, "--format", "cvs"])
    assert wrong.exit_code == 1
