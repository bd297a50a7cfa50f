"""How fast the trainer is on one GPU: the 1.3B shape, and Llama 8B's with as many layers as fit.

    python benchmarks/one_gpu.py [--shape 1.3b 8b] [--compile] [--recompute none|selective|full]
                                 [--micro-batch N] [--seq-len N] [--layers N] [--steps 30] [--quick]
    python benchmarks/one_gpu.py --device cpu --shape tiny    # the same way on a CPU

Runs go through the package as `paceline run` does, so the figures are those of its report: the
median steady step. Utilisation is printed in both conventions of counting attention. Without a GPU
the benchmark says so and ends well.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _result import Surroundings, keep

from paceline.core.errors import UserError
from paceline.core.flops import FlopsInput, hardware_flops_per_token, model_flops_per_token
from paceline.core.layout import Layout
from paceline.core.memory import memory_per_device
from paceline.core.metrics import METRICS
from paceline.core.rates import flops_per_s_per_device
from paceline.core.result import Result
from paceline.core.run import RunSpec
from paceline.core.run_report import RunReport
from paceline.core.units import GIB
from paceline.files.recipe import load_recipe
from paceline.machines.placement import Request, find_device
from paceline.machines.probe.gpus import gpus
from paceline.runs import flow
from paceline.runs.plan import Plan, make_plan

MICRO_BATCHES = 4
"""Micro-batches of one step, which share one optimizer step."""
LOG_END = 3000
"""Characters of a failed run's log."""
CONVENTIONS = ("causal", "full-attention")


@dataclass(frozen=True)
class Workload:
    """A recipe made to run on one device."""

    recipe: str
    micro_batch: int
    fits: bool = False
    """Whether layers are left out until it fits."""


SHAPES = {
    "1.3b": Workload("gpt-1b3", 4),
    "8b": Workload("llama31-8b", 1, fits=True),
    "tiny": Workload("tiny-llama", 2),
}


def overrides(chosen: argparse.Namespace, work: Workload, layers: int | None) -> tuple[str, ...]:
    """The recipe's settings for one device."""
    micro_batch = chosen.micro_batch or work.micro_batch
    fields: dict[str, Any] = {
        "dtype": "bf16",
        "steps": chosen.steps,
        "data.source": "synthetic",
        "global_batch": micro_batch * MICRO_BATCHES,
        "compile": "blocks" if chosen.compile else "none",
        "layout.micro_batch": micro_batch,
        "layout.recompute": chosen.recompute,
        "layout.zero_stage": 0,
        "layout.cp": 1,
        "seq_len": chosen.seq_len,
        "model.num_layers": layers,
    }
    return tuple(f"{name}={value}" for name, value in fields.items() if value is not None)


def most_layers(chosen: argparse.Namespace, work: Workload, gpu: dict[str, Any]) -> int:
    """The layers of the recipe, or as many as the static memory bound lets fit."""
    device = find_device(gpu["name"])
    context_bytes = (device and device.context_bytes) or 0.0
    recipe = load_recipe(work.recipe, None, overrides(chosen, work, None))
    layout = Layout(micro_batch=recipe.layout.micro_batch, recompute=recipe.layout.recompute)
    fitting = (
        layers
        for layers in range(recipe.model.num_layers, 0, -1)
        if memory_per_device(
            recipe.model.model_copy(update={"num_layers": layers}),
            layout,
            1,
            recipe.training.seq_len,
            "bf16",
            context_bytes=context_bytes,
        ).total_bytes
        <= gpu["memory_bytes"]
    )
    return next(fitting, 1)


def run(chosen: argparse.Namespace, work: Workload, gpu: dict[str, Any] | None) -> RunReport:
    """One run; with fewer and fewer layers while the device's memory is not enough.

    Raises UserError where the package refuses it.
    """
    layers = most_layers(chosen, work, gpu) if work.fits and gpu and gpu["memory_bytes"] else None
    if layers and chosen.layers:
        layers = min(layers, chosen.layers)
    while True:
        plan = make_plan(
            Request(work.recipe, None, overrides(chosen, work, layers), 1, chosen.device)
        )
        report = trained(plan)
        if report.result.status != "oom" or not layers or layers == 1:
            return report
        layers -= 1


def trained(plan: Plan) -> RunReport:
    """The report of one run, whose folder is not kept; the end of a failed one's log is printed."""
    with tempfile.TemporaryDirectory() as name:
        report = flow.run(plan, Path(name), flow.command_line(), lambda _: None)
        if report.result.status not in ("ok", "oom"):
            for log in sorted(Path(name).glob("*/logs/*.log")):
                print(f"{log.name}: {log.read_text(errors='replace')[-LOG_END:]}", file=sys.stderr)
        return report


def value(result: Result, name: str) -> float | None:
    """A metric's value."""
    metric = result.metrics.get(name)
    return metric.value if metric else None


