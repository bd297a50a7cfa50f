"""Jobs of several threads become one array, also when some of them never come."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.core.errors import SystemFaultError
from paceline.core.job import Job
from paceline.machines.slurm import ArraySubmitter
from paceline.machines.slurm.batch import BatchRun
from tests.machines.slurm.fake_slurm import put
from tests.machines.slurm.test_script import make_job


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "commands"
    place.mkdir()
    return put(
        place,
        monkeypatch,
        sbatch="echo 40",
        squeue="true",
        sacct="true",
        scontrol="echo 'AccountingStorageType = accounting_storage/none'",
    )


def hand_in(gathering: ArraySubmitter, job: Job | None, folder: Path) -> BatchRun | None:
    """What a thread does with its job; None is one that is given up before."""
    folder.mkdir()
    with gathering.submitter() as submit:
        run = submit(job, folder) if job else None
    assert run is None or isinstance(run, BatchRun)
    return run


def handed_in(gathering: ArraySubmitter, root: Path, *jobs: Job | None) -> list[BatchRun | None]:
    with ThreadPoolExecutor(len(jobs)) as pool:
        futures = [
            pool.submit(hand_in, gathering, job, root / str(number))
            for number, job in enumerate(jobs)
        ]
        return [future.result(20) for future in futures]


def test_all_become_one_array_of_which_some_run_at_once(tmp_path: Path, calls: Path) -> None:
    gathering = ArraySubmitter(3, tmp_path / "place", at_once=2)
    runs = handed_in(gathering, tmp_path, *(make_job(name) for name in "abc"))
    assert sorted(run.id for run in runs if run) == ["40_0", "40_1", "40_2"]
    assert calls.read_text().count("sbatch") == 1
    script = (tmp_path / "place" / "array.sh").read_text()
    assert "#SBATCH --array=0-2%2\n" in script
    places = [line.strip() for line in script.splitlines() if line.startswith("  ")]
    for run in filter(None, runs):
        assert places[int(run.id.partition("_")[2])] == str(run.folder)


def test_one_that_never_comes_holds_up_nobody(tmp_path: Path, calls: Path) -> None:
    runs = handed_in(
        ArraySubmitter(3, tmp_path / "p"), tmp_path, make_job("a"), None, make_job("b")
    )
    assert runs[1] is None and runs[0] and runs[2]
    assert {runs[0].id, runs[2].id} == {"40_0", "40_1"}


def test_jobs_of_two_kinds_are_two_arrays(tmp_path: Path, calls: Path) -> None:
    handed_in(ArraySubmitter(2, tmp_path / "p"), tmp_path, make_job("a"), make_job("b", nodes=4))
    assert calls.read_text().count("sbatch --parsable array.sh") == 2


def test_a_refusal_is_told_to_all(tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch):
    put(calls.parent, monkeypatch, sbatch="echo 'sbatch: error: no such account' >&2; exit 1")
    with pytest.raises(SystemFaultError, match="no such account"):
        handed_in(ArraySubmitter(2, tmp_path / "p"), tmp_path, make_job("a"), make_job("b"))


def test_what_was_submitted_before_another_kind_was_refused_is_not_left_alone(
    tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = "[ $(grep -c sbatch calls) = 1 ] && echo 40 || { echo 'no nodes' >&2; exit 1; }"
    put(calls.parent, monkeypatch, sbatch=f"cd {calls.parent}; {first}")
    gathering, ends = ArraySubmitter(2, tmp_path / "p"), list[str]()
    with ThreadPoolExecutor(2) as pool:
        jobs = (make_job("a"), make_job("b", nodes=4))
        futures = [pool.submit(hand_in, gathering, job, tmp_path / job.name) for job in jobs]
    for future in futures:
        fault, run = future.exception(), None if future.exception() else future.result()
        ends.append(run.id if run else str(fault))
    assert sorted(ends) == ["40_0", "sbatch: Slurm refused the job: no nodes"]


def test_a_stop_frees_those_who_wait(tmp_path: Path, calls: Path) -> None:
    gathering = ArraySubmitter(2, tmp_path / "p", is_stopped=lambda: True)
    with pytest.raises(SystemFaultError, match="was stopped before"):
        handed_in(gathering, tmp_path, make_job("a"))
    assert "sbatch" not in calls.read_text()
