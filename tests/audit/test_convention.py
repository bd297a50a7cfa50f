"""A table that does not say how it counts FLOPs is read in the way that gives its own cells."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.audit.crosscheck import check
from paceline.audit.rows import assume, audit_lines
from paceline.core.flops import CONVENTIONS, FlopsInput, flops_per_sample
from paceline.core.layout import Recompute
from paceline.files.csv_table import TableDefaults, read_csv
from tests.core.shapes import LLAMA_8B

HEADER = "layers,hidden,ffn,heads,kv_heads,vocab,seq_len,num_gpus,gbs,step_time_s,tflops_per_gpu\n"


def table(tmp_path: Path, convention: str, recompute: Recompute = "none", num: int = 4) -> Path:
    """Rows of Llama 8B counted in one convention."""
    flops = flops_per_sample(convention, FlopsInput(LLAMA_8B, 8192, recompute))
    times = [12.91 + at / 10 for at in range(num)]
    lines = [
        f"32,4096,14336,32,8,128256,8192,8,128,{t:.2f},{flops * 16 / t / 1e12:.2f}\n" for t in times
    ]
    path = tmp_path / "mine.csv"
    path.write_text(HEADER + "".join(lines))
    return path


@pytest.mark.parametrize("convention", ["full-attention", "causal"])
def test_convention_and_gate_are_found(tmp_path: Path, convention: str):
    read = read_csv(table(tmp_path, convention), TableDefaults())
    rows, assumptions = assume(read.rows, read.gated_is_open)
    assert {row.convention for row in rows} == {convention}
    assert all(row.shape and row.shape.gated_ffn for row in rows)
    assert "gated feed-forward" in str(assumptions[0]) and "4 of 4 rows" in str(assumptions[0])


def test_recomputation_counted_as_work_is_found(tmp_path: Path):
    read = read_csv(table(tmp_path, "narayanan+recompute", "full"), TableDefaults())
    rows, assumptions = assume(read.rows, read.gated_is_open)
    assert {row.convention for row in rows} == {"narayanan+recompute"}
    assert "narayanan+recompute" in str(assumptions[0])


@pytest.mark.parametrize("name", ["narayanan+recompute", "narayanan-hw"])
def test_a_declared_convention_that_counts_recomputation_stands_for_a_full_one(
    tmp_path: Path, name: str
):
    path = table(tmp_path, name, "full")
    lines = path.read_text().splitlines()
    path.write_text("\n".join([f"{lines[0]},gated_ffn", *(f"{row},yes" for row in lines[1:])]))
    rows = read_csv(path, TableDefaults(convention=name)).rows
    verdicts = [v for v in check(audit_lines(rows)) if v.cell.column == "flops_per_s_per_device"]
    assert [verdict.state for verdict in verdicts] == ["follows"] * 4


def test_what_is_declared_is_not_questioned(tmp_path: Path):
    path = table(tmp_path, "full-attention")
    read = read_csv(path, TableDefaults(convention="causal"))
    rows, assumptions = assume(read.rows, read.gated_is_open)
    assert {row.convention for row in rows} == {"causal"}
    assert assumptions == [] and all(row.shape is None for row in rows)


def test_two_rows_are_too_few_to_tell(tmp_path: Path):
    read = read_csv(table(tmp_path, "causal", num=2), TableDefaults())
    rows, assumptions = assume(read.rows, read.gated_is_open)
    assert assumptions == [] and {row.convention for row in rows} == {None}


def test_figures_of_no_convention_stay_unknown(tmp_path: Path):
    path = table(tmp_path, "causal")
    path.write_text(path.read_text().replace("12.91,", "9.91,").replace("13.01,", "19.01,"))
    read = read_csv(path, TableDefaults())
    _, assumptions = assume(read.rows, read.gated_is_open)
    assert assumptions == []


def test_one_wrong_row_of_four_does_not_hide_the_convention(tmp_path: Path):
    path = table(tmp_path, "causal")
    path.write_text(path.read_text().replace("12.91,", "11.91,"))
    read = read_csv(path, TableDefaults())
    rows, assumptions = assume(read.rows, read.gated_is_open)
    assert {row.convention for row in rows} == {"causal"} and assumptions[0].num_given == 3


def test_every_convention_has_a_name_that_can_be_shown():
    assert all(name == convention.name for name, convention in CONVENTIONS.items())
