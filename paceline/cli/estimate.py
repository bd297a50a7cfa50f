"""`paceline estimate`: how fast a recipe would train on devices that nobody has here."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import model_options as model
from paceline.cli import offers
from paceline.cli.estimate_output import Answer, emit, write_estimate_page
from paceline.cli.offers import offer
from paceline.cli.options import Json, Overrides, RunsDir, Variant, refuse_unused
from paceline.cli.output import TableForm, TableFormat
from paceline.cli.terminal import echo
from paceline.core.errors import UserError
from paceline.core.site import Site
from paceline.estimate.answer import Estimate
from paceline.estimate.answer import estimate as estimated
from paceline.estimate.calibrate.lookup import GivenEvidence
from paceline.estimate.elasticity import elasticities
from paceline.estimate.explanation import RunClaims, beside, explain, measured_run, question_of
from paceline.estimate.fit.evidence import Evidence
from paceline.estimate.offers import against, step_time_ratio
from paceline.estimate.question import Question
from paceline.estimate.trace import Tracing, trace
from paceline.files import catalog
from paceline.files.recipe import MisfitError, full_key, load_recipe
from paceline.files.run_folder import find_run, runs_root
from paceline.mlperf.time_to_train import time_to_train
from paceline.runs.outcome import evaluate

_WITH_CLUSTER = {
    *("recipe", "cluster", "gpus", "layout", "variant", "overrides", "stack", "compiled", "tokens"),
    *("cuda_graphs", "released", "dispatcher", "price", "spot_price", "pue", "carbon"),
    *("mtbf", "restart", "checkpoint", "checkpoint_every"),
    *("measured_s", "evidence", "html", "trace", "sensitivity", "mlperf", "form", "as_json"),
}
"""Parameters that a cluster's file leaves open."""


