"""A published table as a sweep, and a dry run that shows every command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.files import references
from paceline.files.recipe import load_recipe
from paceline.layouts.sweep.study import study_combinations
from tests.cli.test_errors import paceline

RECIPE = load_recipe("gpt-1b3")
SWEEP = (
    *("sweep", "gpt-1b3", "--engine", "megatron_deepspeed", "--cluster", "jean-zay-v100-16g"),
    *("--set", "engine_settings.checkout=/code/megatron", "--set", "data.source=indexed"),
    *("--set", "data.path=/not/on/this/machine", "--dry-run"),
)


@pytest.mark.parametrize("study", ["32gb,32gb-no-recompute", "16gb", "bigscience-1b3-16gb"])
def test_a_study_has_exactly_the_layouts_of_its_tables(study: str) -> None:
    tables = {f"bigscience-1b3-{name.removeprefix('bigscience-1b3-')}" for name in study.split(",")}
    published = [row for row in references.find_rows("bigscience-1b3") if row.table in tables]
    _, combinations = study_combinations(RECIPE, study)
    assert len(combinations) == len(published) in (11, 16)
    for row, settings in zip(published, combinations, strict=True):
        assert row.layout is not None
        layout = RECIPE.layout.model_copy(
            update={
                name.removeprefix("layout."): int(text) if text.isdigit() else text
                for name, text in settings.items()
            }
        )
        assert (layout.tp, layout.pp, layout.micro_batch, layout.recompute) == (
            row.layout.tp,
            row.layout.pp,
            row.layout.micro_batch,
            row.layout.recompute,
        )


@pytest.mark.parametrize(
    ("study", "message"),
    [
        ("8gb", "--study 8gb: is not a table of gpt-1b3.*32gb-no-recompute"),
        ("32gb-schedule", "several batches or numbers of devices"),
    ],
)
def test_a_table_that_no_sweep_can_run_is_refused(study: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        study_combinations(RECIPE, study)


def test_a_recipe_without_tables_has_no_study() -> None:
    with pytest.raises(UserError, match="has no published table"):
        study_combinations(load_recipe("tiny-llama"), "32gb")


def test_a_study_runs_rows_that_run_out_of_memory(tmp_path: Path) -> None:
    done = paceline(*SWEEP, "--study", "16gb", "--json", runs=tmp_path)
    rows = json.loads(done.stdout)["rows"]
    assert done.returncode == 0 and len(rows) == 11
    assert {row["status"] for row in rows} == {"waiting"}
    mixed = paceline(*SWEEP, "--study", "16gb", "--tp", "1,2", runs=tmp_path)
    assert mixed.returncode == 1 and "exclude each other" in mixed.stderr


def test_a_dry_run_shows_the_script_and_each_command_without_the_data(tmp_path: Path) -> None:
    done = paceline(*SWEEP, "--pp", "1,2", "--mbs", "1", runs=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --constraint=v100-16g" in done.stdout
    for pp in (1, 2):
        (line,) = [line for line in done.stderr.splitlines() if line.startswith(f"pp {pp} mbs 1:")]
        assert f"--pipeline-model-parallel-size {pp} " in line
        assert "--data-path /not/on/this/machine" in line
    assert "/not/on/this/machine" in done.stderr and "the run needs it on every node" in done.stderr


def test_a_run_still_needs_its_data(tmp_path: Path) -> None:
    words = [word for word in SWEEP if word != "--dry-run"]
    done = paceline("run", *words[1:], runs=tmp_path)
    assert done.returncode == 1 and "/not/on/this/machine" in done.stderr
