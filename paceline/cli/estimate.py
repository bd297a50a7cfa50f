"""`paceline estimate`: predict the speed and cost of a training."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import model_options as model
from paceline.cli import quantities
from paceline.cli.cost_options import CostOptions, Costs
from paceline.cli.estimate_plan import plan_for_budget, plan_for_days, plan_training
from paceline.cli.layout_options import (
    LayoutOptions,
    devices_of_layout,
    other_axes_of_one,
    parse_layout,
)
from paceline.cli.options import (
    ClusterName,
    Html,
    Overrides,
    Panel,
    RunsDir,
    Variant,
    refuse_unused,
)
from paceline.cli.output import TableOptions, emit
from paceline.cli.scenario_option import scenario
from paceline.cli.terminal import echo
from paceline.core.errors import UserError
from paceline.core.hardware import Site
from paceline.core.units import pluralize
from paceline.estimate.calibrate.lookup import FileEvidence
from paceline.estimate.fit.evidence import Evidence
from paceline.estimate.measured_network import NetworkRate
from paceline.estimate.measured_step import (
    RequestedSettings,
    estimate_measured_run,
    measured_run,
    request_for_run,
    with_measurement,
)
from paceline.estimate.memory_trace import MemoryTrace, trace
from paceline.estimate.report import EstimateOutput, estimate_document, sizes_document
from paceline.estimate.request import EstimateRequest
from paceline.estimate.scenarios import compare_scenarios, elasticities, step_time_ratio
from paceline.estimate.single_estimate import Estimate
from paceline.estimate.single_estimate import estimate as estimated
from paceline.files import catalog
from paceline.files.recipe import LayoutError, full_key, load_recipe
from paceline.files.run_folder import find_run, runs_root
from paceline.mlperf.time_to_train import TimeToTrain, time_to_train
from paceline.runs.outcome import evaluate

_SET_BY_CLUSTER = {
    "device",
    "per_node",
    "intra",
    "inter",
    "compare",
    "measured_run_name",
    "runs_dir",
}
"""Parameters that a cluster file sets, or that do not apply to one."""


def estimate(
    context: typer.Context,
    recipe: model.Recipe,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            "--gpu",
            help="GPU, as listed by `paceline recipes devices`, e.g. H100.",
            rich_help_panel=Panel.hosts,
        ),
    ] = None,
    gpus: Annotated[
        Any,
        typer.Option(
            parser=quantities.whole_numbers,
            metavar="N",
            help="Total number of GPUs. A list such as 64,128,256 prints a table.",
            rich_help_panel=Panel.hosts,
        ),
    ] = None,
    days: Annotated[
        float | None,
        typer.Option(
            parser=quantities.days,
            metavar="TIME",
            help="Find the fewest GPUs that finish the training in this time, e.g. 30 days.",
            rich_help_panel=Panel.search,
        ),
    ] = None,
    budget: Annotated[
        Any,
        typer.Option(
            parser=quantities.money,
            metavar="MONEY",
            help="Find how many tokens this amount pays for, e.g. $1M. Requires --price.",
            rich_help_panel=Panel.search,
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="AXES",
            help="Layout settings that override the recipe's: tp=4,pp=4,zero=1, or as printed: "
            "dp 8 tp 4 zero 1.",
            rich_help_panel=Panel.recipe,
        ),
    ] = None,
    cluster: ClusterName = None,
    variant: Variant = None,
    overrides: Overrides = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SCENARIO",
            help="Compare with another scenario: device=B200,gpus=32,price=4, or dtype=fp8. Other "
            "settings stay the same. Repeatable.",
            rich_help_panel=Panel.search,
        ),
    ] = None,
    per_node: model.PerNode = None,
    intra: model.Intra = None,
    inter: model.MeasuredInter = None,
    software: model.StackName = None,
    dispatcher: model.MoeDispatcher = "any",
    torch_compile: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="Assume that the model is compiled with torch.compile.",
            rich_help_panel=Panel.time_model,
        ),
    ] = False,
    cuda_graphs: model.CapturedParts = "none",
    software_date: model.Released = None,
    measured_run_name: Annotated[
        str | None,
        typer.Option(
            "--measured-run",
            metavar="RUN",
            help="Run of the recipe whose measured step time is compared with the estimate.",
            rich_help_panel=Panel.time_model,
        ),
    ] = None,
    measured_step_time: Annotated[
        float | None,
        typer.Option(
            parser=quantities.step_seconds,
            metavar="SECONDS",
            help="Measured step time to compare with the estimate.",
            rich_help_panel=Panel.time_model,
        ),
    ] = None,
    runs_dir: RunsDir = None,
    calibration: model.EvidenceFile = None,
    like: model.Like = None,
    html: Html = None,
    trace_memory: Annotated[
        bool,
        typer.Option(
            "--trace-memory",
            help="Also trace the memory of one step of the native trainer on every rank, "
            "without allocating it (takes a minute).",
            rich_help_panel=Panel.time_model,
        ),
    ] = False,
    sensitivity: Annotated[
        bool,
        typer.Option(
            "--sensitivity",
            help="Also show how much throughput depends on each hardware figure.",
            rich_help_panel=Panel.output,
        ),
    ] = False,
    mlperf: Annotated[
        str | None,
        typer.Option(
            metavar="ROUND",
            help="Also estimate the MLPerf time to train from the reference convergence "
            "points of this round, e.g. 5.1.0. Requires a variant such as "
            "mlperf-trial.",
            rich_help_panel=Panel.output,
        ),
    ] = None,
    *,
    shared: LayoutOptions,
    costs: CostOptions,
    output: TableOptions,
) -> None:
    """Estimate step time, throughput, duration, cost and energy of a training, with 80% intervals.

    Examples:

      paceline estimate llama31-70b --device H100 --gpus 1024

      paceline estimate meta-llama/Llama-3.1-8B --gpu H100 --gpus 64 --seq-len 8k --price '$2.5'

      paceline estimate llama31-70b --gpu H100 --tokens 15T --days 30

      paceline estimate llama31-8b --gpu H100 --gpus 64 --price 2.5 --budget '$1M'

      paceline estimate llama31-70b --gpu H100 --gpus 256,512,1024

      paceline estimate llama31-70b --device H100 --gpus 1024 --layout tp=8,pp=4,vp=5

      paceline estimate llama31-8b --device H100 --gpus 64
      --compare device=B200,gpus=32 --html scenarios.html

      paceline estimate llama31-405b --device H100 --gpus 8192 --sensitivity

      paceline estimate llama31-405b --cluster my-cluster.yaml --tokens 3.8e12

      paceline estimate llama31-8b --variant mlperf-trial-72 --device GB300 --gpus 72 --per-node 4
      --set training.dtype=nvfp4 --cuda-graphs iteration --software-date 2025.7 --mlperf 5.1.0

      paceline estimate llama31-70b --gpu H100 --gpus 256 --like nvidia-llama31

      paceline estimate tiny-llama --measured-run last

    Nothing runs. The step time is the sum of its parts: GEMMs, attention, memory traffic,
    communication, pipeline bubble, optimizer, CPU launch overhead and jitter.
    """
    if cluster is not None:
        all_parameters = {parameter.name or "" for parameter in context.command.params}
        refuse_unused(context, "--cluster, whose file says it", all_parameters - _SET_BY_CLUSTER)
    site = catalog.site(cluster) if cluster else None
    cost_inputs = costs.costs
    layout_changes, dp = parse_layout(layout)
    changes = (*layout_changes, *shared.overrides, *(overrides or ()))
    file_evidence = model.evidence_like(like, runs_dir, model.given_evidence(calibration))
    network = model.measured_network(inter, runs_dir)
    inter = None if network else inter
    if measured_run_name is not None:
        other_options = {
            "--measured-step-time": measured_step_time,
            "--compare": compare,
            "--days": days,
            "--budget": budget,
            "--trace-memory": trace_memory,
        }
        cuda_graph_parts = None if cuda_graphs == "none" else cuda_graphs
        other_options |= {"--cuda-graphs": cuda_graph_parts, "--software-date": software_date}
        other_options["--dispatcher"] = dispatcher if dispatcher != "any" else None
        _refuse_combination(
            "--measured-run", {**other_options, "--sensitivity": sensitivity, "--mlperf": mlperf}
        )
        options = {
            "recipe": recipe,
            "device": device,
            "devices": gpus[0] if gpus else None,
            "per_node": per_node,
            "variant": variant,
            "overrides": changes,
            "intra": intra,
            "inter": inter,
            "software": software,
            "compiled": torch_compile,
        }
        answer = EstimateOutput(
            [
                _run_estimate(
                    measured_run_name, runs_dir, options, network, cost_inputs, file_evidence
                )
            ]
        )
    else:
        # What is wrong comes before what is missing.
        base_recipe = load_recipe(recipe, variant, changes)
        model.check_dispatcher(dispatcher, base_recipe)
        _refuse_combination(
            "--days", {"--gpus": gpus, "--dp": dp, "--budget": budget} if days else {}
        )
        sizes = gpus or (site.world_size if site else None,)
        if dp := dp or shared.dp:  # The printed form of a layout leaves out axes of size 1.
            changes = (*other_axes_of_one(base_recipe.layout, changes), *changes)
            complete = load_recipe(recipe, variant, changes).layout
            sizes = tuple(devices_of_layout(complete, dp, n) for n in gpus or (None,))
        if days is not None and site is None:
            sizes = (per_node or model.DEVICES_PER_NODE,)
        name, first_size = _required_devices(device, sizes[0], site)
        question = model.question(
            recipe,
            name,
            first_size,
            software,
            variant=variant,
            overrides=changes,
            per_node=per_node,
            intra=intra,
            inter=inter,
            evidence=file_evidence,
        )
        question = replace(
            question,
            compiled=torch_compile,
            cuda_graphs=cuda_graphs,
            software_date=software_date,
            dispatcher=dispatcher,
            site=site,
            network=network,
            **cost_inputs,
        )
        if len(sizes) > 1:
            others = {"--compare": compare, "--trace-memory": trace_memory, "--budget": budget}
            others |= {"--sensitivity": sensitivity, "--mlperf": mlperf}
            _refuse_combination("--gpus with a list", others)
            trainings = [plan_training(replace(question, devices=n), file_evidence) for n in sizes]
            emit(
                sizes_document([each.estimate() for each in trainings]),
                output.output_format,
                page=html,
            )
            return
        if days is not None:
            training = plan_for_days(question, file_evidence, days)
        else:
            training = plan_training(question, file_evidence)
            if budget is not None:
                training = plan_for_budget(training, budget)
        extras = (measured_step_time, trace_memory, sensitivity, mlperf, cluster)
        answer = _estimates(training.request, compare or [], file_evidence, *extras)
        answer = replace(answer, **training.answers(answer.estimates[0]))
    emit(estimate_document(answer), output.output_format, page=html)


def _refuse_combination(option: str, others: dict[str, object]) -> None:
    """Raise UserError if `option` is combined with one of `others`."""
    clash = next((name for name, value in others.items() if value), None)
    if clash:
        raise UserError(
            option,
            f"cannot be combined with {clash}",
            remedy="leave one of them out",
        )


def _required_devices(device: str | None, gpus: int | None, site: Site | None) -> tuple[str, int]:
    """Return device name and number; raise UserError if they are missing."""
    if site is not None:
        return site.device, gpus or site.world_size
    if device is None or gpus is None:
        missing = "--device" if device is None else "--gpus"
        raise UserError(
            "paceline estimate",
            f"needs {missing}",
            allowed=model.NEEDED[missing],
            remedy="or use --measured-run RUN or --cluster FILE",
        )
    return device, gpus


def _estimates(
    question: EstimateRequest,
    compare: list[str],
    file_evidence: FileEvidence | None,
    measured_s: float | None,
    trace: bool,
    sensitivity: bool,
    mlperf: str | None,
    cluster: str | None,
) -> EstimateOutput:
    """Return the estimates of a request and of the scenarios to compare with."""
    questions = [question, *(scenario(question, text) for text in compare)]
    evidences = [model.chosen_evidence(file_evidence, each) for each in questions]
    same = (file_evidence.path if file_evidence else None, cluster)
    estimates = [_checked_estimate(*pair, *same) for pair in zip(questions, evidences, strict=True)]
    if measured_s is not None:
        estimates[0] = with_measurement(estimates[0], measured_s, "as stated")
    comparisons = [
        compare_scenarios(
            estimates[0], estimate, step_time_ratio(question, other, evidences[0], basis)
        )
        for estimate, other, basis in zip(estimates[1:], questions[1:], evidences[1:], strict=True)
    ]
    pairs = list(zip(questions, evidences, strict=True))
    times = [
        time_to_train(each.spec, result, mlperf)
        for each, result in zip(questions, estimates, strict=True)
        if mlperf
    ]
    return EstimateOutput(
        estimates,
        comparisons,
        memory_traces=[_trace_memory(each) for each in questions] if trace else (),
        elasticities=[elasticities(*pair) for pair in pairs] if sensitivity else (),
        times=[(_time_sentence(time), time) for time in times],
    )


def _time_sentence(time: TimeToTrain) -> str:
    """Return a sentence with a benchmark's time to train and its parts."""
    return (
        f"{time.benchmark} of round {time.ruleset} to its target: {time.minutes:.3g} minutes "
        f"({time.low_minutes:.3g} to {time.high_minutes:.3g}, 80% of single runs), "
        f"{time.samples:,.0f} samples (reference runs vary by {time.samples_stdev:,.0f}), "
        f"{pluralize(time.num_evaluations, 'evaluation')} of {time.evaluation_s:.3g} s; "
        f"{time.label}"
    )


