"""A whole submission under the official checkers: what is said, and that nothing changes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.mlperf.check import official_checker
from paceline.mlperf.check.findings import Check, CheckedFile
from paceline.mlperf.submission.package_check import check, is_submission
from tests.mlperf.submissions import contents, description, whole_submission, whole_trial

pytestmark = pytest.mark.skipif(
    not official_checker.checker_rulesets(), reason="mlperf-logging is not installed"
)
RUNS = "results/box_2x8/llama2_70b_lora"


@pytest.fixture
def submission(tmp_path: Path) -> Path:
    return whole_submission(tmp_path / "Example")


def of(checked: Check, name: str) -> CheckedFile:
    return next(file for file in checked.files if file.file == name)


def messages(checked: Check, name: str = RUNS) -> list[str]:
    return [finding.message for finding in of(checked, name).findings]


def test_a_whole_submission_passes_and_nothing_of_it_changes(submission: Path):
    before = contents(submission.parent)
    checked = check(submission)

    assert (checked.status, checked.kind, checked.official) == ("passed", "submission", False)
    assert [file.file for file in checked.files][:2] == ["systems/box_2x8.json", RUNS]
    assert len(checked.files) == 12 and contents(submission.parent) == before


def test_faults_of_runs_seeds_and_single_lines_are_all_found(submission: Path):
    runs = submission / RUNS
    (runs / "result_3.txt").write_text(whole_trial(3, lora_rank=8, seed=101))
    (runs / "result_4.txt").write_text(whole_trial(4, lora_rank=8, seed=None))
    (runs / "result_9.txt").unlink()

    checked = check(submission)

    assert checked.status == "failed"
    number, broken, seeds, _ = messages(checked)
    assert number.endswith("found 9, expected 10")
    assert broken == "2 files do not comply, directory cannot be accepted"
    assert "result_3.txt logs seed 101" in seeds and "result_4.txt logs no seed" in seeds
    (wrong,) = of(checked, f"{RUNS}/result_3.txt").findings
    assert (wrong.line, wrong.key) == (18, "lora_rank")


def test_one_log_that_breaks_the_rules_is_the_one_that_is_dropped(submission: Path):
    (submission / RUNS / "result_3.txt").write_text(whole_trial(3, lora_rank=8))
    checked = check(submission)

    assert checked.status == "passed" and of(checked, f"{RUNS}/result_3.txt").status == "failed"
    assert [finding.message for finding in of(checked, RUNS).warnings] == [
        "1 file does not comply, accepting this under olympic scoring"
    ]


def test_runs_that_converge_too_fast_and_a_stated_scaling_are_found(submission: Path):
    for number in range(10):
        (submission / RUNS / f"result_{number}.txt").write_text(whole_trial(number, samples=2304))
    (submission / RUNS / "scaling.json").write_text('{"scaling_factor": 1.5}')
    (submission / RUNS / "notes.md").write_text("see below")
    before = contents(submission)

    checked = check(submission)

    assert messages(checked) == ["RCP Test Failed: RCP found"]
    assert [finding.message for finding in of(checked, RUNS).warnings] == [
        "files that do not belong to a run: notes.md",
        "scaling.json has the factor 1.5, the convergence test gives none",
    ]
    assert contents(submission) == before


def test_packed_logs_are_checked_and_the_packing_is_said(submission: Path):
    path = submission / RUNS / "result_2.txt"
    Path(f"{path}.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()

    checked = check(submission)

    assert checked.status == "passed"
    assert "1 log is compressed (.gz)" in of(checked, RUNS).warnings[0].message


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [("{\n  3", "invalid JSON: Expecting property name", 2), ("[]", "not a JSON object", 1)],
)
def test_a_description_that_cannot_be_read_is_a_finding_with_its_line(
    submission: Path, text: str, message: str, line: int
):
    (submission / "systems/box_2x8.json").write_text(text)
    checked = check(submission)

    (wrong,) = of(checked, "systems/box_2x8.json").findings
    assert wrong.message.startswith(message) and wrong.line == line
    assert messages(checked, "results/box_2x8") == [
        "was not checked: systems/box_2x8.json cannot be read"
    ]


def test_a_description_that_is_missing_or_has_faults_is_a_finding(submission: Path):
    description(submission / "systems/box_2x8.json", cooling=None)
    assert messages(check(submission), "systems/box_2x8.json") == ["cooling is missing"]

    (submission / "systems/box_2x8.json").unlink()
    assert messages(check(submission), "results/box_2x8") == [
        "has no description systems/box_2x8.json"
    ]


def test_a_submission_without_results_is_a_finding(tmp_path: Path):
    description(tmp_path / "systems/box.json")
    (tmp_path / "results").mkdir()

    assert is_submission(tmp_path)
    assert messages(check(tmp_path), "results") == ["contains no folder <system>/<benchmark>"]


def test_a_description_alone_is_checked_and_logs_still_are(submission: Path, tmp_path: Path):
    checked = check(submission / "systems/box_2x8.json", "5.1.0")
    assert (checked.kind, checked.status, checked.ruleset_from) == (
        "description",
        "passed",
        "option",
    )

    wrong = check(description(tmp_path / "b.json", status="onprem"))
    assert wrong.status == "failed" and wrong.files[0].findings[0].line == 4

    assert check(submission / RUNS / "result_0.txt").kind == "logs"
    with pytest.raises(UserError, match="cannot be read: No such file"):
        check(tmp_path / "gone.json")


def test_a_published_submission_passes(reference_data: Path, tmp_path: Path):
    system = "gb300_n18_ngc25.04_nemo"
    logs = reference_data / "mlperf/logs/v5.1/Lambda" / system / "llama31_8b"
    target = tmp_path / "Lambda/results" / system
    target.mkdir(parents=True)
    (target / "llama31_8b").symlink_to(logs)
    fields = json.loads(
        (reference_data / f"mlperf/systems/v5.1__Lambda__{system}.json").read_text()
    )
    description(tmp_path / f"Lambda/systems/{system}.json", **fields)

    checked = check(tmp_path / "Lambda", "5.1.0")

    assert checked.status == "passed" and len(checked.files) == 12
    assert [
        finding.message for finding in of(checked, f"results/{system}/llama31_8b").warnings
    ] == ["10 logs are compressed (.gz); a submission needs plain files"]


def test_the_small_siblings_rules_are_for_logs_alone(submission: Path):
    for place in (submission, submission / "systems/box_2x8.json"):
        with pytest.raises(UserError, match="--ruleset tiny: is only for logs"):
            check(place, "tiny")


def test_a_description_on_which_the_checker_breaks_off_is_broken_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(official_checker, "PROGRAM", tmp_path / "crashes.py")
    (tmp_path / "crashes.py").write_text("raise OSError('no room')")

    checked = check(description(tmp_path / "b.json"))

    assert (checked.status, checked.files[0].status) == ("error", "error")
    assert "no room" in str(checked.files[0].reason) and checked.files[0].findings == ()
