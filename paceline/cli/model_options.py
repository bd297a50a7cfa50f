"""Options of the verbs that ask the time model: what is trained, on what, by which evidence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from paceline.core.errors import UserError
from paceline.estimate.calibrate.lookup import GivenEvidence, given_or_own, read_evidence
from paceline.estimate.fit.evidence import Evidence
from paceline.estimate.fit.origin import ANY, SOFTWARE, year_of_release
from paceline.estimate.model.case import CudaGraphs, Dispatcher
from paceline.estimate.request import EstimateRequest
from paceline.files.recipe import Recipe as TrainedRecipe

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
    name, at, release = (ANY if stack is None else stack).partition("@")
    if name not in names:
        raise typer.BadParameter(f"must be one of {', '.join(names)}", param_hint="--software")
    if at and year_of_release(release) is None:
        raise typer.BadParameter(
            f"{release!r} is no release; write year and month, {name}@26.02",
            param_hint="--software",
        )
    return stack


Recipe = Annotated[str, typer.Argument(help="Name of a recipe, or a YAML file.", metavar="RECIPE")]
DeviceName = Annotated[str, typer.Option(help="A device of `paceline devices`, e.g. H100.")]
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
        help="A cluster of the catalog, or a YAML file, which may state the fabric in levels.",
    ),
]
_STACK = typer.Option(
    "--software",
    callback=_known_stack,
    help=f"Software: {', '.join(SOFTWARE)}, or any that is fused (Transformer Engine, Megatron "
    "core), torch (PyTorch's modules, FSDP) or softmax (Megatron of 2020-22); of a release: "
    "nemo@26.02. A name that published steps are of narrows the interval.",
)
RunStack = Annotated[
    str | None,
    typer.Option(
        "--software",
        callback=_known_stack,
        help="Software for the expected times and memory, as for `estimate --software`; default: "
        "the software of the recipe's engine.",
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
        help="What brings tokens to their experts, in a model with experts: alltoall (NCCL), "
        "deepep or hybridep.",
    ),
]
EvidenceFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Calibration file that `paceline calibrate --output` wrote; default: the stored "
        "calibration of the device, or the coefficients that come with Paceline.",
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
    evidence: GivenEvidence | None = None,
) -> EstimateRequest:
    """What the options ask; a node has eight devices unless they say otherwise.

    Rates of a calibrated processor are those of the file of `evidence`, as its coefficients are.
    """
    return EstimateRequest(
        recipe,
        device,
        gpus,
        variant,
        tuple(overrides or ()),
        per_node or DEVICES_PER_NODE,
        intra,
        inter,
        stack,
        calibration=evidence.calibration if evidence else None,
    )


def check_dispatcher(dispatcher: Dispatcher, recipe: TrainedRecipe) -> None:
    """Raises UserError for a dispatcher of tokens where no token is sent to an expert."""
    model = recipe.model
    if dispatcher != "any" and (model.kind == "mmdit" or model.num_experts == 1):
        raise UserError(
            f"--dispatcher {dispatcher}",
            f"changes nothing: the model of {recipe.name} has no experts",
            allowed="models with experts",
            remedy="leave it out",
        )


def given_evidence(path: Path | None) -> GivenEvidence | None:
    """What the file of --calibration holds, read once; None without one."""
    return read_evidence(path) if path else None


def chosen_evidence(given: GivenEvidence | None, question: EstimateRequest) -> Evidence:
    """The coefficients of a file, of the question's device if calibrated, or the shipped ones.

    Raises UserError for a calibration of another kind of device, or of a processor in another
    dtype.
    """
    return given_or_own(given, question.device, question.resolved_recipe.training.dtype)