def _checked_estimate(
    question: EstimateRequest, evidence: Evidence, file: Path | None, cluster: str | None
) -> Estimate:
    """Return the estimate; raise UserError with a remedy if the layout does not fit."""
    try:
        return estimated(question, evidence)
    except LayoutError as error:
        raise UserError(
            error.where,
            error.what,
            remedy="change --gpus, --layout, or the batch with --set; "
            f"`{_tune_command(question, file, cluster)}` finds the layouts of these devices",
        ) from error


def _tune_command(question: EstimateRequest, file: Path | None, cluster: str | None) -> str:
    """Return the `paceline tune` command that ranks layouts for the same training."""
    default_per_node = question.devices_per_node == model.DEVICES_PER_NODE
    options = {
        "--device": None if cluster else question.device,
        "--cluster": cluster,
        "--gpus": question.devices,
        "--per-node": None if default_per_node else question.devices_per_node,
        "--intra": question.intra_link,
        "--inter": question.inter_link,
        "--software": question.software,
        "--variant": question.variant,
        "--calibration": file,
    }
    options_set = {name: str(value) for name, value in options.items() if value is not None}
    other_changes = [
        change for change in question.overrides if not _field_name(change).startswith("layout")
    ]
    pairs = [*options_set.items(), *(("--set", change) for change in other_changes)]
    words = [word for pair in pairs for word in pair]
    return shlex.join(["paceline", "tune", question.recipe, "--estimate-only", *words])


def _field_name(change: str) -> str:
    """Return the full name of the recipe field in a `--set` argument."""
    return full_key(change.partition("=")[0].strip())


def _run_estimate(
    name: str,
    runs_dir: Path | None,
    options: dict[str, Any],
    network: NetworkRate | None,
    cost_inputs: Costs,
    file_evidence: FileEvidence | None,
) -> Estimate:
    """Return the estimate of a stored run, with its measured step time."""
    run = measured_run(evaluate(find_run(runs_root(runs_dir), name)))
    question = request_for_run(run, RequestedSettings(**options))
    evidence = file_evidence.of(question.device, run.spec.training.dtype) if file_evidence else None
    calibration = file_evidence.calibration if file_evidence else None
    return estimate_measured_run(
        run, replace(question, calibration=calibration, network=network, **cost_inputs), evidence
    )


def _trace_memory(question: EstimateRequest) -> MemoryTrace:
    """Trace the memory of one scenario; print a line first, because it takes a while."""
    echo(f"tracing the memory of a step on {question.devices:,} x {question.device}", err=True)
    return trace(question)
