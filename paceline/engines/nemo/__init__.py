"""NVIDIA's published benchmarks: NeMo 1 (form `launch`) and current llmb-run (form `llmb`).

`engine_settings.form` selects one. Their log formats are `nemo1`, and `megatron_bridge` or `nemo2`.
"""

from __future__ import annotations

from typing import Any

from paceline.core.job import Job
from paceline.core.run import RunSpec
from paceline.engines.nemo import launch, llmb
from paceline.engines.support import TestedProgram

TITLE = "NeMo (NVIDIA's published benchmarks)"
COMMANDS = ("sbatch",)
OUTSIDE = "Slurm with Pyxis, and the NeMo 24.09 image in STAGE_PATH or llmb-run's LLMB_INSTALL"
SUPPORT = {
    "launch": launch.OWN_SCRIPT,
    "launch, recipe's script": launch.RECIPE_SCRIPT,
    "llmb": llmb.SUPPORT,
}
FORMS = {"launch": launch, "llmb": llmb}
TESTED_PROGRAMS = (
    TestedProgram("dgxc-benchmarking v25.01", "`launch.sh` and `configure.sh`, without NeMo"),
    TestedProgram("llmb-run 1.16.2", "`submit` up to its Slurm job"),
)


def unsupported(spec: RunSpec) -> list[str]:
    """Return what the form cannot do of `spec`, one sentence each."""
    form = spec.engine_settings.get("form", "launch")
    if form not in FORMS:
        return [f"engine_settings.form {form} must be {' or '.join(FORMS)}"]
    return FORMS[str(form)].unsupported(spec)


def missing(spec: RunSpec) -> str | None:
    """Return what the form needs and does not find."""
    return _form(spec).missing(spec)


def notes(spec: RunSpec) -> list[str]:
    """Return how the form differs from the published benchmark."""
    return _form(spec).notes(spec)


def job(spec: RunSpec, name: str) -> Job:
    """Return the Job of the form."""
    return _form(spec).job(spec, name)


def settings(spec: RunSpec) -> dict[str, Any]:
    """Return the settings as the form's program reads them."""
    return _form(spec).settings(spec)


def _form(spec: RunSpec) -> Any:
    return FORMS.get(str(spec.engine_settings.get("form")), launch)
