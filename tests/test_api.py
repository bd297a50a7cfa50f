"""The Python API gives the values of the command line, typed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.core.errors import UserError
from tests.command import paceline as command

DOCS = Path(__file__).parents[1] / "docs"
LOG = DOCS / "examples" / "train.log"


def test_parse_gives_the_figures_of_the_command():
    report = paceline.parse(LOG, model="llama31-8b", device="H100-SXM")
    printed = command("parse", LOG, "--model", "llama31-8b", "--device", "H100-SXM")
    assert str(report) == printed.stdout
    assert report.value.metrics["mfu"].value == report.data["metrics"]["mfu"]["value"]
    assert len(report.to_dataframe()) == len(report.rows) == 40


def test_estimate_gives_the_figures_of_the_command():
    report = paceline.estimate("llama31-8b", device="H100", gpus=64, layout={"tp": 2}, price=2.5)
    printed = command(
        *("estimate", "llama31-8b", "--device", "H100", "--gpus", "64"),
        *("--layout", "tp=2", "--price", "2.5", "--json"),
    )
    assert report.data == json.loads(printed.stdout)
    (row,) = report.to_dataframe().to_dict("records")
    assert row["step_time_s"] == report.value.step_time_s


def test_runs_are_listed_loaded_and_compared(tmp_path: Path):
    for tag in ("before", "after"):
        log = LOG.with_name(f"{tag}-1.log")
        added = command("runs", "import", log, "--tag", tag, "--model", "llama31-8b", runs=tmp_path)
        assert added.returncode == 0, added.stderr
    listed = paceline.runs(runs_dir=tmp_path)
    assert list(listed.to_dataframe()["tag"]) == ["before", "after"]

    run = paceline.load_run("before", runs_dir=tmp_path)
    assert run.value.result.status == "ok" and len(run.to_dataframe()) == 30

    comparison = paceline.compare("before", ["after"], runs_dir=tmp_path)
    printed = command("compare", "before", "after", "--json", runs=tmp_path)
    assert comparison.data == json.loads(printed.stdout)
    assert comparison.value.verdict == "likely slower"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: paceline.parse("missing.log"), "missing.log: does not exist"),
        (lambda: paceline.parse(LOG, model="lama31-8b"), "llama31-8b"),
        (lambda: paceline.estimate("llama31-8b", device="H1OO", gpus=8), "H1OO"),
        (lambda: paceline.compare("before"), "second side"),
        (lambda: paceline.load_run("none", runs_dir="/nonexistent"), "none"),
    ],
)
def test_wrong_input_raises_an_error_of_the_user(call: Any, words: str):
    with pytest.raises(UserError, match=re.escape(words)):
        call()


def test_a_missing_pandas_is_named(monkeypatch: pytest.MonkeyPatch):
    report = paceline.parse(LOG)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match=r"needs pandas.*paceline\[dataframe\]"):
        report.to_dataframe()


def test_importing_the_package_loads_nothing_else():
    code = "import sys, paceline; print([m for m in sys.modules if m.startswith('paceline.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_functions_that_share_their_name_with_a_package_stay_callable():
    code = "import paceline.compare, paceline.runs.comparison; print(len(paceline.runs().rows))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd="/", env={"HOME": "/tmp"}
    )
    assert done.returncode == 0, done.stderr


def _python_of(page: Path) -> list[str]:
    text = page.read_text()
    if page.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        return ["".join(cell["source"]) for cell in cells]
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ["how-to/use-from-python.md", "examples/paceline.ipynb"])
def test_the_code_of_the_documentation_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shutil.copytree(DOCS / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path / "examples")
    code = _python_of(DOCS / page)
    assert len(code) >= 4
    names: dict[str, Any] = {}
    for block in code:
        exec(block, names)
    assert {"H100-SXM", "B200"} == set(names["table"]["device"])


def test_a_check_reports_this_machine(tmp_path: Path):
    report = paceline.check(seconds=0.05, device="cpu", runs_dir=tmp_path)
    (host,) = report.value.hosts
    assert host.figures["gemm"].value > 0
    assert list(report.to_dataframe()["host"]) == [host.host]
