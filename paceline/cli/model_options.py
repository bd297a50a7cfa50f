"""Options of the verbs that use the time model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import Panel
from paceline.core.bandwidth import parse_bandwidth
from paceline.core.errors import UserError
from paceline.estimate.calibrate.lookup import FileEvidence, file_or_device_evidence, read_evidence
from paceline.estimate.fit.evidence import Evidence, shipped_evidence
from paceline.estimate.fit.origin import ANY, SOFTWARE, year_of_release
from paceline.estimate.fit.refit import adjusted_to
from paceline.estimate.measured_network import NetworkRate, network_of_run
from paceline.estimate.model.case import Case, CudaGraphs, Dispatcher
from paceline.estimate.request import EstimateRequest
from paceline.estimate.similar_steps import (
    published_steps,
    step_of_run,
    steps_of_table,
)
from paceline.files import catalog
from paceline.files.recipe import Recipe as TrainedRecipe
from paceline.files.references import find_rows
from paceline.files.run_folder import find_run, runs_root
from paceline.runs.outcome import evaluate
from paceline.scaling.network.measurement import REPORT_FILE
from paceline.scaling.network.rate import network_of_file

SOFTWARE_CATEGORIES = ("fused", "torch", "softmax")
"""Categories of software by how it computes."""
DEVICES_PER_NODE = 8
NEEDED = {
    "--device": "a name listed by `paceline recipes devices`, e.g. H100",
    "--gpus": "a number of devices",
}
"""Allowed values of options that only some calls need, for error messages."""


def _checked_software(stack: str | None) -> str | None:
    names = (ANY, *SOFTWARE, *SOFTWARE_CATEGORIES)
    name, at, release = (ANY if stack is None else stack).partition("@")
    if name not in names:
        raise typer.BadParameter(f"must be one of {', '.join(names)}", param_hint="--software")
    if at and year_of_release(release) is None:
        raise typer.BadParameter(
            f"{release!r} is not a release; write year and month: {name}@26.02",
            param_hint="--software",
        )
    return stack


Recipe = Annotated[
    str,
    typer.Argument(
        help="Recipe (name or file), or Hugging Face model (name, folder or config.json).",
        metavar="RECIPE",
    ),
]
DeviceName = Annotated[
    str, typer.Option(help="Device name, as listed by `paceline recipes devices`, e.g. H100.")
]
PerNode = Annotated[
    int | None,
    typer.Option(
        "--per-node",
        "--gpus-per-node",
        min=1,
        help="GPUs per node; default 8, or the value of the cluster file.",
        rich_help_panel=Panel.network,
    ),
]
Intra = Annotated[
    str | None,
    typer.Option(
        metavar="LINK",
        help="Link within a node: a name (NVLink4) or a bandwidth (450 GB/s).",
        rich_help_panel=Panel.network,
    ),
]
Inter = Annotated[
    str | None,
    typer.Option(
        metavar="LINK",
        help="Network between nodes: a name (InfiniBand-NDR) or a bandwidth (8x400 Gb/s).",
        rich_help_panel=Panel.network,
    ),
]
MeasuredInter = Annotated[
    str | None,
    typer.Option(
        metavar="LINK",
        help="Network between nodes: a link, bandwidth (8x400 Gb/s), run, result of `probe "
        "network`, or output of all_reduce_perf.",
        rich_help_panel=Panel.network,
    ),
]
_SOFTWARE_OPTION = typer.Option(
    "--software",
    callback=_checked_software,
    help=f"Software: {', '.join(SOFTWARE)}, also of a release (nemo@26.02); or fused (Transformer "
    "Engine, Megatron core), torch (PyTorch modules, FSDP) or softmax (Megatron of 2020-22). "
    "Default: by the engine.",
    rich_help_panel=Panel.time_model,
)
StackName = Annotated[str | None, _SOFTWARE_OPTION]
CapturedParts = Annotated[
    CudaGraphs,
    typer.Option(
        "--cuda-graphs",
        help="Part of a step that is captured in CUDA graphs.",
        rich_help_panel=Panel.time_model,
    ),
]
Released = Annotated[
    float | None,
    typer.Option(
        min=2017,
        max=2100,
        metavar="YEAR",
        help="Release date of the software as a decimal year, e.g. 2025.7; default: the "
        "newest with published measurements.",
        rich_help_panel=Panel.time_model,
    ),
]
MoeDispatcher = Annotated[
    Dispatcher,
    typer.Option(
        "--dispatcher",
        help="MoE token dispatcher: alltoall (NCCL), deepep or hybridep.",
        rich_help_panel=Panel.time_model,
    ),
]
EvidenceFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="File of `paceline probe calibrate --output`; default: the stored "
        "calibration of the device, else the shipped coefficients.",
        rich_help_panel=Panel.time_model,
    ),
]

Like = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Adjust the time model to measured steps: a run, a published row or table, or a CSV "
        "file.",
        rich_help_panel=Panel.time_model,
    ),
]


def question(
    recipe: str,
    device: str,
    gpus: int,
    stack: str | None,
    *,
    variant: str | None = None,
    overrides: Sequence[str] | None = None,
    per_node: int | None = None,
    intra: str | None = None,
    inter: str | None = None,
    evidence: FileEvidence | None = None,
) -> EstimateRequest:
    """Return the estimate request of the options; a node has eight devices by default.

    For a calibrated processor, both rates and coefficients come from the file in `evidence`.
    """
    return EstimateRequest(
        recipe=recipe,
        device=device,
        devices=gpus,
        variant=variant,
        overrides=tuple(overrides or ()),
        devices_per_node=per_node or DEVICES_PER_NODE,
        intra_link=intra,
        inter_link=inter,
        software=stack,
        calibration=evidence.calibration if evidence else None,
    )


def measured_network(inter: str | None, runs_dir: Path | None) -> NetworkRate | None:
    """Return a measured network; None if `inter` is a link of the catalog or a rate.

    A measurement is a run, or a file or folder of `paceline probe network` or nccl-tests. Raises
    UserError for a name that is none of these, and for a measurement without a usable bandwidth.
    """
    if inter is None or parse_bandwidth(inter, 1) is not None:
        return None
    try:
        catalog.find_link(inter)
    except UserError as unknown:
        path = Path(inter)
        if path.is_file() or (path / REPORT_FILE).is_file():
            return network_of_file(path)
        try:
            folder = find_run(runs_root(runs_dir), inter)
        except UserError:
            raise UserError(
                unknown.where,
                unknown.what,
                allowed="a link of the catalog, a rate above 0 (8x400 Gb/s), a run, or a file of "
                "`paceline probe network` or nccl-tests",
                remedy=unknown.remedy,
            ) from None
        return network_of_run(evaluate(folder))
    return None


def check_dispatcher(dispatcher: Dispatcher, recipe: TrainedRecipe) -> None:
    """Raise UserError for a token dispatcher if the model has no experts."""
    model = recipe.model
    if dispatcher != "any" and (model.kind == "mmdit" or model.num_experts == 1):
        raise UserError(
            f"--dispatcher {dispatcher}",
            f"has no effect: the model of {recipe.name} has no experts",
            allowed="models with experts",
            remedy="leave it out",
        )


def given_evidence(path: Path | None) -> FileEvidence | None:
    """Return the content of the --calibration file, or None without one."""
    return read_evidence(path) if path else None


def evidence_like(
    name: str | None, runs_dir: Path | None, file_evidence: FileEvidence | None
) -> FileEvidence | None:
    """Return the coefficients adjusted to the measured steps that --like names.

    A name is that of a CSV file, a published row, table or source, or a run, in this order. Raises
    UserError if it is none of them.
    """
    if name is None:
        return file_evidence
    if name.endswith(".csv"):
        steps = steps_of_table(Path(name))
    else:
        try:
            rows = find_rows(name)
        except UserError as unknown:
            steps = [_step_of_named_run(name, runs_dir, unknown)]
        else:
            steps = published_steps(name, rows)
    before = file_evidence.of_gpus() if file_evidence else shipped_evidence()
    return FileEvidence(None, adjusted_to(before, steps, name))


def _step_of_named_run(name: str, runs_dir: Path | None, unknown: UserError) -> tuple[Case, float]:
    try:
        folder = find_run(runs_root(runs_dir), name)
    except UserError as error:
        raise UserError(
            f"--like {name}",
            "is neither a published row, table or source, nor a run",
            allowed=unknown.allowed,
            remedy="or name a CSV file with measured steps",
        ) from error
    return step_of_run(evaluate(folder))


def chosen_evidence(file_evidence: FileEvidence | None, question: EstimateRequest) -> Evidence:
    """Return the coefficients of the file, of the calibrated device, or the shipped ones.

    Raises UserError for a calibration of another device type, or of a processor in another
    data type.
    """
    return file_or_device_evidence(
        file_evidence, question.device, question.resolved_recipe.training.dtype
    )
