"""Published tables: how their files are read, found by name, and what they hold."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
import pytest

from paceline.core.errors import UserError
from paceline.core.layout_checks import layout_problems
from paceline.core.parallel_run import ParallelRun
from paceline.core.shape import linear_sizes, num_parameters
from paceline.files import catalog, references
from paceline.files.recipe import load_recipe
from paceline.files.references import Row, Source, read_source
from tests.core.shapes import SHAPES

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
    rows:
      - id: study-8
        num_devices: 8
        layout: {pp: 2}
        printed: {step_time_s: "29", mfu: "36.17%"}
"""
COMPACT = """
source: A study
where: page 3
window: as printed
common:
  units: {step_time_s: s, tokens_per_s_per_device: tokens/s/device}
tables:
  - id: study-table
    title: The table
    common: {seq_len: 1024, layout: {tp: 2}}
    rows_csv: |
      id,num_devices,dtype,layout.pp,layout.sequence_parallel,printed.step_time_s,printed.tokens_per_s_per_device,note
      a,8,bf16,4,true,1.50,,"with a comma, quoted"
      b,16,,,,,2048,
"""
SEEDS = ("bigscience-1b3", "lambda-1cc", "nvidia-llama31")
SEED_ROWS = [row for name in SEEDS for row in references.source(name).rows]


def read_text(tmp_path: Path, text: str) -> Source:
    path = tmp_path / "study.yaml"
    path.write_text(text, encoding="utf-8")
    return read_source(path)


def read(tmp_path: Path, text: str) -> Row:
    return read_text(tmp_path, text).rows[0]


def test_a_row_inherits_what_its_file_and_table_state_once(tmp_path: Path):
    row = read(tmp_path, FILE)
    assert (row.source, row.where, row.window, row.table) == (
        "A study",
        "page 3",
        "as printed",
        "study-table",
    )
    assert (row.layout.zero_stage, row.layout.tp, row.layout.pp) == (1, 2, 2)


def test_many_rows_may_be_written_a_line_each(tmp_path: Path):
    first, second = read_text(tmp_path, COMPACT).rows
    assert first.printed == {"step_time_s": "1.50"}
    assert (first.layout.tp, first.layout.pp, first.layout.sequence_parallel) == (2, 4, True)
    assert first.layout.model_fields_set == {"tp", "pp", "sequence_parallel"}
    assert (first.num_devices, first.dtype, first.seq_len) == (8, "bf16", 1024)
    assert first.note == "with a comma, quoted" and second.note is None
    assert second.printed == {"tokens_per_s_per_device": "2048"} and second.dtype is None


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("b,16,,,,,2048,", "b,16,,,,,2048", "rows_csv of study-table, line 3: 7 cells, 8 columns"),
        ("a,8,bf16", "a,8,bf61", "dtype: 'bf61' is not one of the choices"),
        ("a,8,bf16", "a,eight,bf16", "num_devices: 'eight' is not a whole number"),
        ("layout.pp", "layout.qq", "qq: is not a known field"),
    ],
)
def test_a_wrong_line_is_refused(tmp_path: Path, old: str, new: str, complaint: str):
    with pytest.raises(UserError, match=complaint):
        read_text(tmp_path, COMPACT.replace(old, new))


def test_a_throughput_stands_in_for_a_step_time_that_is_not_printed(tmp_path: Path):
    _, row = read_text(tmp_path, COMPACT.replace("tp: 2}}", "tp: 2}, global_batch: 32}")).rows
    assert row.step_time_s == pytest.approx(32 * 1024 / (16 * 2048))
    assert row.tokens_per_s == 16 * 2048
    assert read_text(tmp_path, COMPACT).rows[1].step_time_s is None


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
        ("136,902,082,560", 136_902_082_560),
        ("3.94E+15", 3.94e15),
        ("over 98", 98),
        ("16 borderline OOM", 16),
        ("OOM", None),
        ("x", None),
        ("", None),
    ],
)
def test_the_first_number_of_a_cell_counts(tmp_path: Path, printed: str, value: float | None):
    row = read(tmp_path, FILE.replace('"29"', f'"{printed}"'))
    assert row.figure("step_time_s") == value


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (
            "num_devices: 8",
            "num_devices: 8\n        num_nodes: 2",
            r"study.yaml:23: .*num_nodes: is not a known.*num_devices",
        ),
        ("    title: The table\n", "", r"title: is required but missing"),
        ("convention: six-n", "convention: six-m", r"convention must be one of full-attention"),
        ('units: {step_time_s: s, mfu: "%"}', "units: {step_time_s: s}", r"no entry for mfu"),
        (
            'step_time_s: "29"',
            "step_time_s: 29",
            r"study.yaml:24: .*step_time_s: 29.* is not text; allowed: text, in quotes",
        ),
        ("tables:", "tabels:", r"study.yaml"),
        (
            "tables:",
            "tables:\n  - 5",
            r"study.yaml:16: tables.0: .* is not a mapping",
        ),
    ],
    ids=[
        "unknown field",
        "missing field",
        "convention",
        "unit",
        "number instead of text",
        "no tables",
        "a table that is none",
    ],
)
def test_a_wrong_file_is_refused_with_file_and_reason(
    tmp_path: Path, old: str, new: str, complaint: str
):
    with pytest.raises(UserError, match=complaint):
        read(tmp_path, FILE.replace(old, new))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("common: 5", "common must be a mapping, not 5"),
        ("tables: 3", "study.yaml:5: tables: 3 is not a list; allowed: a list"),
        ("tables: [{id: t, title: x, rows: 7}]", "tables.0.rows: 7 is not a list"),
        ("tables: [{id: t, title: x, rows: 7, rows_csv: 'id'}]", "tables.0.rows: 7 is no"),
        (
            'tables: [{id: t, title: x, rows_csv: "id,id.a\\nb,1"}]',
            "the columns id and id.a exclude each other",
        ),
        (
            "tables: [{id: t, title: x, common: {printed: {}, units: {}},\n"
            "          rows: [{id: a}, {id: a}]}]",
            "two rows are called 'a'",
        ),
    ],
)
def test_a_file_of_another_build_is_refused(tmp_path: Path, text: str, complaint: str):
    with pytest.raises(UserError, match=complaint):
        read_text(tmp_path, f"source: a\nwhere: b\nwindow: c\n\n{text}\n")


