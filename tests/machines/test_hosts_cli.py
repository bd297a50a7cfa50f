"""`paceline check hosts` prints hostfiles that the other verbs read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli.hosts import hosts
from paceline.cli.options import with_option_groups
from paceline.core.errors import UserError
from paceline.core.hosts import parse_hostfile

app = typer.Typer()
app.command("hosts")(with_option_groups(hosts))


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_range_becomes_a_hostfile():
    result = run("node[08-11]", "--slots", "8", "--take", "3")
    assert result.stdout == "node08 slots=8\nnode09 slots=8\nnode10 slots=8\n"
    assert len(parse_hostfile(result.stdout)) == 3


@pytest.mark.parametrize("name", ["hosts.txt", "hostfile", "hosts", "lab/nodes", "lab.csv"])
def test_a_hostfile_that_is_not_there_is_no_host(name: str):
    with pytest.raises(
        UserError, match=f"{name}: is not a file; allowed: a hostfile, or host names"
    ):
        run(name)
    assert run("hosts-1,txt").stdout == "hosts-1\ntxt\n"


def test_a_hostfile_of_another_editor_is_read_or_refused_in_plain_words(tmp_path: Path):
    file = tmp_path / "my hösts.txt"
    file.write_bytes(b"\xef\xbb\xbfa slots=2\r\n")
    assert run(str(file)).stdout == "a slots=2\n"
    file.write_bytes("nöde".encode("latin-1"))
    with pytest.raises(UserError, match=r"my hösts\.txt: is not UTF-8 text; save it as UTF-8$"):
        run(str(file))


def test_a_file_keeps_its_slots_and_its_order(tmp_path: Path):
    file = tmp_path / "hosts"
    file.write_text("b slots=4\na:2\n")
    assert run(str(file)).stdout == "b slots=4\na slots=2\n"
    assert run(str(file), "--head").stdout == "b slots=4\n"
    assert json.loads(run(str(file), "--json").stdout) == [
        {"host": "b", "slots": 4},
        {"host": "a", "slots": 2},
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "need exactly one source"),
        (("a", "--idle"), "need exactly one source"),
        (("--allocation", "1;2"), "is not the number of a Slurm job"),
        (("a", "--take", "2"), "there is 1 host"),
        (("a,a",), "lists a twice"),
    ],
)
def test_what_contradicts_itself_is_refused(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(UserError, match=message):
        run(*arguments)


def test_a_hostfile_that_exists_stays(tmp_path: Path):
    file = tmp_path / "hosts"
    assert run("a,b", "-o", str(file)).stdout == ""
    with pytest.raises(UserError, match="exists already"):
        run("c", "-o", str(file))
    assert file.read_text() == "a\nb\n"


def test_options_that_would_be_passed_over_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match="--head, --take: exclude each other"):
        run("a,b", "--head", "--take", "2")
    with pytest.raises(UserError, match="--output: writes hostfiles"):
        run("a,b", "--check", "-o", str(tmp_path / "out"))
