"""`paceline table audit` on the command line: forms, selection, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli.audit import KEYS, audit
from paceline.core.errors import UserError
from tests.cli.test_errors import paceline

app = typer.Typer()
app.command("audit")(audit)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def findings(*arguments: str) -> list[dict[str, Any]]:
    """What the verb prints as JSON; it must stand alone on standard output."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0
    return json.loads(result.stdout)


def test_json_is_a_list_of_findings_in_the_agreed_form():
    listed = findings("nvidia-llama31-70b-bf16")
    assert [tuple(finding) for finding in listed] == [KEYS] * 5
    (tokens,) = [finding for finding in listed if finding["column"] == "tokens_per_s"]
    assert tokens["printed"] == "2248957"
    assert tokens["recomputed"] == pytest.approx(2239948.73, abs=0.01)
    assert tokens["difference"] == pytest.approx(0.00402, abs=1e-5)
    mfu = next(finding for finding in listed if finding["row"] == "llama31-70b-bf16-128")
    assert mfu["printed"] == "54.06%" and mfu["recomputed"] == pytest.approx(0.5409, abs=1e-4)


def test_a_sound_table_is_an_empty_list_and_exit_code_0():
    assert findings("nvidia-llama31-70b-fp8", "--fail-on-findings") == []


def test_truncated_cells_need_all():
    assert findings("bigscience-1b3") == []
    cut = findings("bigscience-1b3", "--all")
    assert [finding["printed"] for finding in cut] == ["44.4", "44.4", "40.8", "42.5"]
    assert run("bigscience-1b3", "--all", "--fail-on-findings").exit_code == 0


def test_findings_fail_only_where_that_is_asked_for():
    assert run("nvidia-llama31").exit_code == 0
    assert run("nvidia-llama31", "--fail-on-findings").exit_code == 3
    chosen = ["--where", "column=layout", "--fail-on-findings"]
    assert run("nvidia-llama31", *chosen).exit_code == 0


def test_rows_are_selected_by_any_column():
    listed = findings(
        "nvidia-llama31", "--where", "column=mfu", "--where", "row=llama31-70b-bf16-512"
    )
    assert [finding["printed"] for finding in listed] == ["53.48%"]
    nothing = run("nvidia-llama31", "--where", "column=mfuu", "--json")
    assert nothing.exit_code == 0 and nothing.stdout == "[]\n"
    assert "--where column=mfuu: matches none of" in nothing.stderr
    assert "did you mean 'mfu'?" in nothing.stderr
    refused = run("nvidia-llama31", "--where", "colour=red")
    assert isinstance(refused.exception, UserError)
    assert "table, row, column, printed" in str(refused.exception)


def test_text_has_a_line_a_finding_under_its_table_and_says_what_was_checked():
    lines = run("nvidia-llama31").stdout.splitlines()
    assert lines[0] == "nvidia-llama31-70b-bf16"
    line = next(line for line in lines if "2248957" in line)
    assert "not 2239949" in line and "+0.402%" in line and "14.92 s" in line
    assert lines[-3] == (
        "15 rows, 58 cells checked: 50 follow (3 of them only if digits were "
        "cut off, or not together with the rest of the row; --all lists them), 8 do not."
    )
    assert lines[-2:] == [
        "They follow from 12 printed speeds.",
        "1 cell could not be checked: no other cell of its row determines it (1).",
    ]


def test_reasons_for_what_could_not_be_checked_are_counted():
    last = run("megatron-bridge").stdout.splitlines()[-1]
    assert last.startswith("72 cells could not be checked: ")
    assert "no other cell of its row determines it (36)" in last and "no FLOPs count" in last


def test_a_file_is_audited_with_what_the_options_declare(tmp_path: Path):
    path = tmp_path / "mine.csv"
    path.write_text(
        "gpu,dtype,num_gpus,seq_len,gbs,step_time_s,tokens_per_s,mfu_pct,days,colour\n"
        "H100,bf16,64,8192,128,14.72,71235,54.18,162.48,red\n"
        "H100,bf16,128,8192,256,14.73,142373,54.15,80.29,red\n"
    )
    options = [
        "--model",
        "llama31-70b",
        "--convention",
        "full-attention",
        "--peak",
        "989TFLOP/s",
        "--tokens",
        "1e12",
    ]
    result = run(str(path), *options)
    assert "line 3  days  80.29  not 81.29" in result.stdout
    assert "one digit misprinted: 81.29 would be consistent" in result.stdout
    assert "note: ignored columns: colour" in result.stderr