def test_ids_are_unique_over_sources_tables_and_rows():
    names = [
        *references.sources(),
        *(table.id for table in references.tables()),
        *(row.id for row in references.rows()),
        *(point.id for source in references.sources().values() for point in source.convergence),
    ]
    assert len(names) == len(set(names))


def test_a_row_is_found_by_its_id():
    row = references.row("llama31-70b-fp8-64")
    assert (row.recipe, row.num_devices, row.dtype) == ("llama31-70b", 64, "fp8")


def test_an_unknown_row_suggests_the_nearest():
    with pytest.raises(UserError, match="did you mean 'llama31-70b-fp8-64'"):
        references.row("llama31-70b-fp8-63")


def test_a_name_may_be_a_source_a_table_or_a_row():
    everything = {row.id for row in references.find_rows("lambda-1cc")}
    table = {row.id for row in references.find_rows("lambda-1cc-opt-13b")}
    single = {row.id for row in references.find_rows("opt-13b-512")}
    assert single < table < everything
    with pytest.raises(UserError, match="did you mean lambda-1cc or lambda-1cc-subclusters"):
        references.find_rows("lambda-1c")


@pytest.mark.parametrize(
    ("recipe", "rows"),
    [("llama31-70b", 14), ("opt-350m-sft", 8), ("opt-13b-sft", 8), ("gpt-1b3", 23), ("none", 0)],
)
def test_a_recipe_gets_its_measured_rows(recipe: str, rows: int):
    measured = references.rows_of_recipe(recipe)
    assert len(measured) == rows
    assert all(row.tokens_per_s for row in measured)


def test_only_the_files_that_hold_a_name_are_read():
    references.source.cache_clear()
    assert references.find_rows("nvidia-llama31-70b-fp8") and references.row("opt-13b-512")
    assert references.source.cache_info().currsize == 2
    references.sources()


def test_tables_have_as_many_rows_as_their_source():
    sizes = {table.id: len(table.rows) for table in references.tables()}
    assert sizes["nvidia-llama31-70b-bf16"] == sizes["nvidia-llama31-70b-fp8"] == 6
    assert sizes["lambda-1cc-opt-350m"] == sizes["lambda-1cc-opt-13b"] == 8
    study = [sizes[f"bigscience-1b3-{name}"] for name in ("32gb", "32gb-no-recompute", "16gb")]
    assert sum(study) == 27


def test_rows_that_ran_out_of_memory_have_no_figure():
    oom = [row for row in references.rows() if row.status == "oom"]
    assert len(oom) == 4 + 5
    assert all(row.step_time_s is None and row.samples_per_s is None for row in oom)


def test_every_row_names_a_device_of_the_catalog_and_its_source():
    for row in references.rows():
        assert row.device and catalog.device(row.device).name == row.device, row.id
        assert row.source and row.where
        assert row.recipe in SHAPES or (row.recipe is None and row.model and row.shape)


def test_no_text_speaks_of_where_the_figures_were_collected():
    for name in references.source_names():
        text = "\n".join(
            f"{r.source} {r.where} {r.note} {r.statement}" for r in references.source(name).rows
        )
        assert "helper" not in text and "shared" not in text


@pytest.mark.parametrize("row", [r for r in SEED_ROWS if r.repeats], ids=lambda row: row.id)
def test_a_row_that_repeats_another_states_the_same_configuration(row: Row):
    twin = references.row(row.repeats or "")
    for field in ("num_devices", "global_batch", "layout", "dtype"):
        assert getattr(twin, field) == getattr(row, field)


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_a_recipe_runs_the_model_and_a_layout_of_its_published_rows(name: str):
    recipe = load_recipe(name)
    cited = {row.id for named in recipe.references for row in references.find_rows(named)}
    rows = references.rows_of_recipe(name)
    assert {row.id for row in rows} <= cited
    assert num_parameters(recipe.model) == num_parameters(SHAPES[name])
    assert linear_sizes(recipe.model) == linear_sizes(SHAPES[name])
    assert recipe.layout in [row.layout for row in rows]
    assert {(recipe.training.seq_len, recipe.training.dtype)} <= {
        (row.seq_len, row.dtype) for row in rows
    }


