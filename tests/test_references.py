from __future__ import annotations

from pathlib import Path

import pytest

from paceline import catalog, references
from paceline.core.layout import layout_problems
from paceline.core.shape import linear_sizes, num_parameters
from paceline.errors import UserError
from paceline.recipe import load_recipe
from paceline.references import Row, Source
from paceline.yaml_file import read_document, validate
from tests.shapes import SHAPES

FILE = """
source: A study
where: page 3
window: as printed
common:
  recipe: gpt-1b3
  device: V100-SXM2-32GB
  devices_per_node: 4
  dtype: fp16
  seq_len: 2048
  global_batch: 512
  convention: six-n
  layout: {zero_stage: 1}
  units: {step_time_s: s, mfu: "%"}
tables:
  - id: study-table
    title: The table
    common:
      layout: {tp: 2}
      slips:
        - {columns: [mfu], slip: Wrong peak., follows_with: {peak_flops_per_s: 1e12}}
    rows:
      - id: study-8
        num_devices: 8
        layout: {pp: 2}
        printed: {step_time_s: "29", mfu: "36.17%"}
        slips:
          - {columns: [mfu], slip: Wrong step., follows_with: {step_time_s: 28}}
"""


def read(tmp_path: Path, text: str) -> Row:
    path = tmp_path / "study.yaml"
    path.write_text(text, encoding="utf-8")
    return validate(Source, read_document(path), str(path)).tables[0].rows[0]


def test_a_row_inherits_what_its_file_and_table_state_once(tmp_path: Path):
    row = read(tmp_path, FILE)
    assert (row.source, row.where, row.window, row.table) == (
        "A study", "page 3", "as printed", "study-table",
    )  # fmt: skip
    assert (row.layout.zero_stage, row.layout.tp, row.layout.pp) == (1, 2, 2)
    assert [slip.slip for slip in row.slips_in("mfu")] == ["Wrong peak.", "Wrong step."]
    assert row.slips_in("step_time_s") == ()


def test_printed_cells_are_numbers_in_base_units(tmp_path: Path):
    row = read(tmp_path, FILE)
    assert row.figure("mfu") == pytest.approx(0.3617)
    assert row.figure("step_time_s") == 29
    assert row.figure("tokens_per_s") is None
    assert row.tokens_per_s == 2048 * 512 / 29
    assert row.samples_per_s == 512 / 29


@pytest.mark.parametrize(
    ("printed", "value"),
    [
        ("136,902,082,560", 136_902_082_560), ("3.94E+15", 3.94e15), ("over 98", 98),
        ("16 borderline OOM", 16), ("OOM", None), ("x", None), ("", None),
    ],
)  # fmt: skip
def test_the_first_number_of_a_cell_counts(tmp_path: Path, printed: str, value: float | None):
    row = read(tmp_path, FILE.replace('"29"', f'"{printed}"'))
    assert row.figure("step_time_s") == value


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (
            "num_devices: 8",
            "num_devices: 8\n        num_nodes: 2",
            r"study.yaml:25: .*num_nodes: is not a known.*num_devices",
        ),
        ("        num_devices: 8\n", "", r"num_devices: is required but missing"),
        ("convention: six-n", "convention: six-m", r"convention must be one of full-attention"),
        ('units: {step_time_s: s, mfu: "%"}', "units: {step_time_s: s}", r"no entry for mfu"),
        (
            'step_time_s: "29"',
            "step_time_s: 29",
            r"study.yaml:26: .*step_time_s: input should be a valid string, not 29",
        ),
        ("tables:", "tabels:", r"study.yaml"),
    ],
    ids=[
        "unknown field",
        "missing field",
        "convention",
        "unit",
        "number instead of text",
        "no tables",
    ],
)
def test_a_wrong_file_is_refused_with_file_and_reason(
    tmp_path: Path, old: str, new: str, complaint: str
):
    with pytest.raises(UserError, match=complaint):
        read(tmp_path, FILE.replace(old, new))


def test_ids_are_unique_over_sources_tables_and_rows():
    names = [
        *references.sources(),
        *(table.id for table in references.tables()),
        *(row.id for row in references.rows()),
    ]
    assert len(names) == len(set(names))


def test_a_row_is_found_by_its_id():
    row = references.row("llama31-70b-fp8-64")
    assert (row.recipe, row.num_devices, row.dtype) == ("llama31-70b", 64, "fp8")


def test_an_unknown_row_suggests_the_nearest():
    with pytest.raises(UserError, match="did you mean 'llama31-70b-fp8-64'"):
        references.row("llama31-70b-fp8-63")


def test_a_name_may_be_a_source_a_table_or_a_row():
    everything = {row.id for row in references.named("lambda-1cc")}
    table = {row.id for row in references.named("lambda-1cc-opt-13b")}
    one = {row.id for row in references.named("opt-13b-512")}
    assert one < table < everything
    with pytest.raises(UserError, match="did you mean 'lambda-1cc'"):
        references.named("lambda-1c")


@pytest.mark.parametrize(
    ("recipe", "rows"),
    [("llama31-70b", 14), ("opt-350m-sft", 8), ("opt-13b-sft", 8), ("gpt-1b3", 23), ("none", 0)],
)
def test_a_recipe_gets_its_measured_rows(recipe: str, rows: int):
    found = references.for_recipe(recipe)
    assert len(found) == rows
    assert all(row.tokens_per_s for row in found)


def test_tables_have_as_many_rows_as_their_source():
    sizes = {table.id: len(table.rows) for table in references.tables()}
    assert sizes["nvidia-llama31-70b-bf16"] == sizes["nvidia-llama31-70b-fp8"] == 6
    assert sizes["lambda-1cc-opt-350m"] == sizes["lambda-1cc-opt-13b"] == 8
    study = [sizes[f"bigscience-1b3-{name}"] for name in ("32gb", "32gb-no-recompute", "16gb")]
    assert sum(study) == 27


def test_rows_that_ran_out_of_memory_have_no_figure():
    oom = [row for row in references.rows() if row.status == "oom"]
    assert len(oom) == 4
    assert all(row.step_time_s is None and row.samples_per_s is None for row in oom)


@pytest.mark.parametrize("row", references.rows(), ids=lambda row: row.id)
def test_every_row_names_a_device_of_the_catalog_and_its_source(row: Row):
    assert catalog.device(row.device).name == row.device
    assert row.source and row.where and row.recipe in SHAPES
    if row.repeats:
        twin = references.row(row.repeats)
        assert (twin.num_devices, twin.global_batch, twin.layout, twin.dtype) == (
            row.num_devices, row.global_batch, row.layout, row.dtype,
        )  # fmt: skip


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_a_recipe_runs_the_model_and_a_layout_of_its_published_rows(name: str):
    recipe = load_recipe(name)
    found = {row.id for named in recipe.references for row in references.named(named)}
    own = references.for_recipe(name)
    assert {row.id for row in own} <= found
    assert num_parameters(recipe.model) == num_parameters(SHAPES[name])
    assert linear_sizes(recipe.model) == linear_sizes(SHAPES[name])
    assert recipe.layout in [row.layout for row in own]
    assert {(recipe.training.seq_len, recipe.training.dtype)} <= {
        (row.seq_len, row.dtype) for row in own
    }


@pytest.mark.parametrize("row", references.rows(), ids=lambda row: row.id)
def test_every_layout_is_possible(row: Row):
    shape = SHAPES[row.recipe]
    assert layout_problems(row.layout, shape, row.num_devices, row.global_batch) == []
