"""Options of the verbs that ask the time model: what is trained, on what, by which evidence."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from paceline.core.errors import UserError
from paceline.estimate.calibrate.calibration import Calibration, read_calibration
from paceline.estimate.calibrate.lookup import evidence_for, is_cpu
from paceline.estimate.fit.evidence import Evidence, read_evidence, shipped
from paceline.estimate.fit.origin import ANY, SOFTWARE, year_of_release
from paceline.estimate.model.case import CudaGraphs, Dispatcher
from paceline.estimate.question import Question
from paceline.files.recipe import load_recipe

STACKS = ("fused", "torch", "softmax")
"""How software computes, whatever it is."""
DEVICES_PER_NODE = 8
NEEDED = {
    "--device": "a name that `paceline devices` lists, as H100",
    "--gpus": "a number of devices",
}
"""What is allowed there, of options that not every call needs."""


def _known_stack(stack: str | None) -> str | None:
    names = (ANY, *SOFTWARE, *STACKS)
    name, at, release = (stack or ANY).partition("@")
    if name not in names:
        raise typer.BadParameter(f"must be one of {', '.join(names)}", param_hint="--stack")
    if at and year_of_release(release) is None:
        raise typer.BadParameter(
            f"{release!r} is no release; write year and month, {name}@26.02", param_hint="--stack"
        )
    return stack


Recipe = Annotated[str, typer.Argument(help="Name of a recipe, or a YAML file.", metavar="RECIPE")]
DeviceName = Annotated[str, typer.Option(help="A device of `paceline devices`, e.g. H100.")]
Gpus = Annotated[int, typer.Option(min=1, help="Number of devices.")]
PerNode = Annotated[
    int | None,
    typer.Option(min=1, help="Devices of a node; default 8, or what a cluster file says."),
]
Intra = Annotated[
    str | None,
    typer.Option(metavar="LINK", help="Link inside a node: NVLink4, or a rate, 450 GB/s."),
]
Inter = Annotated[
    str | None,
    typer.Option(metavar="LINK", help="Network: InfiniBand-NDR, or a rate, 8x400 Gb/s."),
]
PlannedCluster = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="A cluster's YAML file with its fabric in levels, failures, prices over time and "
        "power, or a cluster of the catalog.",
    ),
]
_STACK = typer.Option(
    "--stack",
    callback=_known_stack,
    help=f"Software: {', '.join(SOFTWARE)}, or any that is fused (Transformer Engine, Megatron "
    "core), torch (PyTorch's modules, FSDP) or softmax (Megatron of 2020-22); of a release: "
    "nemo@26.02. A name that published steps are of narrows the interval.",
)
RunStack = Annotated[
    str | None,
    typer.Option(
        "--stack",
        callback=_known_stack,
        help="Software whose times and memory are expected, as `estimate --stack`; default that of "
        "the recipe's engine.",
    ),
]
StackName = Annotated[str, _STACK]
AnyStack = Annotated[str | None, _STACK]
CapturedParts = Annotated[
    CudaGraphs,
    typer.Option(
        "--cuda-graphs",
        help="What is captured in CUDA graphs, so that no host starts its kernels: none, blocks or "
        "the whole iteration.",
    ),
]
Released = Annotated[
    float | None,
    typer.Option(
        min=2017,
        max=2100,
        metavar="YEAR",
        help="When the software came out, in years: 2025.7 for NeMo 25.09; default the newest that "
        "published steps are of.",
    ),
]
MoeDispatcher = Annotated[
    Dispatcher,
    typer.Option(
        "--dispatcher",
        help="What brings tokens to their experts: alltoall (NCCL), deepep or hybridep.",
    ),
]
EvidenceFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Coefficients of a calibrated machine, not the shipped ones."
    ),
]


def question(
    recipe: str,
    device: str,
    gpus: int,
    stack: str,
    *,
    variant: str | None = None,
    overrides: Sequence[str] | None = None,
    per_node: int | None = None,
    intra: str | None = None,
    inter: str | None = None,
) -> Question:
    """What the options ask; a node has eight devices unless they say otherwise."""
    return Question(
        recipe,
        device,
        gpus,
        variant,
        tuple(overrides or ()),
        per_node or DEVICES_PER_NODE,
        intra,
        inter,
        stack,
    )


def chosen_evidence(path: Path | None, question: Question | None = None) -> Evidence:
    """The coefficients of a file, of the question's device if calibrated, or the shipped ones.

    Raises UserError for a file without any, and for a processor's where a GPU is asked about.
    """
    if path is not None:
        calibration = calibration_in(path)
        if calibration is None:
            return read_evidence(path)
        if question and (calibration.kind == "cpu") != is_cpu(question.device):
            raise UserError(
                f"--evidence {path}",
                f"is of {calibration.device}, by which {question.device} cannot be estimated",
                allowed="a calibration of the same kind of device",
            )
        return calibration.labelled_evidence()
    if question is None:
        return shipped()
    recipe = load_recipe(question.recipe, question.variant, question.overrides)
    return evidence_for(question.device, recipe.training.dtype)


def calibration_in(path: Path | None) -> Calibration | None:
    """The calibration that a file of coefficients is; None where it holds them alone."""
    with suppress(UserError):
        return read_calibration(path) if path else None
    return None
