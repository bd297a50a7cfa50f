"""A plan as batch scripts for Slurm, one a stage, and one that submits them in turn."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from paceline.core.errors import UserError
from paceline.core.hardware import Cluster
from paceline.core.job import Job
from paceline.core.units import step_seconds
from paceline.estimate.question import Question
from paceline.files.home import home_path
from paceline.files.recipe import recipe_path
from paceline.layouts.rampup.plan import RampPlan, StagePlan
from paceline.layouts.rampup.timing import NATIVE, Setting
from paceline.machines.slurm.script import batch_options

SLACK = 1.5
"""Time limit over the upper bound of the estimate."""
START_S = 900.0
"""For starting, compiling and saving."""
CHECKPOINT_S = 1800.0
"""Between two checkpoints."""
SUBMIT = "submit.sh"


@dataclass(frozen=True)
class Chain:
    """What the scripts of one plan share."""

    setting: Setting
    plan: RampPlan
    question: Question
    cluster: Cluster | None
    """The site's settings; None where only nodes and devices are known."""
    cluster_name: str | None
    trains: bool
    """Stages go on from each other's checkpoint; else each measures its own batch."""


def scripts(chain: Chain) -> dict[str, str]:
    """The scripts by file name: one for each stage that has steps, in order, and submit.sh.

    Raises UserError for stages that go on from each other where the engine cannot.
    """
    engine = chain.setting.spec.engine
    if chain.trains and engine != NATIVE:
        raise UserError(
            "--every-batch",
            f"has stages go on from each other's checkpoint, which engine {engine} does not",
            remedy="leave it out: each stage measures its own batch",
        )
    stages = enumerate(chain.plan.stages)
    texts = {
        f"stage-{number + 1}-batch-{stage.batch}.sh": _stage_script(chain, number)
        for number, stage in stages
        if stage.steps != 0
    }
    return {**texts, SUBMIT: _submit(list(texts))}


def _stage_script(chain: Chain, number: int) -> str:
    """One stage. Raises UserError for a setting of the site that Slurm could misread."""
    stage = chain.plan.stages[number]
    steps, limit_s = _length(chain, number)
    job = Job(
        name=_tag(chain, stage),
        python="",
        program=(),
        nodes=stage.nodes,
        devices_per_node=chain.setting.per_node,
        timeout_s=limit_s,
        cluster=_cluster(chain, stage),
    )
    lines = [
        "#!/usr/bin/env bash",
        *(f"#SBATCH {option}" for option in batch_options(job)),
        "set -euo pipefail",
        f"# {stage.label}: {step_seconds(stage.step_time_s)} s a step expected "
        f"({step_seconds(stage.low_s)} to {step_seconds(stage.high_s)})",
        f"exec {shlex.join(_command(chain, number, steps, limit_s))}",
    ]
    return "\n".join(lines) + "\n"


def _command(chain: Chain, number: int, steps: int, limit_s: float | None) -> list[str]:
    stage, question = chain.plan.stages[number], chain.question
    words = ["paceline", "run", _found_anywhere(question.recipe), "--launcher", "slurm"]
    words += ["--nodes", str(stage.nodes)]
    if chain.cluster_name:
        words += ["--cluster", _found_anywhere(chain.cluster_name)]
    else:
        words += ["--devices", str(chain.setting.per_node)]
    if question.variant:
        words += ["--variant", question.variant]
    changes = [f"training.steps={steps}", *_layout_changes(chain, stage)]
    if chain.trains:
        every = max(1, min(steps, int(CHECKPOINT_S / stage.step_time_s)))
        changes.append(f"checkpoint.every={every}")
        before = [earlier for earlier in chain.plan.stages[:number] if earlier.steps]
        changes += [f"checkpoint.resume={_tag(chain, earlier)}" for earlier in before[-1:]]
    else:
        changes += [f"training.global_batch={stage.batch}", "training.ramp_up=null"]
    if limit_s is None:
        changes.append("time_limit_s=null")
    else:
        words += ["--timeout", str(ceil(limit_s))]
    for change in (*question.overrides, *_whole_paths(chain), *changes):
        words += ["--set", change]
    return [*words, "--tag", _tag(chain, stage)]


