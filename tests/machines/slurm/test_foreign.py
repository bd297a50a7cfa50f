"""Batch scripts of somebody else: what sbatch is really called with, and where."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.core.job import BatchScript, Job
from paceline.machines import slurm
from paceline.machines.slurm import ArraySubmitter
from paceline.machines.slurm.batch import BatchRun
from paceline.machines.slurm.foreign import job_outputs, keep_linked_logs, submitted_logs
from paceline.runs.ending import log_tail
from tests.machines.slurm.fake_slurm import put
from tests.machines.slurm.test_script import make_job

SEEN = f"""{sys.executable} - "$@" <<'END'
import json, os, sys
seen = [sys.argv[1:], os.getcwd(), dict(os.environ)]
json.dump(seen, open(os.environ["SEEN"], "w"))
END
echo '17;bed'
"""
OPTIONS = ("-N", "2", "-t", "15", "-p", "gpu")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    folder = tmp_path / "their files"
    folder.mkdir()
    (folder / "run.sub").write_text("#!/bin/bash\n#SBATCH --exclusive\ntrue\n")
    return folder / "run.sub"


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "commands"
    place.mkdir()
    monkeypatch.setenv("SEEN", str(tmp_path / "seen.json"))
    plain = "echo 'AccountingStorageType = accounting_storage/none'"
    put(place, monkeypatch, sbatch=SEEN, squeue="true", sacct="true", scontrol=plain, sinfo="true")
    return tmp_path / "seen.json"


def foreign(script: Path, **env: str) -> Job:
    batch = BatchScript(script.name, str(script.parent), OPTIONS)
    return replace(make_job(), env=env, batch=batch, logs=("results/*_[0-9].log",))


def test_sbatch_is_called_in_its_folder_with_its_words_and_variables(
    tmp_path: Path, script: Path, seen: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    job = foreign(script, LOGDIR="{folder}/results", WORDS="a b 'c' $d", NGC_API_KEY="topsecret1")
    slurm.prepare(job, folder)
    assert (folder / "job.sh").read_text() == slurm.render(job)
    run = slurm.submit(job, folder, after=["3"])
    assert isinstance(run, BatchRun) and run.id == "17" and not run.may_retry
    argv, cwd, env = json.loads(seen.read_text())
    assert argv == [
        *("--parsable", "--no-requeue", f"--output={folder}/slurm-%j.log"),
        *("--dependency=afterok:3", "--kill-on-invalid-dep=yes"),
        *(*OPTIONS, "run.sub"),
    ]
    assert cwd == str(script.parent)
    assert env["LOGDIR"] == f"{folder}/results" and env["WORDS"] == "a b 'c' $d"
    assert env["NGC_API_KEY"] == "topsecret1"
    assert not any(b"topsecret1" in path.read_bytes() for path in folder.rglob("*.*"))
    assert (folder / "batch" / "run.sub").read_text() == script.read_text()


def test_its_logs_are_found_by_their_patterns_before_what_it_printed(
    tmp_path: Path, script: Path, seen: Path
) -> None:
    folder = tmp_path / "run"
    (folder / "results").mkdir(parents=True)
    assert submitted_logs(folder) == []
    slurm.prepare(foreign(script), folder)
    for name in ("25_2.log", "25_1.log", "25_nccl.log"):
        (folder / "results" / name).touch()
    (folder / "slurm-17.log").touch()
    names = [path.name for path in submitted_logs(folder)]
    assert names == ["25_1.log", "25_2.log", "slurm-17.log"]


def test_errors_next_to_a_log_come_before_the_output_of_the_script(
    tmp_path: Path, script: Path, seen: Path
) -> None:
    folder = tmp_path / "run"
    (folder / "results").mkdir(parents=True)
    slurm.prepare(replace(foreign(script), logs=("results/log-*.out",)), folder)
    for name in ("results/log-7.out", "results/log-7.err", "slurm-17.log"):
        (folder / name).touch()
    assert [path.name for path in job_outputs(folder)] == ["log-7.out", "log-7.err", "slurm-17.log"]
    (folder / "results" / "log-7.err").write_text("ValueError: num_layers (126)\n")
    (folder / "slurm-17.log").write_text("srun: error: task 3: Exited with exit code 1\n")
    assert log_tail(folder) == ["ValueError: num_layers (126)"]


@pytest.mark.parametrize("pattern", ["../*.log", "/etc/host*", "a/../../*"])
def test_a_folder_of_somebody_else_leads_to_no_file_outside_of_it(
    tmp_path: Path, pattern: str
) -> None:
    (tmp_path / "other.log").touch()
    folder = tmp_path / "run"
    folder.mkdir()
    record = {"script": "x", "sha256": "x", "folder": "/", "options": [], "logs": [pattern]}
    (folder / "batch.json").write_text(json.dumps(record))
    assert submitted_logs(folder) == []


def test_a_script_that_is_not_there_is_refused(tmp_path: Path, script: Path) -> None:
    script.unlink()
    with pytest.raises(UserError, match="is not a readable batch script"):
        slurm.prepare(foreign(script), tmp_path)


def test_it_is_no_task_of_an_array(tmp_path: Path, script: Path, seen: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    job = foreign(script)
    slurm.prepare(job, folder)
    gathering = ArraySubmitter(2, tmp_path)
    with gathering.submitter() as submit:
        run = submit(job, folder)
    assert isinstance(run, BatchRun) and run.id == "17"
    assert gathering.expected == 1, "the others do not wait for it"
    assert not (tmp_path / "array.sh").exists()


def test_logs_that_are_linked_to_are_kept_once_the_job_has_ended(tmp_path: Path) -> None:
    folder, theirs = tmp_path / "run", tmp_path / "theirs"
    for place in (folder, theirs):
        place.mkdir()
    (theirs / "log-x.out").write_text("step\n")
    (theirs / "weights.bin").touch()
    own = BatchScript(script="./submit.sh", submits=True)
    job = replace(make_job(), batch=own, files={"submit.sh": ""}, logs=("there/log-*.out",))
    slurm.prepare(job, folder)
    (folder / "there").symlink_to(theirs)
    (folder / "there.part").touch()
    keep_linked_logs(folder)
    assert submitted_logs(folder)[0].read_text() == "step\n", "which could not be copied"
    (folder / "there.part").unlink()
    for _ in range(2):
        keep_linked_logs(folder)
        assert [path.name for path in (folder / "there").iterdir()] == ["log-x.out"]
    shutil.rmtree(theirs)
    assert submitted_logs(folder)[0].read_text() == "step\n"