def estimate(
    context: typer.Context,
    recipe: model.Recipe,
    device: Annotated[
        str | None, typer.Option(help="A device of `paceline devices`, e.g. H100.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Number of devices.")] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="AXES", help="Layout instead of the recipe's: tp=4,pp=4,zero_stage=1."
        ),
    ] = None,
    cluster: model.PlannedCluster = None,
    variant: Variant = None,
    overrides: Overrides = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OFFER",
            help="Another offer beside it: device=B200,gpus=32,price=4. What is left out is as in "
            "the first. Repeatable.",
        ),
    ] = None,
    per_node: model.PerNode = None,
    intra: model.Intra = None,
    inter: model.Inter = None,
    stack: model.AnyStack = None,
    dispatcher: model.MoeDispatcher = "any",
    compiled: Annotated[bool, typer.Option("--compiled", help="With torch.compile.")] = False,
    cuda_graphs: model.CapturedParts = "none",
    released: model.Released = None,
    tokens: offers.Tokens = None,
    price: offers.Price = None,
    spot_price: offers.SpotPrice = None,
    pue: offers.Pue = 1.0,
    carbon: offers.Carbon = None,
    mtbf: offers.Mtbf = None,
    restart: offers.Restart = None,
    checkpoint: offers.Checkpoint = None,
    checkpoint_every: offers.CheckpointEvery = None,
    measured: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="A run of the recipe: estimate it, and lead on to its measured step.",
        ),
    ] = None,
    measured_s: Annotated[
        float | None,
        typer.Option(
            min=1e-6,
            metavar="SECONDS",
            help="A step time that was measured elsewhere.",
        ),
    ] = None,
    runs_dir: RunsDir = None,
    evidence: model.EvidenceFile = None,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write a page with the way from the peak to the estimate."
        ),
    ] = None,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace",
            help="Also follow a step of the native trainer on tensors without memory, for the "
            "memory of its ranks; takes a minute.",
        ),
    ] = False,
    sensitivity: Annotated[
        bool,
        typer.Option(
            "--sensitivity",
            help="Also what would help most: how throughput follows each hardware figure.",
        ),
    ] = False,
    mlperf: Annotated[
        str | None,
        typer.Option(
            metavar="ROUND",
            help="Also a benchmark's time to train, by the reference convergence points of a "
            "round: 5.1.0. The recipe needs a benchmark: --variant mlperf-trial.",
        ),
    ] = None,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
) -> None:
    """Estimate step time, throughput, days, money and energy of a recipe, with an 80 % interval.

    Examples:

      paceline estimate llama31-70b --device H100 --gpus 1024

      paceline estimate llama31-70b --device H100 --gpus 1024 --layout tp=8,pp=4,vp=5 --price 2.5

      paceline estimate llama31-8b --device H100 --gpus 64
      --compare device=B200,gpus=32 --html offers.html

      paceline estimate llama31-405b --device H100 --gpus 8192 --sensitivity

      paceline estimate llama31-405b --cluster my-cluster.yaml --tokens 3.8e12

      paceline estimate llama31-8b --variant mlperf-trial-72 --device GB300 --gpus 72 --per-node 4
      --set training.dtype=nvfp4 --cuda-graphs iteration --released 2025.7 --mlperf 5.1.0

      paceline estimate tiny-llama --measured last

    The time is the sum of what a step does: products, attention, memory traffic, exchanges, bubble,
    optimizer, host, jitter (docs/estimate.md). Nothing runs.
    """
    if cluster is not None:
        refuse_unused(context, "--cluster, whose file says it", _WITH_CLUSTER)
    site = catalog.site(cluster) if cluster else None
    whole: offers.Costs = {
        "tokens": tokens,
        "prices": offers.prices(price, spot_price, pue, carbon),
        "failures": offers.failures(mtbf, restart, checkpoint, checkpoint_every),
    }
    changes = (*_axes(layout), *(overrides or ()))
    given = model.given_evidence(evidence)
    if measured is not None:
        beside_it = {"--measured-s": measured_s, "--compare": compare, "--trace": trace}
        captured = None if cuda_graphs == "none" else cuda_graphs
        beside_it |= {"--cuda-graphs": captured, "--released": released}
        beside_it["--dispatcher"] = dispatcher if dispatcher != "any" else None
        _alone("--measured", {**beside_it, "--sensitivity": sensitivity, "--mlperf": mlperf})
        options = {
            "recipe": recipe,
            "device": device,
            "devices": gpus,
            "per_node": per_node,
            "variant": variant,
            "overrides": changes,
            "intra": intra,
            "inter": inter,
            "stack": stack,
            "compiled": compiled,
        }
        answer = Answer([_of_run(measured, runs_dir, options, whole, given)])
    else:
        # What is wrong comes before what is missing.
        model.check_dispatcher(dispatcher, load_recipe(recipe, variant, changes))
        question = model.question(
            recipe,
            *_devices(device, gpus, site),
            "any" if stack is None else stack,
            variant=variant,
            overrides=changes,
            per_node=per_node,
            intra=intra,
            inter=inter,
            evidence=given,
        )
        question = replace(
            question,
            compiled=compiled,
            cuda_graphs=cuda_graphs,
            released=released,
            dispatcher=dispatcher,
            site=site,
            **whole,
        )
        besides = (measured_s, trace, sensitivity, mlperf, cluster)
        answer = _answer(question, compare or [], given, *besides)
    emit(answer, TableFormat.json if as_json else form)
    if html:
        write_estimate_page(answer, html)


def _alone(option: str, others: dict[str, object]) -> None:
    """Raises UserError where one of the others is there too."""
    clash = next((name for name, value in others.items() if value), None)
    if clash:
        raise UserError(
            option,
            f"is about one run as it was, and {clash} is not",
            remedy="leave one of them out",
        )


def _axes(layout: str | None) -> list[str]:
    """The layout's axes as recipe fields; raises UserError for what is none."""
    axes = [f"layout.{axis.strip()}" for axis in (layout or "").split(",") if axis.strip()]
    names = [axis.partition("=")[0] for axis in axes]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(
            f"--layout {layout}",
            f"says {twice[0].removeprefix('layout.')} twice",
            allowed="each axis once",
            remedy="leave one out",
        )
    if any("=" not in axis for axis in axes):
        raise UserError(f"--layout {layout}", "is not AXIS=N,...", allowed="tp=4,pp=4,zero_stage=1")
    return axes