TABLE = (
    "id,gpu,num_gpus,gbs,seq_len,dtype,step_time_s,tokens_per_s,tokens_per_s_per_gpu,samples_per_s"
)
SUMMED = "is summed over all 8 devices, not divided by them"
OF_ONE = "is of one of the 8 devices, not of all"
BATCH = "follows with a global batch of 512, not the declared 64"


@pytest.mark.parametrize(
    ("figures", "causes"),
    [
        ("2.00,65536,65536,32.00", {"tokens_per_s_per_device": SUMMED}),
        ("2.00,8192,8192,4.000", {"samples_per_s": OF_ONE, "tokens_per_s": OF_ONE}),
        # One cause of three cells goes before a cause of each.
        (
            "2.00,524288,65536,256.0",
            dict.fromkeys(("samples_per_s", "tokens_per_s", "tokens_per_s_per_device"), BATCH),
        ),
    ],
)
def test_totals_and_figures_of_a_device_are_told_apart(
    tmp_path: Path, figures: str, causes: dict[str, str]
):
    path = tmp_path / "mine.csv"
    path.write_text(f"{TABLE}\nrow,H100-SXM,8,64,2048,bf16,{figures}\n")
    assert {each["column"]: each["cause"] for each in findings(str(path))} == causes


@pytest.mark.parametrize("num_sound", [3, 6])
def test_a_summed_throughput_that_gives_the_speed_explains_its_row(tmp_path: Path, num_sound: int):
    """The other cells follow from the speed of one device; another batch would cancel out."""
    header = "id,model,gpu,num_gpus,gbs,seq_len,dtype,tokens_per_s_per_gpu,tflops_per_gpu,mfu_pct"
    lines = [header]
    for number, tokens in enumerate((8904, *range(8500, 8500 + 50 * num_sound, 50))):
        tflops = tokens * 0.0514698  # 6 N + 6 L h s FLOPs per token
        printed = tokens * (1 if number else 8)
        settings = "llama31-8b,H100-SXM,8,128,8192,bf16"
        lines.append(f"r{number},{settings},{printed},{tflops:.1f},{tflops / 9.89:.2f}")
    path = tmp_path / "mine.csv"
    path.write_text("\n".join(lines) + "\n")
    causes = {
        each["column"]: each["cause"] for each in findings(str(path), "--convention", "causal")
    }
    if num_sound == 3:
        expected = "follows if tokens_per_s_per_device is summed over all 8 devices"
        assert causes == {"flops_per_s_per_device": expected, "mfu": expected}
    else:
        (cause,) = causes.values()
        assert cause.endswith(SUMMED)


def test_a_yaml_file_in_the_form_of_the_references_is_audited(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "source: A study\nwhere: page 3\nwindow: as printed\n"
        "common:\n  units: {step_time_s: s, tokens_per_s: tokens/s}\n"
        "tables:\n  - id: mine\n    title: Mine\n    common: {seq_len: 1024}\n    rows_csv: |\n"
        "      id,num_devices,global_batch,printed.step_time_s,printed.tokens_per_s\n"
        "      a,8,16,1.0000,16384\n      b,16,32,1.0000,32786\n"
    )
    (finding,) = findings(str(path))
    assert (finding["table"], finding["row"], finding["printed"]) == ("mine", "b", "32786")
    assert finding["cause"] == "two digits swapped: 32768 would be consistent"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nvidia-lama31"], "did you mean 'nvidia-llama31'"),
        (["missing.csv"], "cannot be read"),
        (["nvidia-llama31", "--peak", "1e15"], "declares these values"),
        (["--convention", "causal"], "declares these values"),
        (["x.csv", "--peak", "fast"], "--peak fast"),
        (["x.csv", "--convention", "casual"], "cannot be read"),
        (["x.csv", "--model", "llama31-7b"], "did you mean 'llama31-70b'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_1(arguments: list[str], complaint: str):
    done = paceline("table", "audit", *arguments)
    assert done.returncode == 1 and done.stdout == ""
    assert complaint in done.stderr and len(done.stderr.splitlines()) == 1


def test_what_samples_per_second_count_is_said_where_they_are_audited(tmp_path: Path):
    padded = run("opt-350m-8").stderr
    assert "note: samples/s count all samples of a step, including padding" in padded
    assert "samples of lambda-1cc-opt-350m are padded to seq_len" in padded
    path = tmp_path / "mine.csv"
    path.write_text("gbs,num_gpus,samples_per_s,tokens_per_s,seq_len\n16,8,32,16384,512\n")
    notes = run(str(path)).stderr
    assert "tokens/s derived from them count every position" in notes
    assert "filled up" not in notes
    assert "samples/s" not in run("nvidia-llama31").stderr