def _found_anywhere(name: str) -> str:
    """A name of the catalog as it is, a file by its whole path: scripts start in their folder."""
    return str(Path(name).resolve()) if Path(name).is_file() else name


def _whole_paths(chain: Chain) -> list[str]:
    """The recipe's relative paths as overrides, because a script may start in another folder.

    Sought from the current folder, then beside the recipe, as `run` does. Raises UserError for a
    data file that is in neither; a checkpoint that is no folder is a run's name, and stays.
    """
    recipe = chain.setting.recipe
    beside = recipe_path(chain.question.recipe).parent
    parts = {"data": recipe.data, "training.evaluation": recipe.training.evaluation}
    files = {
        f"{where}.{name}": value
        for where, part in parts.items()
        for name in ("path", "loss_mask", "tokenizer")
        if part and (value := getattr(part, name, None)) and not Path(value).is_absolute()
    }
    folders = {
        "training.initial_weights": recipe.training.initial_weights,
        "checkpoint.resume": recipe.checkpoint.resume,
    }
    whole = {field: _whole_path(field, value, beside) for field, value in files.items()}
    whole |= {
        field: Path(value) for field, value in folders.items() if value and Path(value).is_dir()
    }
    return [f"{field}={json.dumps(str(path.resolve()))}" for field, path in whole.items()]


def _whole_path(field: str, name: str, beside: Path) -> Path:
    for path in (home_path(field, name), beside / name):
        if path.is_file() or path.with_name(f"{path.name}.idx").is_file():
            return path
    raise UserError(
        f"{field} {name}",
        f"is a file neither from here nor beside the recipe ({beside})",
        remedy="name it by its whole path: the scripts start in their own folder",
    )


def _length(chain: Chain, number: int) -> tuple[int, float | None]:
    """Steps up to the end of the stage, as `training.steps` counts them, and seconds allowed."""
    stages, steps = chain.plan.stages[: number + 1], chain.setting.recipe.training.steps
    counts = [stage.steps for stage in stages]
    if not chain.trains:
        return steps, START_S + SLACK * steps * stages[-1].high_s
    done = sum(count or 0 for count in counts)
    if counts[-1] is None:
        return done + steps, None
    return done, START_S + SLACK * counts[-1] * stages[-1].high_s


def _layout_changes(chain: Chain, stage: StagePlan) -> list[str]:
    """What of the layout is not as in the recipe."""
    before, after = chain.setting.recipe.layout.model_dump(), stage.layout.model_dump()
    differing = {name: value for name, value in after.items() if before[name] != value}
    words = {True: "true", False: "false", None: "null"}
    return [
        f"layout.{name}={words[value] if isinstance(value, bool | None) else value}"
        for name, value in differing.items()
    ]


def _cluster(chain: Chain, stage: StagePlan) -> Cluster:
    if chain.cluster is not None:
        return chain.cluster.model_copy(update={"nodes": stage.nodes, "hosts": ()})
    return Cluster(
        name="slurm",
        device=chain.plan.device,
        nodes=stage.nodes,
        devices_per_node=chain.setting.per_node,
        launcher="slurm",
    )


def _tag(chain: Chain, stage: StagePlan) -> str:
    return f"{chain.plan.recipe}-batch-{stage.batch}"


def _submit(names: list[str]) -> str:
    """Each stage begins when the one before has ended well."""
    lines = ["#!/usr/bin/env bash", "set -euo pipefail", 'cd -- "$(dirname -- "$0")"', "after="]
    for name in names:
        lines += [
            f'job=$(sbatch --parsable ${{after:+"$after"}} {shlex.quote(name)})',
            f'echo "{name}: job ${{job%%;*}}"',
            'after="--dependency=afterok:${job%%;*}"',
        ]
    return "\n".join(lines) + "\n"
