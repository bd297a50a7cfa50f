"""A CSV file is read cell by cell; what is wrong with it is one error with its line."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.audit.tables import audit
from paceline.core.errors import UserError
from paceline.files.csv_table import COUNTS, PRINTED, TableDefaults, read_csv

GOOD = "id,gpu,dtype,num_gpus,seq_len,gbs,step_time_s,tokens_per_s,mfu_pct,days\n"
ROW = "a,H100,fp8,64,8192,128,11.01,95239,36.17,121.53\n"
DECLARED = TableDefaults(
    model="llama31-70b", convention="full-attention", peak_flops_per_s=1979e12, total_tokens=1e12
)


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "mine.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_row_becomes_a_published_row(tmp_path: Path):
    (row,) = read_csv(write(tmp_path, GOOD + ROW), DECLARED).rows
    assert (row.id, row.device, row.dtype, row.num_devices) == ("a", "H100-SXM", "fp8", 64)
    assert (row.seq_len, row.global_batch, row.recipe) == (8192, 128, "llama31-70b")
    assert row.printed == {
        "step_time_s": "11.01",
        "tokens_per_s": "95239",
        "mfu": "36.17",
        "days": "121.53",
    }
    assert row.figure("mfu") == pytest.approx(0.3617)


def test_columns_have_other_names_and_any_case(tmp_path: Path):
    text = (
        "Device,num_devices,global_batch,SEQ_LEN,step_time_s,tokens_per_s_per_device\n"
        "H100,8,16,1024,1.0,2048\n"
    )
    (row,) = read_csv(write(tmp_path, text), TableDefaults()).rows
    assert (row.num_devices, row.global_batch, row.seq_len) == (8, 16, 1024)
    assert row.printed["tokens_per_s_per_device"] == "2048"


@pytest.mark.parametrize(("text", "value"), [("54.1%", 0.541), ("0.541", 0.541), ("54.10%", 0.541)])
def test_mfu_is_a_fraction_or_in_per_cent(tmp_path: Path, text: str, value: float):
    (row,) = read_csv(write(tmp_path, f"step_time_s,mfu\n1.0,{text}\n"), TableDefaults()).rows
    assert row.figure("mfu") == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "-", "OOM", "x", "n/a"])
def test_a_run_without_a_figure_may_say_so(tmp_path: Path, text: str):
    (row,) = read_csv(
        write(tmp_path, f"step_time_s,tokens_per_s\n{text},5\n"), TableDefaults()
    ).rows
    assert row.printed == {"tokens_per_s": "5"}


def test_figures_that_a_program_wrote_with_a_zero_are_whole(tmp_path: Path):
    text = "step_time_s,tokens_per_s\n1.5,95239.0\n1.6,95240.0\n"
    first, _ = read_csv(write(tmp_path, text), TableDefaults()).rows
    assert first.printed == {"step_time_s": "1.5", "tokens_per_s": "95239"}


def test_one_figure_among_whole_ones_changes_nothing_for_the_others(tmp_path: Path):
    text = "tokens_per_s\n1254.0\n1932.3\n673.0\n736.0\n"
    rows = read_csv(write(tmp_path, text), TableDefaults()).rows
    assert [row.printed["tokens_per_s"] for row in rows] == ["1254", "1932.3", "673", "736"]
    text = "tokens_per_s\n1254.0\n1932.3\n673.4\n736.0\n"
    first = read_csv(write(tmp_path, text), TableDefaults()).rows[0]
    assert first.printed["tokens_per_s"] == "1254.0"


def test_a_table_without_names_is_numbered_by_its_lines(tmp_path: Path):
    text = "step_time_s,tokens_per_s\n\n1.0,5\n1.0,6\n"
    assert [row.id for row in read_csv(write(tmp_path, text), TableDefaults()).rows] == [
        "line 3",
        "line 4",
    ]


def test_a_byte_order_mark_and_foreign_line_ends_do_not_matter(tmp_path: Path):
    path = write(tmp_path, b"\xef\xbb\xbfstep_time_s,tokens_per_s\r\n1.0,5\r\n")
    assert len(read_csv(path, TableDefaults()).rows) == 1


def test_columns_that_are_not_understood_are_named(tmp_path: Path):
    table = read_csv(
        write(tmp_path, "step_time_s,tokens_per_s,colour,notes\n1,5,red,x\n"), TableDefaults()
    )
    assert table.ignored_columns == ("colour",)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", r"mine.csv: is empty"),
        ("\n\n", r"mine.csv: is empty"),
        (GOOD, r"has a header and no rows"),
        ("a,b\n1,2\n", r"mine.csv:1: has no column of figures; allowed: step_time_s"),
        ("step_time_s;tokens_per_s\n1;2\n", r"mine.csv:1: has no column.*cells by commas"),
        ("step_time_s,step_time_s\n1,2\n", r"mine.csv:1: two columns are called 'step_time_s'"),
        ("gpu,device,step_time_s\nH100,H100,1\n", r"mine.csv:1: two columns are called 'gpu'"),
        ("step_time_s,tokens_per_s\n1,abc\n", r"mine.csv:2: tokens_per_s: 'abc' is not a positive"),
        ("step_time_s,tokens_per_s\n1,5\n-1,5\n", r"mine.csv:3: step_time_s: '-1'"),
        ("step_time_s,tokens_per_s\n0,5\n", r"mine.csv:2: step_time_s: '0'"),
        ("step_time_s,tokens_per_s\n1e999,5\n", r"mine.csv:2: step_time_s: '1e999'"),
        ("step_time_s,tokens_per_s\nnan,5\n", r"mine.csv:2: step_time_s: 'nan'"),
        ("step_time_s,gbs\n1,1.5\n", r"mine.csv:2: gbs: '1.5' is not a whole number"),
        ("step_time_s,gbs\n1,5%\n", r"mine.csv:2: gbs: '5%' must not be a percentage"),
        ("step_time_s,mfu\n1,54\n", r"mine.csv:2: mfu: '54' must be a fraction"),
        ("step_time_s,tokens_per_s\n1,2,3\n", r"mine.csv:2: has 3 cells, the header 2"),
        ('step_time_s,tokens_per_s\n"1,2\n', r"mine.csv:2: is not CSV"),
        ("id,step_time_s\na,1\na,2\n", r"mine.csv:3: duplicates the row id 'a'"),
        ("gpu,step_time_s\nRTX9999,1\n", r"mine.csv:2: device 'RTX9999' is not in the catalog"),
        ("dtype,step_time_s\nint3,1\n", r"mine.csv:2: dtype 'int3' is not in the catalog"),
        (
            "convention,step_time_s\ncasual,1\n",
            r"mine.csv:2: convention 'casual' is unknown.*causal",
        ),
        (
            "layers,hidden,ffn,heads,vocab,step_time_s\n2,65,8,2,9,1\n",
            r"mine.csv:2: .*hidden_size 65 is not a multiple of num_heads 2",
        ),
        (b"step_time_s,tokens_per_s\n1,5\n\xff,1\n", r"mine.csv:3: is not UTF-8 text"),
        (b"\x00\x01\x02", r"mine.csv:1: "),
    ],
)
def test_a_faulty_file_gives_one_error_with_its_line(
    tmp_path: Path, text: str | bytes, complaint: str
):
    with pytest.raises(UserError, match=complaint) as refused:
        read_csv(write(tmp_path, text), TableDefaults())
    assert refused.value.exit_code == 1 and "\n" not in str(refused.value)


def test_a_missing_file_cannot_be_read(tmp_path: Path):
    with pytest.raises(UserError, match="cannot be read"):
        read_csv(tmp_path / "none.csv", TableDefaults())


def findings(path: Path, declared: TableDefaults = DECLARED) -> dict[tuple[str, str], str]:
    return {(f.row, f.column): f.cause for f in audit(str(path), declared).audit.findings}


def test_the_users_table_is_audited_with_what_was_declared(tmp_path: Path):
    good = write(tmp_path, GOOD + ROW)
    result = audit(str(good), DECLARED).audit
    # The source computes with 3.94E+15 FLOPs, which was not declared here.
    assert {(f.row, f.column) for f in result.findings} == {("a", "mfu")}
    assert "rounded to 3.94E+15" in result.findings[0].cause
    wrong = write(tmp_path, GOOD + ROW.replace("95239", "95715"))
    assert ("a", "tokens_per_s") in findings(wrong)


def test_the_halved_throughput_of_a_published_table_is_told(tmp_path: Path):
    text = (
        "model,gpu,dtype,num_gpus,seq_len,gbs,step_time_s,tokens_per_s\n"
        "Grok1 314B,GB200,bf16,512,8192,1024,7.324,572679\n"
    )
    assert findings(write(tmp_path, text), TableDefaults()) == {
        ("line 2", "tokens_per_s"): "follows with a global batch of 512, not the declared 1024"
    }


def test_an_mfu_on_the_sparse_peak_is_told(tmp_path: Path):
    rows = [
        "64,128,11.01,95239,36.17",
        "128,256,10.93,191871,36.43",
        "256,512,11.16,375834,35.68",
        "512,1024,11.18,750323,17.81",
    ]
    header = "gpu,dtype,seq_len,num_gpus,gbs,step_time_s,tokens_per_s,mfu_pct\n"
    text = header + "".join(f"H100,fp8,8192,{row}\n" for row in rows)
    (cause,) = findings(write(tmp_path, text), TableDefaults(model="llama31-70b")).values()
    assert "3958 TFLOP/s, the sparse fp8 peak of H100-SXM" in cause


@pytest.mark.parametrize(
    ("mfu", "cause"),
    [
        ("54.10", None),
        ("27.08", "follows with a peak of 1979 TFLOP/s, the fp8 peak of H100-SXM"),
        ("154.10", "no change of a single input explains it"),
    ],
)
def test_a_single_row_that_names_device_and_convention_has_its_mfu_checked(
    tmp_path: Path, mfu: str, cause: str | None
):
    text = (
        "model,gpu,dtype,convention,num_gpus,seq_len,gbs,step_time_s,mfu_pct\n"
        f"llama31-70b,H100,bf16,full-attention,64,8192,128,14.72,{mfu}\n"
    )
    path = write(tmp_path, text)
    causes, notes = findings(path, TableDefaults()), audit(str(path)).notes
    assert "the dense peak of the data sheet" in notes[0]
    assert causes == ({} if cause is None else {("line 2", "mfu"): causes.get(("line 2", "mfu"))})
    assert (cause or "") in "".join(causes.values())


def test_batch_and_devices_may_be_missing_where_they_cancel_out(tmp_path: Path):
    text = "seq_len,tokens_per_s_per_gpu,tflops_per_gpu\n8192,1639,736\n"
    declared = TableDefaults(model="llama31-70b", convention="causal")
    result = audit(str(write(tmp_path, text)), declared).audit
    assert (result.num_checked, result.findings) == (1, ())


def test_options_are_refused_for_tables_that_declare_themselves():
    with pytest.raises(UserError, match="declares these values itself"):
        audit("nvidia-llama31", DECLARED)


def test_the_public_measurements_hold_few_contradictions(reference_data: Path):
    table = audit(str(reference_data / "references" / "measured_open.csv"))
    cells = {(f.row, f.column) for f in table.audit.findings}
    assert table.audit.num_rows == 827 and table.audit.num_checked > 900
    assert cells == {
        ("seed3-006", "tokens_per_s"),
        ("seed3-006", "mfu"),
        ("mbridge-146", "flops_per_s_per_device"),
        ("nvx-043", "layout"),
        ("nvx-045", "tokens_per_s"),
        ("nvx-050", "tokens_per_s"),
        ("nvx-054", "tokens_per_s"),
        ("nvx-082", "tokens_per_s"),
        ("nvx-087", "tokens_per_s"),
        ("nvx-091", "tokens_per_s"),
    }


cell = st.one_of(
    st.sampled_from(["", "-", "OOM", "0", "1", "8192", "14.72", "1e9", "5%", "H100", "bf16", "x"]),
    st.floats(1e-3, 1e6).map(str),
    st.integers(1, 10**6).map(str),
    st.text(max_size=5),
)
columns = st.lists(
    st.sampled_from([*PRINTED, *COUNTS, "gpu", "dtype", "convention", "model", "peak_tflops"]),
    min_size=1,
    max_size=9,
    unique=True,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), columns, st.integers(1, 5))
def test_any_table_is_audited_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, names: list[str], num_rows: int
):
    rows = [[data.draw(cell) for _ in names] for _ in range(num_rows)]
    path = tmp_path_factory.mktemp("fuzz") / "any.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([names, *rows])
    try:
        result = audit(str(path)).audit
    except UserError as error:
        assert "any.csv" in str(error)
    else:
        assert result.num_rows <= num_rows
        json.dumps([vars(f) for f in result.findings], allow_nan=False)
