"""Tables come in four formats, rows can be selected, and JSON stands alone."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

from paceline.files.recipe import recipe_names
from tests.cli.test_errors import paceline
from tests.files.test_run_folder import make_run


def test_recipes_in_every_format():
    assert [r["recipe"] for r in json.loads(paceline("recipes", "--json").stdout)] == recipe_names()
    rows = list(csv.DictReader(io.StringIO(paceline("recipes", "--format", "csv").stdout)))
    assert [r["recipe"] for r in rows] == recipe_names()
    assert paceline("recipes", "--format", "md").stdout.startswith("| recipe |")
    assert "70.6B" in paceline("recipes").stdout


def test_one_recipe_prints_as_a_file_that_can_be_run(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text(paceline("recipes", "tiny-llama").stdout)
    done = paceline("run", str(path), "--dry-run")
    assert done.returncode == 0 and "agent.py 1 0 " in done.stdout


def test_one_recipe_as_a_table_has_a_row_for_each_field():
    shown = paceline("recipes", "tiny-llama", "--format", "csv").stdout
    rows = {row["field"]: row["value"] for row in csv.DictReader(io.StringIO(shown))}
    whole = json.loads(paceline("recipes", "tiny-llama", "--json").stdout)
    assert rows["name"] == "tiny-llama" and not set(rows) & set(whole["training"])
    assert rows["training.seq_len"] == str(whole["training"]["seq_len"])
    lines = paceline("recipes", "tiny-llama", "--format", "md").stdout.splitlines()
    assert lines[0] == "| field | value |" and len(lines) == len(rows) + 2


def test_fields_list_what_set_takes():
    assert "layout.zero_stage" in paceline("recipes", "--fields").stdout


def test_a_dry_run_writes_nothing_and_prints_the_script_alone(tmp_path: Path):
    done = paceline("run", "tiny-llama", "--dry-run", runs=tmp_path)
    assert done.stdout.startswith("#!/usr/bin/env bash\n")
    assert [p.name for p in tmp_path.iterdir() if p.name != "cache"] == []
    content = json.loads(paceline("run", "tiny-llama", "--dry-run", "--json").stdout)
    assert content["script"] == done.stdout and content["settings"]["schema"] == 2


def test_list_shows_selects_and_rebuilds(tmp_path: Path):
    make_run(tmp_path, "a", created="2026-01-01")
    make_run(tmp_path, "b", created="2026-01-02", status="failed")
    assert [
        r["run"] for r in json.loads(paceline("runs", "list", "--json", runs=tmp_path).stdout)
    ] == [
        "a",
        "b",
    ]
    chosen = paceline("runs", "list", "--where", "status=failed", "--json", runs=tmp_path)
    assert [r["run"] for r in json.loads(chosen.stdout)] == ["b"]
    wrong = paceline("runs", "list", "--where", "state=ok", runs=tmp_path)
    assert wrong.returncode == 1 and "is not a column" in wrong.stderr
    assert json.loads(paceline("runs", "index", "--json", runs=tmp_path).stdout)["runs"] == 2


def test_a_hostile_tag_is_no_formula_in_the_csv_of_all_runs(tmp_path: Path):
    make_run(tmp_path, "a", tag="=cmd|x")
    shown = paceline("runs", "list", "--format", "csv", runs=tmp_path).stdout
    assert next(csv.DictReader(io.StringIO(shown)))["tag"] == "'=cmd|x"


def test_an_empty_list_is_no_error_and_valid_json(tmp_path: Path):
    done = paceline("runs", "list", "--json", runs=tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout) == []
    assert "paceline run tiny-llama" in paceline("runs", "list", runs=tmp_path).stderr