def row(name: str, report: RunReport) -> dict[str, Any]:
    """Every figure of one run; None where something is unknown, with the reason in `notes`."""
    result, spec = report.result, report.spec
    assert spec is not None
    step = result.metrics.get("step_time_s")
    rows: dict[str, Any] = {
        "shape": name,
        "status": result.status,
        "reason": result.reason,
        "num_layers": spec.model.num_layers,
        "num_parameters": result.num_parameters,
        "seq_len": spec.training.seq_len,
        "micro_batch": spec.layout.micro_batch,
        "global_batch": spec.training.global_batch,
        "recompute": spec.layout.recompute,
        "compile": spec.training.compile,
        "device": spec.cluster.device,
        "step_time_s": step and step.model_dump(include={"value", "n", "spread", "low", "high"}),
        "tokens_per_s": value(result, "tokens_per_s"),
        "memory_bytes": {
            kind: value(result, f"memory_{kind}_bytes")
            for kind in ("allocated", "reserved", "device_used", "resident")
        },
        "memory_by_part": result.memory.ranks[0].model_dump() if result.memory else None,
        "notes": {k: m.note for k in METRICS if (m := result.metrics.get(k)) and m.note},
    }
    if step is not None and step.value is not None:
        rows["utilisation"] = {c: utilisation(spec, result, c, step.value) for c in CONVENTIONS}
    return rows


def utilisation(
    spec: RunSpec, result: Result, convention: str, step_time_s: float
) -> dict[str, float | None]:
    """FLOP/s, and its shares of the data sheet's peak and of the best matrix product measured."""
    x = FlopsInput(spec.model, spec.training.seq_len, spec.layout.recompute)
    batch, seq_len = spec.training.global_batch, spec.training.seq_len
    model, hardware = (
        flops_per_s_per_device(per_token(convention, x) * seq_len, batch, step_time_s, 1)
        for per_token in (model_flops_per_token, hardware_flops_per_token)
    )
    device = find_device(spec.cluster.device)
    peak = device.peak_flops_per_s(spec.training.dtype) if device else None
    reachable = value(result, "achievable_flops_per_s")
    return {
        "model_flops_per_s": model,
        "peak_flops_per_s": peak,
        "achievable_flops_per_s": reachable,
        "mfu": model / peak if peak else None,
        "hfu": hardware / peak if peak else None,
        "of_achievable": model / reachable if reachable else None,
    }


def table_row(result: dict[str, Any]) -> str:
    """A row of the printed table."""
    shares = result.get("utilisation")
    if shares is None:
        return f"| {result['shape']} | {result['status']}: {result['reason']} |"
    step, memory = result["step_time_s"], result["memory_bytes"]
    cells = [
        f"{result['shape']}, {result['num_layers']} layers, {result['num_parameters'] / 1e9:.3f} B",
        f"{result['seq_len']} x {result['micro_batch']}, recompute {result['recompute']}, "
        f"compile {result['compile']}",
        f"{result['tokens_per_s']:,.0f} (n {step['n']}, spread {step['spread']:.1%})",
        *(
            " / ".join(percent(shares[c][name]) for c in CONVENTIONS)
            for name in ("mfu", "hfu", "of_achievable")
        ),
        ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in memory.items() if size),
    ]
    return f"| {' | '.join(cells)} |"


def percent(share: float | None) -> str:
    """`41.3 %`, or `unknown`."""
    return "unknown" if share is None else f"{share:.1%}"


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", nargs="+", choices=tuple(SHAPES), default=["1.3b", "8b"])
    parser.add_argument("--compile", action="store_true", help="torch.compile for every block")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--layers", type=int, help="try no more layers than so many")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--quick", action="store_true", help="12 steps; nothing is written")
    chosen = parser.parse_args()
    chosen.steps = chosen.steps or (12 if chosen.quick else 30)
    return chosen


def main() -> int:
    """Run the shapes, print a table, write benchmarks/results/ on a GPU; 1 when a run failed."""
    chosen, devices = parse(), gpus()
    if chosen.device == "cuda" and not devices:
        print(json.dumps({"benchmark": "one_gpu", "skipped": "no NVIDIA GPU is visible here"}))
        return 0
    around = Surroundings()
    gpu = devices[0] if chosen.device == "cuda" else None
    print(
        f"| shape | sequence x micro-batch | tokens/s | MFU, {' / '.join(CONVENTIONS)} "
        "| HFU | of achievable | memory, GiB |"
    )
    print("|---|---|---:|---:|---:|---:|---|")
    rows: list[dict[str, Any]] = []
    for name in chosen.shape:
        try:
            rows.append(row(name, run(chosen, SHAPES[name], gpu)))
        except UserError as refusal:
            rows.append({"shape": name, "status": "refused", "reason": str(refusal)})
        print(table_row(rows[-1]), flush=True)
    if chosen.device == "cuda" and not chosen.quick:
        keep("one_gpu", "tokens/s; shares of the peak, 0-1", around, rows=rows)
    return int(any(r["status"] != "ok" for r in rows))


if __name__ == "__main__":
    sys.exit(main())
