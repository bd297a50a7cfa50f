"""The official checker judges copies of logs; no file of the user's changes."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from paceline.core.errors import SystemFaultError, UserError
from paceline.mlperf.check import official_checker
from paceline.mlperf.check.compliance import check
from paceline.mlperf.rules import UNOFFICIAL
from tests.mlperf.samples import line, submission, trial

pytestmark = pytest.mark.skipif(
    not official_checker.checker_rulesets(), reason="mlperf-logging is not installed"
)


def messages(place: Path) -> list[tuple[int | None, str]]:
    (file,) = check(place).files
    return [(finding.line, finding.message) for finding in file.findings]


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in paths}


def test_real_logs_pass_and_an_aborted_one_fails(reference_data: Path):
    logs = reference_data / "mlperf/logs/v5.1"
    folder = logs / "Dell/1xXE9780x8B200-SXM-180GB/llama2_70b_lora"
    before = contents(folder)

    checked = check(folder)

    assert [file.status for file in checked.files] == ["failed", *["passed"] * 9]
    assert (checked.ruleset, checked.ruleset_from, checked.status) == ("5.1.0", "path", "failed")
    assert "Required EXACTLY_ONE occurrence of 'run_stop' but found 0" in [
        finding.message for finding in checked.files[0].findings
    ]
    assert contents(folder) == before


def test_findings_have_the_lines_of_the_file(tmp_path: Path):
    path = tmp_path / "result_0.txt"
    path.write_text("shell\n\n" + line("lora_rank", 8) + "\n" + trial())

    findings = messages(path)

    (wrong,) = (message for number, message in findings if number == 3)
    assert wrong.startswith("CHECK for 'lora_rank' failed:\n:::MLLOG {")
    assert wrong.endswith("\nfailed test:  v['value'] == 16")
    assert (None, "Required EXACTLY_ONE occurrence of 'train_samples' but found 0") in findings


def test_nothing_beside_the_logs_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    submission(tmp_path / "runs", [10.0, 11.0])
    (tmp_path / "runs/scaling.json").write_text('{"scaling_factor": 1.5}')
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    before = contents(tmp_path)

    assert check(tmp_path / "runs").status == "failed"

    assert contents(tmp_path) == before and list(Path().iterdir()) == []


def test_a_name_that_leads_to_other_rules_is_not_given_to_the_checker(tmp_path: Path):
    planted = tmp_path / "planted_common.yaml"
    planted.write_text(f"- BEGIN:\n    CODE: open('{tmp_path}/ran', 'w').close()\n")
    leads = "../" * 30 + str(planted).removesuffix("_common.yaml").lstrip("/")
    path = tmp_path / "result_0.txt"
    path.write_text(trial().replace('"closed"', f'"{leads}"'))

    (file,) = check(path).files

    assert (file.status, (tmp_path / "ran").exists()) == ("error", False)
    assert "is not a valid benchmark or division" in str(file.reason)


def test_a_benchmark_without_rules_is_a_finding(tmp_path: Path):
    path = tmp_path / "result_0.txt"
    path.write_text(trial().replace('"llama2_70b_lora"', '"llama2_tiny"'))

    assert any("closed_llama2_tiny.yaml" in message for _, message in messages(path))


def test_a_log_on_which_the_checker_breaks_off_names_the_line(tmp_path: Path):
    path = tmp_path / "result_0.txt"
    path.write_text(':::MLLOG {"key": "seed", "value": 1, "metadata": {}}\n' + trial())

    (file,) = check(path).files

    assert file.status == "failed" and "KeyError" in str(file.reason)
    assert file.findings[0].line == 1 and file.findings[0].message.endswith("lacks time_ms")


def test_a_damaged_log_is_checked_as_far_as_it_goes(tmp_path: Path):
    packed = gzip.compress(trial().encode() + os.urandom(20_000))
    (tmp_path / "result_0.txt.gz").write_bytes(packed[:-9000])

    (file,) = check(tmp_path).files

    assert "the compressed file is damaged" in str(file.reason)


def test_a_file_with_several_trials_is_a_finding(tmp_path: Path):
    (tmp_path / "slurm.out").write_text(trial(0) + trial(1))

    assert any("contains 2 trials" in words for _, words in messages(tmp_path))


def test_an_unknown_ruleset_is_refused_and_a_default_is_named(tmp_path: Path):
    folder = submission(tmp_path, [10.0])

    assert (check(folder).ruleset, check(folder).ruleset_from) == ("5.1.0", "default")
    assert check(folder, "6.0.0").ruleset == "6.0.0"
    with pytest.raises(UserError, match=r"--ruleset 5\.2\.0: is not known to the official checker"):
        check(folder, "5.2.0")


def test_without_the_official_package_the_way_to_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(official_checker, "PACKAGE", "no-such-package-for-paceline")

    with pytest.raises(SystemFaultError, match=r"pip install 'paceline\[mlperf\]'"):
        check(submission(tmp_path, [10.0]))


def test_the_label_tells_small_siblings_by_whatever_rules(tmp_path: Path):
    (tmp_path / "a.txt").write_text(trial(benchmark="flux1_tiny", quality=0.5))
    (tmp_path / "b.txt").write_text(trial())
    small, whole = tmp_path / "a.txt", tmp_path / "b.txt"

    assert check(small).label == "not an MLPerf result: tiny variant of flux1"
    assert check(small, "tiny").label.startswith("not an MLPerf result: checked with modified")
    assert check(whole).label == UNOFFICIAL
    assert check(whole, "tiny").label.startswith(UNOFFICIAL)
