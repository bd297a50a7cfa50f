"""`paceline scale --from` a table: formats, selection, files, exit codes."""

from __future__ import annotations

import csv
import io
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_errors import paceline
from tests.scaling.analysis.lambda_values import FILE

INPUTS = Path(__file__).parents[1] / "forms" / "inputs"
FAULTY = ("--from", str(INPUTS / "slow-node.csv"))
NONE_FLAGGED = ("--from", str(INPUTS / "slow-switch.csv"))


def document(*arguments: str) -> dict[str, Any]:
    done = paceline("scale", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_lambdas_table_is_analysed_as_json(reference_data: Path):
    result = document(
        "--from", str(reference_data / FILE), "--where", "benchmark=opt-13b_bs16_zero0"
    )
    last = result["sizes"][-1]
    assert round(last["efficiency"], 4) == 0.9858 and result["flagged"] == []
    assert round(last["naive"]["straggler"], 4) == 0.9904
    assert round(last["naive"]["communication"], 4) == 0.9953


def test_a_table_of_two_benchmarks_asks_for_one(reference_data: Path):
    done = paceline("scale", "--from", str(reference_data / FILE))
    assert done.returncode == 1 and "--where benchmark=" in done.stderr


def test_a_slow_node_fails_only_when_asked():
    done = paceline("scale", *FAULTY)
    assert done.returncode == 0 and "node-0005 is" in done.stdout and "confirmed" in done.stdout
    assert paceline("scale", *FAULTY, "--fail-on-findings").returncode == 3
    assert paceline("scale", *NONE_FLAGGED, "--fail-on-findings").returncode == 0


def test_the_table_comes_as_csv_unrounded():
    done = paceline("scale", *FAULTY, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [row["nodes"] for row in rows] == ["1", "2", "16"]
    assert float(rows[-1]["naive_straggler"]) < 1 and rows[0]["straggler"] == ""


def test_page_and_charts_are_written(tmp_path: Path):
    page, folder = tmp_path / "page.html", tmp_path / "charts"
    done = paceline("scale", *FAULTY, "--html", str(page), "--charts", str(folder))
    assert done.returncode == 0, done.stderr
    assert "slow-node.csv" in page.read_text()
    assert f"page: {page}\n" in done.stderr and f"chart: {folder / 'nodes.svg'}" in done.stderr
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["efficiency.svg", "nodes.svg", "throughput.svg"]
    assert all(ET.parse(folder / name).getroot().tag.endswith("svg") for name in names)


def test_few_nodes_are_judged_by_a_reference_or_a_history(tmp_path: Path):
    def suspected(*arguments: str) -> list[str]:
        result = document(*arguments)
        assert result["flagged"] == []
        return [suspect["host"] for suspect in result["suspects"]]

    table, before = tmp_path / "now.csv", tmp_path / "before.csv"
    table.write_text("host,samples_per_s\nn1,100\nn2,90\n")
    before.write_text("host,samples_per_s\n" + "n1,100\nn2,99.5\nn1,100.2\nn2,99.8\n" * 2)
    assert suspected("--from", str(table)) == []
    assert suspected("--from", str(table), "--reference", "100") == ["n2"]
    assert suspected("--from", str(table), "--history", str(before)) == ["n2"]
    table.write_text("host,samples_per_s\nn1,100\nn2,90\nn1,100.1\nn2,90.1\n")
    judged = document("--from", str(table), "--history", str(before))
    assert judged["flagged"] == ["n2"] and judged["nodes"][0]["z"] < -4


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("--from", "missing.csv"), "missing.csv: cannot be read"),
        ((*FAULTY, "--reference", "-4"), "--reference -4.0: is not a throughput"),
    ],
)
def test_bad_input_is_exit_code_1_and_one_line(arguments: tuple[str, ...], fault: str):
    done = paceline("scale", *arguments)
    assert done.returncode == 1 and fault in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("--from", "x.csv", "--sizes", "1,2"), "--sizes: has no effect with --from"),
        (("--from", "x.csv", "--hosts", "a,b"), "--hosts: has no effect with --from"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(arguments: tuple[str, ...], option: str):
    done = paceline("scale", *arguments)
    assert done.returncode == 1 and option in done.stderr


def test_rows_of_the_history_are_selected_as_those_of_the_table(tmp_path: Path):
    both, now = tmp_path / "before.csv", tmp_path / "now.csv"
    rows = ["a,n1,100", "a,n1,100.2", "a,n1,99.9", "b,n1,50"]
    both.write_text("\n".join(["model,host,samples_per_s", *rows]) + "\n")
    now.write_text("model,host,samples_per_s,day\na,n1,90,2\nb,n1,50,2\n")
    result = document(
        "--from", str(now), "--where", "model=a", "--where", "day=2", "--history", str(both)
    )
    assert [s["host"] for s in result["suspects"]] == ["n1"]
    assert result["nodes"][0]["loss"] == pytest.approx(0.1)
