"""The date of a log stays with its figures: as a log, an import, a result or a parsed document."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.runs.comparison_inputs import find_side

LINE = (
    " [{date} {clock}] iteration {step:8d}/ 60 | consumed samples: {samples} | "
    "elapsed time per iteration (ms): {ms:.1f} | learning rate: 1.0E-04 | "
    "global batch size:   256 | lm loss: 2.0E+00 | number of skipped iterations:   0 |\n"
)


def write_log(path: Path, date: str | None) -> Path:
    """A Megatron log of a day, with a date in each line or without."""
    lines = [
        LINE.format(
            date=date or "",
            clock=f"10:{step:02}:00" if date else "",
            step=step,
            samples=256 * step,
            ms=7200 + step % 3,
        )
        for step in range(1, 41)
    ]
    path.write_text("".join(lines if date else [line.replace(" [ ]", "") for line in lines]))
    return path


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("date", ["2026-03-04", None])
def test_every_form_of_a_log_has_its_date(
    tmp_path: Path, date: str | None, monkeypatch: pytest.MonkeyPatch
):
    """An import knows the time of the import too, which is never that of the run."""
    monkeypatch.setenv("TZ", "UTC")
    log = write_log(tmp_path / "train.log", date)
    parsed = tmp_path / "parsed.json"
    parsed.write_text(run("parse", str(log), "--json"))
    runs = tmp_path / "runs"
    run("runs", "import", str(log), "--runs-dir", str(runs))
    (stored,) = runs.glob("*/result.json")
    result = tmp_path / "result-of-a.json"
    shutil.copy(stored, result)
    expected = f"{date}T10:20:00+00:00" if date else None
    for form in (log, parsed, stored, stored.parent, result):
        (member,) = find_side(runs, str(form)).members
        assert member.created == expected, form
    assert json.loads(result.read_text())["created"] == expected
