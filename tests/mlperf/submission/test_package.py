"""A submission is laid out from copies, passes the official checker, or is not there at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.errors import SystemFaultError, UserError
from paceline.mlperf.check import official_checker
from paceline.mlperf.submission.package import PackageRequest, RuleViolationError, package
from tests.mlperf.samples import line
from tests.mlperf.submissions import SYSTEM, contents, description, ten_runs, whole_trial

installed = pytest.mark.skipif(
    not official_checker.checker_rulesets(), reason="mlperf-logging is not installed"
)


@pytest.fixture
def package_request(tmp_path: Path) -> PackageRequest:
    """Ten runs that needed fewer samples than the reference, a description and some code."""
    code = tmp_path / "trainer"
    (code / "__pycache__").mkdir(parents=True)
    (code / "train.py").write_text("print('trained')\n")
    (code / "__pycache__/train.pyc").write_bytes(b"\0")
    (code / "gone").symlink_to(tmp_path / "nowhere")
    return PackageRequest(
        places=(ten_runs(tmp_path / "runs", samples=3000),),
        organization="Example",
        division="closed",
        system=description(tmp_path / f"{SYSTEM}.json"),
        code={"": code},
        out=tmp_path / "submission",
    )


@installed
def test_a_package_holds_copies_of_all_and_passes(package_request: PackageRequest):
    before = contents(package_request.out.parent)
    made = package(package_request)
    folder = package_request.out / "Example"

    assert made.folder == str(folder) and made.check.status == "passed"
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) == sorted(
        [
            "benchmarks/llama2_70b_lora/implementations/trainer/train.py",
            *(f"results/{SYSTEM}/llama2_70b_lora/result_{n}.txt" for n in range(10)),
            f"results/{SYSTEM}/llama2_70b_lora/scaling.json",
            f"systems/{SYSTEM}.json",
        ]
    )
    scaling = json.loads((folder / f"results/{SYSTEM}/llama2_70b_lora/scaling.json").read_text())
    assert scaling["scaling_factor"] == pytest.approx(3178.6667 / 3000, abs=1e-7)
    assert made.results[0].score_minutes == pytest.approx(10.1875 * scaling["scaling_factor"])
    assert {
        name: text for name, text in contents(package_request.out.parent).items() if name in before
    } == before
    assert sorted(path.name for path in package_request.out.iterdir()) == ["Example"]

    with pytest.raises(UserError, match="already exists"):
        package(package_request)


@installed
def test_what_the_official_checker_refuses_is_not_written(package_request: PackageRequest):
    ten_runs(package_request.places[0], lora_rank=8)
    made = package(package_request)

    assert made.folder is None and made.check.status == "failed"
    assert list(package_request.out.iterdir()) == []
    assert any(
        "CHECK for 'lora_rank'" in f.message for file in made.check.files for f in file.findings
    )


def changed_log(text: Callable[[str], str]) -> Callable[[PackageRequest], PackageRequest]:
    def change(package_request: PackageRequest) -> PackageRequest:
        log = package_request.places[0] / "result_4.txt"
        log.write_text(text(log.read_text()))
        return package_request

    return change


def described(**fields: object) -> Callable[[PackageRequest], PackageRequest]:
    def change(package_request: PackageRequest) -> PackageRequest:
        description(package_request.system, **fields)
        return package_request

    return change


PLACEHOLDER = changed_log(lambda text: text.replace('"Example"', '"SUBMISSION_ORG_PLACEHOLDER"'))
REFUSED: list[tuple[Callable[[PackageRequest], PackageRequest], str]] = [
    (lambda a: replace(a, organization="<org>"), "--org <org>: is a placeholder"),
    (lambda a: replace(a, organization="Other"), "its submitter is 'Example', not 'Other'"),
    (lambda a: replace(a, division="open"), "its division is 'closed', not 'open'"),
    (
        PLACEHOLDER,
        r"result_4.txt:4: submission_org is a placeholder: 'SUBMISSION_ORG_PLACEHOLDER'",
    ),
    (
        changed_log(lambda t: t.replace('"Example"', '"Else"')),
        "submission_org is 'Else', not 'Example'",
    ),
    (changed_log(lambda t: t.replace("2xBox", "tiny box")), "a tiny variant of the benchmark"),
    (changed_log(lambda t: t + line("data_source", "synthetic")), "trained on synthetic data"),
    (
        changed_log(lambda _: whole_trial(4, samples=9).replace("success", "aborted")),
        "has no score: 2 of 10 runs did not converge",
    ),
    (described(cooling="UNKNOWN: air, liquid, ..."), r"box_2x8.json:29: cooling is still UNKNOWN"),
    (described(submitter="YOUR_ORG"), "submitter is a placeholder"),
    (described(system_name="Box, tiny"), "system 'Box, tiny' is that of tiny variants"),
    (
        lambda a: replace(a, system=description(a.system.with_name("box-tiny.json"))),
        "system 'box-tiny' is that of tiny variants",
    ),
]


@pytest.mark.parametrize(("change", "words"), REFUSED)
def test_what_the_rules_refuse_is_refused_before_anything_is_written(
    package_request: PackageRequest, change: Callable[[PackageRequest], PackageRequest], words: str
):
    if "2 of 10" in words:
        (package_request.places[0] / "result_1.txt").write_text(
            whole_trial(1).replace("success", "aborted")
        )
    changed = change(package_request)

    with pytest.raises(RuleViolationError, match=words) as refused:
        package(changed)
    assert refused.value.exit_code == 3 and not package_request.out.exists()


@installed
def test_placeholders_in_logs_can_be_answered_for(package_request: PackageRequest):
    made = package(replace(PLACEHOLDER(package_request), placeholders=True))

    assert made.folder and any("is still a placeholder" in warning for warning in made.warnings)


BAD: list[tuple[Callable[[PackageRequest], PackageRequest], str]] = [
    (lambda a: replace(a, organization="a/b"), "is not a valid folder name"),
    (lambda a: replace(a, division="half"), "--division half: is unknown"),
    (lambda a: replace(a, system=a.out / "no.json"), "cannot be read"),
    (lambda a: replace(a, places=(a.out / "no",)), "is not a folder"),
    (lambda a: replace(a, code={"flux1": a.code[""]}), "gives no code for llama2_70b_lora"),
    (lambda a: replace(a, out=a.code[""] / "out"), "is inside the code folder"),
    (lambda a: replace(a, places=a.places * 2), "two folders contain llama2_70b_lora"),
]


@pytest.mark.parametrize(("change", "words"), BAD)
def test_bad_input_is_named(
    package_request: PackageRequest, change: Callable[[PackageRequest], PackageRequest], words: str
):
    with pytest.raises(UserError, match=words):
        package(change(package_request))
    assert not package_request.out.exists()


def test_trials_that_share_a_file_are_refused(package_request: PackageRequest):
    logs = [path.read_text() for path in sorted(package_request.places[0].iterdir())]
    for path in package_request.places[0].iterdir():
        path.unlink()
    (package_request.places[0] / "slurm.out").write_text("".join(logs))

    with pytest.raises(RuleViolationError, match="contains several trials"):
        package(package_request)


def test_a_place_that_cannot_be_written_is_a_fault_of_the_system(
    package_request: PackageRequest, tmp_path: Path
):
    (tmp_path / "file").write_text("")

    with pytest.raises(SystemFaultError, match="cannot be written"):
        package(replace(package_request, out=tmp_path / "file"))


@pytest.mark.parametrize("kind", ["outside", "device", "pipe", "excluded", "folder"])
def test_code_with_links_to_other_files_is_not_published(
    package_request: PackageRequest, tmp_path: Path, kind: str
):
    code = package_request.code[""]
    (tmp_path / "id_rsa").write_text("KEY")
    (code / ".git").mkdir()
    (code / ".git" / "config").write_text("KEY")
    if kind == "pipe":
        os.mkfifo(code / "readme")
    else:
        targets = {"outside": tmp_path / "id_rsa", "device": Path("/dev/zero"), "folder": code}
        (code / "readme").symlink_to(targets.get(kind, code / ".git" / "config"))

    with pytest.raises(UserError, match="readme: is "):
        package(package_request)

    assert not package_request.out.exists() or not list(package_request.out.iterdir())


@installed
def test_links_within_the_code_are_copied_as_files(package_request: PackageRequest):
    (package_request.code[""] / "again.py").symlink_to("train.py")
    packaged = package(package_request)
    assert packaged.check.status == "passed" and packaged.folder