@pytest.mark.parametrize("row", SEED_ROWS, ids=lambda row: row.id)
def test_every_layout_of_the_seeds_is_possible(row: Row):
    assert row.recipe and row.num_devices and row.global_batch
    shape = SHAPES[row.recipe]
    assert layout_problems(ParallelRun(row.layout, shape, row.num_devices, row.global_batch)) == []


SEED_OF = {"seed1": 16, "seed3": 12, "seed4": 27}
"""Rows of the public collection that stand in the seeds' own files, by the start of their name."""


def test_every_public_measurement_is_a_row(reference_data: Path):
    with (reference_data / "references/measured_open.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    ours = {row.id: row for row in references.rows()}
    others = [line for line in lines if line["id"].partition("-")[0] not in SEED_OF]
    assert len(lines) - len(others) == sum(SEED_OF.values())
    assert [line["id"] for line in others if line["id"] not in ours] == []
    for line in others:
        row = ours[line["id"]]
        assert str(row.num_devices) == line["num_gpus"] and str(row.layout.tp) == line["tp"]
        assert str(row.seq_len or "") == line["seq_len"] and row.dtype == catalog.dtype(
            line["dtype"]
        )
        if line["step_time_s"] and not line["id"].startswith("meg21"):
            assert row.step_time_s == pytest.approx(float(line["step_time_s"]), rel=6e-3), row.id
        assert (row.status == "oom") is (not line["step_time_s"])


def test_the_rows_of_the_seeds_in_the_public_collection_are_those_of_their_own_files(
    reference_data: Path,
):
    with (reference_data / "references/measured_open.csv").open(newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["id"].startswith("seed")]
    for line in lines:
        alike = [
            row
            for row in SEED_ROWS
            if str(row.num_devices) == line["num_gpus"]
            and str(row.layout.tp) == line["tp"]
            and str(row.layout.pp) == line["pp"]
            and row.dtype == catalog.dtype(line["dtype"])
            and str(row.layout.micro_batch) == line["mbs"]
        ]
        times = [row.step_time_s for row in alike]
        expected = float(line["step_time_s"]) if line["step_time_s"] else None
        near = [
            t for t in times if t is expected or (t and expected and abs(t / expected - 1) < 0.02)
        ]
        assert near, line["id"]


def test_every_sub_cluster_is_a_row(reference_data: Path):
    with (reference_data / "references/lambda_1cc_subcluster_results.csv").open(newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["hostfile"] == "allnodes"]
    rows = references.source("lambda-1cc-subclusters").rows
    assert len(rows) == len(lines) == 2 * 127
    assert sorted(row.printed["samples_per_s"] for row in rows) == sorted(
        line["samples_per_s"] for line in lines
    )
    whole = [row for row in rows if row.num_devices == 512]
    assert {row.hosts for row in whole} == {"node-001 to node-064"}


def test_the_published_table_is_the_first_sub_cluster_of_each_size():
    for short in ("350m", "13b"):
        first = {
            row.num_devices: row
            for row in reversed(references.find_rows(f"lambda-1cc-subclusters-{short}"))
        }
        for row in references.find_rows(f"lambda-1cc-opt-{short}"):
            if row.num_devices and row.num_devices > 8:
                assert (
                    row.printed["samples_per_s_unrounded"]
                    == first[row.num_devices].printed["samples_per_s"]
                )


def test_convergence_points_have_the_official_mean_and_deviation(reference_data: Path):
    with (reference_data / "mlperf/rcp_expected.csv").open(newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["n"] != "0"]
    listed = {line["benchmark"] for line in lines}
    points = [p for p in references.source("mlperf-rcp").convergence if p.benchmark in listed]
    assert len(lines) == 2 * 13 and len(points) == 9 + 2 * 4
    for line in lines:
        (point,) = [
            p
            for p in points
            if p.benchmark == line["benchmark"]
            and str(p.global_batch) == line["batch_size"]
            and line["ruleset"] in p.rulesets
        ]
        runs = np.sort(point.samples_to_target)
        assert len(runs) == int(line["n"])
        assert runs[1:-1].mean() == pytest.approx(float(line["olympic_mean"]))
        assert runs.std() == pytest.approx(float(line["stdev_all"]))


def test_the_document_counts_the_rows_of_every_source():
    document = (Path(__file__).parents[2] / "docs" / "reference" / "tables.md").read_text()
    counts = dict(re.findall(r"^\| `([\w-]+)` \| (\d+|-) \|", document, re.MULTILINE))
    rows = {name: str(len(source.rows) or "-") for name, source in references.sources().items()}
    assert counts == rows
