"""Which of the user's SBATCH_ variables sbatch is given: those of which job.sh says nothing.

To sbatch its command line comes first, then SBATCH_ variables, then #SBATCH lines
(https://slurm.schedmd.com/sbatch.html, "Input environment variables"). A variable would therefore
win over job.sh, which is shown, stored and taken for what was asked; so it is kept from sbatch
where job.sh has a word of its own, and the user is told.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.core.job import Job
from paceline.machines.slurm.foreign import asked_options
from paceline.machines.slurm.script import NO_GRES, batch_options

PREFIX = "SBATCH_"
OPTIONS = {
    "ACCOUNT": "account",
    "PARTITION": "partition",
    "QOS": "qos",
    "RESERVATION": "reservation",
    "CONSTRAINT": "constraint",
    "HINT": "hint",
    "TIMELIMIT": "time",
    "GRES": "gres",
    "GPUS_PER_NODE": "gres",
    "JOB_NAME": "job-name",
    "MEM_PER_NODE": "mem",
    "EXPORT": "export",
    "OUTPUT": "output",
    "OPEN_MODE": "open-mode",
    "EXCLUSIVE": "exclusive",
    "REQUEUE": "requeue",
    "NO_REQUEUE": "no-requeue",
    "WCKEY": "wckey",
    "NETWORK": "network",
    "CORE_SPEC": "core-spec",
    "THREAD_SPEC": "thread-spec",
}
"""The option that a variable stands for."""
NEVER = ("gres", "requeue", "no-requeue")
"""Options that are settled without a line of theirs: no GPU on CPUs, no restart but job.sh's."""


def passed_on(job: Job, environment: Mapping[str, str]) -> set[str]:
    """The SBATCH_ variables that sbatch is given for this job."""
    return {name for name in _own(environment) if not _word_of_the_job(job, name)}


def remarks(job: Job, environment: Mapping[str, str]) -> list[str]:
    """What is told of SBATCH_ variables before the job is submitted, one sentence each."""
    sentences: list[str] = []
    for name, value in sorted(_own(environment).items()):
        word = _word_of_the_job(job, name)
        if not word:
            sentences.append(f"sbatch is given {name}={value}, of which job.sh says nothing")
        elif not _same(name, value, word):
            sentences.append(f"{name}={value} is kept from sbatch: {word}")
    return sentences


def _own(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(PREFIX)}


def _word_of_the_job(job: Job, variable: str) -> str | None:
    """Why the variable does not count; None where it does."""
    option = OPTIONS.get(variable.removeprefix(PREFIX))
    if option is None:
        return "it is not among those that are passed on"
    site = job.cluster.slurm if job.cluster else None
    if option == "gres" and site and site.gres == NO_GRES:
        return None
    for written in asked_options(job.batch) if job.batch else batch_options(job):
        if written.partition("=")[0] == f"--{option}":
            return f"job.sh says {written}"
    settled = option in NEVER and not (job.batch and option == "gres")
    return f"job.sh asks for no --{option}" if settled else None


def _same(variable: str, value: str, word: str) -> bool:
    """Whether the variable asks for what job.sh does: `8` and `h100:8` for `gpu:8` as well."""
    written = word.rpartition("=")[2]
    if variable == "SBATCH_GPUS_PER_NODE":
        return "--gres=gpu:" in word and value.rpartition(":")[2] == written.rpartition(":")[2]
    return value == written