def _devices(device: str | None, gpus: int | None, site: Site | None) -> tuple[str, int]:
    """On what; raises UserError where that is not said."""
    if site is not None:
        return site.device, gpus or site.world_size
    if device is None or gpus is None:
        missing = "--device" if device is None else "--gpus"
        raise UserError(
            "paceline estimate",
            f"needs {missing}",
            allowed=model.NEEDED[missing],
            remedy="or --measured RUN, --cluster FILE",
        )
    return device, gpus


def _answer(
    question: Question,
    compare: list[str],
    given: GivenEvidence | None,
    measured_s: float | None,
    trace: bool,
    sensitivity: bool,
    mlperf: str | None,
    cluster: str | None,
) -> Answer:
    """The estimates of a question and of the offers beside it."""
    questions = [question, *(offer(question, text) for text in compare)]
    evidences = [model.chosen_evidence(given, each) for each in questions]
    same = (given.path if given else None, cluster)
    estimates = [_estimated(*pair, *same) for pair in zip(questions, evidences, strict=True)]
    if measured_s is not None:
        estimates[0] = beside(estimates[0], measured_s, "as stated")
    offers = [
        against(estimates[0], estimate, step_time_ratio(question, other, evidences[0], basis))
        for estimate, other, basis in zip(estimates[1:], questions[1:], evidences[1:], strict=True)
    ]
    return Answer(
        estimates,
        offers,
        [_traced(each) for each in questions] if trace else [],
        [elasticities(*pair) for pair in zip(questions, evidences, strict=True)]
        if sensitivity
        else [],
        [
            time_to_train(each.spec, found, mlperf)
            for each, found in zip(questions, estimates, strict=True)
        ]
        if mlperf
        else [],
    )


def _estimated(
    question: Question, evidence: Evidence, file: Path | None, cluster: str | None
) -> Estimate:
    """The estimate; raises UserError that names this verb's options where a layout does not fit."""
    try:
        return estimated(question, evidence)
    except MisfitError as error:
        raise UserError(
            error.where,
            error.what,
            remedy="change --gpus, --layout, or the batch with --set; "
            f"`{_tune_command(question, file, cluster)}` finds the layouts of these devices",
        ) from error


def _tune_command(question: Question, file: Path | None, cluster: str | None) -> str:
    """What ranks all layouts of the same training on the same devices, as it can be pasted."""
    usual = question.devices_per_node == model.DEVICES_PER_NODE
    options = {
        "--device": None if cluster else question.device,
        "--cluster": cluster,
        "--gpus": question.devices,
        "--per-node": None if usual else question.devices_per_node,
        "--intra": question.intra_link,
        "--inter": question.inter_link,
        "--stack": None if question.stack == "any" else question.stack,
        "--variant": question.variant,
        "--evidence": file,
    }
    given = {name: str(value) for name, value in options.items() if value is not None}
    kept = [change for change in question.overrides if not _key(change).startswith("layout")]
    pairs = [*given.items(), *(("--set", change) for change in kept)]
    words = [word for pair in pairs for word in pair]
    return shlex.join(["paceline", "tune", question.recipe, "--estimate-only", *words])


def _key(change: str) -> str:
    """The field of a recipe that a `--set` is of."""
    return full_key(change.partition("=")[0].strip())


def _of_run(
    name: str,
    runs_dir: Path | None,
    options: dict[str, Any],
    whole: offers.Costs,
    given: GivenEvidence | None,
) -> Estimate:
    """The estimate of a run as it was, and its measured step."""
    run = measured_run(evaluate(find_run(runs_root(runs_dir), name)))
    question = question_of(run, RunClaims(**options))
    evidence = given.of(question.device, run.spec.training.dtype) if given else None
    calibration = given.calibration if given else None
    return explain(run, replace(question, calibration=calibration, **whole), evidence)


def _traced(question: Question) -> Tracing:
    """The memory of one offer, followed; says so, because it takes a while."""
    echo(f"following a step on {question.devices:,} x {question.device}", err=True)
    return trace(question)
