"""Slurm's commands get the environment that was meant for them, and their refusals are reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import SystemFaultError, UserError
from paceline.machines import slurm
from paceline.machines.slurm import client
from paceline.machines.slurm.steps import check_allocation
from tests.machines.slurm.fake_slurm import put
from tests.machines.slurm.test_script import make_job


def test_a_job_gets_what_is_loaded_but_no_foreign_secrets_or_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (
        "LD_LIBRARY_PATH",
        "AWS_SECRET_KEY",
        "SLURM_NNODES",
        "SBATCH_ARRAY_INX",
        "SBATCH_ACCOUNT",
        "SBATCH_PARTITION",
        "SLURM_CONF",
    ):
        monkeypatch.setenv(name, "outer")
    variables = client.environment({"HF_TOKEN": "own", "PLAIN": "in node.sh"})
    assert (variables["LD_LIBRARY_PATH"], variables["SLURM_CONF"], variables["HF_TOKEN"]) == (
        "outer",
        "outer",
        "own",
    )
    assert not {
        "AWS_SECRET_KEY",
        "SLURM_NNODES",
        "SBATCH_ARRAY_INX",
        "SBATCH_ACCOUNT",
        "SBATCH_PARTITION",
        "PLAIN",
    } & set(variables)


def test_the_number_is_read_with_and_without_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = put(tmp_path, monkeypatch, sbatch="echo '12;north'")
    assert client.sbatch(make_job(), tmp_path, "job.sh", ["--exclude=a"]) == "12"
    assert calls.read_text() == "sbatch --parsable --exclude=a job.sh\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "echo 'sbatch: error: Batch job submission failed: Invalid qos' >&2; exit 1",
            "failed: Invalid qos",
        ),
        ("exit 1", "no message"),
        ("true", "no message"),
    ],
)
def test_a_refusal_is_told_in_slurms_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    put(tmp_path, monkeypatch, sbatch=text)
    with pytest.raises(SystemFaultError, match=f"Slurm refused the job: .*{message}"):
        client.sbatch(make_job(), tmp_path, "job.sh")


def test_commands_that_are_not_there_or_hang_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, monkeypatch, sinfo="exec sleep 60")
    with pytest.raises(SystemFaultError, match="sinfo: did not answer within 0 s"):
        client.ask(["sinfo"], 0.2)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemFaultError, match="sbatch: is not installed on this machine"):
        client.sbatch(make_job(), tmp_path, "job.sh")


def test_a_job_may_be_queued_although_sbatch_gave_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, monkeypatch, sbatch="exec sleep 60")
    monkeypatch.setattr(client, "LIMIT_S", 0.2)
    with pytest.raises(
        SystemFaultError, match=r"did not answer .*may have queued the job.*squeue --me"
    ):
        client.sbatch(make_job(), tmp_path, "job.sh")


def test_an_allocation_that_slurm_says_nothing_of_is_not_an_unknown_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, monkeypatch, squeue="exit 1")
    with pytest.raises(SystemFaultError, match="does not answer"):
        check_allocation("7", (), 1)
    put(tmp_path, monkeypatch, squeue="echo 'Invalid job id specified' >&2; exit 1")
    with pytest.raises(SystemFaultError, match="is unknown to Slurm"):
        check_allocation("7", (), 1)


def test_sacct_is_not_asked_where_nothing_is_accounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(
        tmp_path,
        monkeypatch,
        scontrol="echo 'AccountingStorageType   = accounting_storage/none'",
        sacct="echo '5|FAILED|1:0|a|None'",
    )
    assert client.accounts(["5"]) == {} and not client.has_accounting()
    put(tmp_path, monkeypatch, scontrol="echo 'AccountingStorageType   = (null)'")
    monkeypatch.setenv("SLURM_CONF", "a newer Slurm")
    assert client.accounts(["5"]) == {}
    put(
        tmp_path, monkeypatch, scontrol="echo 'AccountingStorageType = accounting_storage/slurmdbd'"
    )
    monkeypatch.setenv("SLURM_CONF", "another")
    assert client.accounts(["5"])["5"].exit_code == 1


def test_an_unknown_job_is_no_fault_and_a_silent_slurm_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(
        tmp_path,
        monkeypatch,
        squeue="echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1",
    )
    assert client.states(["7"]) == {}
    put(tmp_path, monkeypatch, squeue="echo 'Unable to contact slurm controller' >&2; exit 1")
    assert client.states(["7"]) is None


def test_a_container_needs_srun_to_know_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(container_image="x.sqsh")
    put(tmp_path, monkeypatch, srun="echo '  --nodes=N'")
    with pytest.raises(UserError, match="needs the Pyxis plugin"):
        client.require_pyxis(job)
    put(tmp_path, monkeypatch, srun="echo '  --container-image=[USER@][REGISTRY#]IMAGE'")
    client.require_pyxis(job)


def test_a_database_that_keeps_environments_is_told_to_whoever_has_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(
        tmp_path,
        monkeypatch,
        sbatch="echo 5",
        scontrol="echo 'AccountingStoreFlags = job_env,job_script'",
    )
    job = make_job()
    job.env["MY_TOKEN"] = "hidden"
    slurm.prepare(job, tmp_path)
    (warning,) = slurm.submit(job, tmp_path).warnings
    assert "MY_TOKEN" in warning and "hidden" not in warning
