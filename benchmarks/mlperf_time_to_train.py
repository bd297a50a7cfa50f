"""Published MLPerf times to train, predicted blind: steps of the model, samples of the reference.

    python benchmarks/mlperf_time_to_train.py --open mlperf_v6_open.csv --lambda lambda_v51.csv

Round 5.1 comes with Paceline (`references/mlperf-results.yaml`). No MLPerf row is among the steps
that coefficients are fitted to. What a row does not state is settled before its time is looked at:
the dtype is the narrowest that the device multiplies in (8 bit of images), the layout the fastest
that fits by estimate, and the software NeMo where the row names it. A row's time is the mean of its
runs as measured, before the scaling of the rules, or that of its one run.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, log
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from _result import Surroundings, keep

from paceline.core.errors import UserError
from paceline.core.hardware import Dtype
from paceline.core.layout import Layout
from paceline.core.run import RunSpec
from paceline.estimate.estimates import estimates_of_layouts
from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.fit.origin import release_of
from paceline.estimate.model.case import CudaGraphs
from paceline.estimate.request import EstimateRequest
from paceline.estimate.single_estimate import Estimate, estimate_on
from paceline.files import catalog
from paceline.layouts.search.space import SearchSpace, feasible_layouts
from paceline.mlperf.compare.published_scores import published_scores
from paceline.mlperf.rules import BENCHMARKS
from paceline.mlperf.score.convergence import olympic_mean
from paceline.mlperf.time_to_train import time_to_train

RECIPES = {
    "llama31_8b": "llama31-8b",
    "llama2_70b_lora": "llama2-70b-lora",
    "flux1": "flux1-schnell",
    "gpt_oss_20b": "gpt-oss-20b",
    "deepseekv3_671b": "deepseek-v3",
    "llama31_405b": "llama31-405b",
}
FOUR_BIT = 2
WIDTHS: tuple[Dtype, ...] = ("nvfp4", "mxfp4", "mxfp8", "fp8", "bf16")
ROUND_YEARS = {"5.1.0": 2025.75, "6.0.0": 2026.25}
"""Year of the submission deadline, for software without a stated release."""
OF_LAMBDA = {"b200_n1": ("B200", 1, 8), "b200_n2": ("B200", 2, 8)}
"""Its runs on 72 GB300 are those of round 5.1 and counted there."""
LAYOUTS = {
    ("llama31_8b", 72): (1, 1, 2, 1), ("llama31_8b", 512): (2, 1, 4, 1),
    ("llama2_70b_lora", 72): (1, 1, 8, 1), ("llama2_70b_lora", 512): (1, 1, 8, 1),
    ("flux1", 512): (4, 1, 1, 1), ("flux1", 1152): (4, 1, 1, 1),
}  # fmt: skip
"""tp, pp, cp, ep of NVIDIA's racks in round 5.1, by benchmark and devices, as published
configurations have them (mlcommons/training_results_v5.1, NVIDIA/benchmarks): one of GB200 or GB300
for both."""
BESIDE_LAYERS = (0, 2, 3)
"""Additional pipeline layers: embedding and head, and DeepSeek's second head."""
SPACE = SearchSpace(
    micro_batches=(1, 2, 4, 8), zero_stages=(1, 3), recompute=("none", "full"), max_cp=8
)


@dataclass(frozen=True)
class Row:
    """One published system and benchmark; None is not stated."""

    round: str
    submitter: str
    system: str
    benchmark: str
    accelerator: str
    nodes: int
    per_node: int
    batch: int | None
    dtype: str | None = None
    layout: tuple[int, int, int, int] | None = None
    """tp, pp, cp, ep."""
    accumulation: int | None = None
    software: str = "any"
    minutes: float | None = None
    samples: float | None = None
    step_s: float | None = None
    framework: str = ""

    @property
    def maker(self) -> str:
        return "AMD" if "AMD" in self.accelerator or "MI3" in self.accelerator else "NVIDIA"


def rows_of_round_51() -> Iterator[Row]:
    """Those that come with Paceline."""
    for score in published_scores():
        if score.round == "v5.1" and score.benchmark in BENCHMARKS:
            yield Row(
                "5.1.0", score.submitter, score.system, score.benchmark, score.accelerator or "",
                score.nodes or 1, score.gpus_per_node or 8, score.global_batch_size,
                software=_software(score.framework), framework=score.framework or "",
                minutes=score.olympic_mean_minutes,
                samples=score.mean_samples_to_target,
            )  # fmt: skip


def rows_of_open(path: Path) -> Iterator[Row]:
    """Return the rows of round 6.0; a row of one run has that run's minutes, if known."""
    lines = list(csv.DictReader(path.open(encoding="utf-8")))
    for line in lines:
        score, factor = _number(line["score_minutes"]), _number(line["rcp_scaling_factor"]) or 1.0
        minutes = _number(line["olympic_mean_minutes"]) or (score / factor if score else None)
        axes = [_whole(line[name]) for name in ("tp", "pp", "cp", "ep")]
        tp, *others = (size or 1 for size in axes)
        yield Row(
            "6.0.0", line["submitter"], line["system"], line["benchmark"], line["accelerator"],
            int(line["nodes"]), int(line["gpus_per_node"]), _batch(line, lines),
            dtype=line["dtype"] or None,
            layout=(tp, others[0], others[1], others[2]) if axes[0] else None,
            accumulation=_whole(line["grad_accum"]), software=_software(line["stack"]),
            framework=line["framework"],
            minutes=minutes or _number(line["minutes_this_run"]),
            samples=_number(line["mean_samples_to_target"]) or _number(line["samples_this_run"]),
            step_s=_number(line["steady_step_time_s"]),
        )  # fmt: skip


def _batch(line: Mapping[str, str], lines: Sequence[Mapping[str, str]]) -> int | None:
    """Return a row's batch, else the one that all of its submitter's rows of that benchmark share.

    These rows have the same number of devices and the same software.
    """
    alike = ("submitter", "benchmark", "gpus", "stack")
    others = [other for other in lines if all(other[name] == line[name] for name in alike)]
    batches = {_whole(other["global_batch_size"]) for other in others} - {None}
    return _whole(line["global_batch_size"]) or (batches.pop() if len(batches) == 1 else None)


def rows_of_lambda(path: Path) -> Iterator[Row]:
    """Ten runs a row."""
    groups: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for line in csv.DictReader(path.open(encoding="utf-8")):
        if line["status"] == "success":
            key = (line["system"], line["benchmark"], int(line["gbs"]))
            groups[key].append(float(line["run_min"]))
    for (system, name, batch), minutes in groups.items():
        device_of_lambda = next((v for k, v in OF_LAMBDA.items() if system.startswith(k)), None)
        if device_of_lambda is None:
            continue
        device, nodes, per_node = device_of_lambda
        benchmark, _, width = name.partition("_fp")
        yield Row(
            "5.1.0", "Lambda (rerun)", system, benchmark, device, nodes, per_node, batch,
            dtype={"4": "nvfp4", "8": "fp8"}.get(width), software="nemo", framework=system,
            minutes=olympic_mean(minutes),
        )  # fmt: skip


def predicted(row: Row) -> dict[str, Any]:
    """Step and minutes of a row; raises UserError for what cannot be estimated."""
    if row.benchmark not in RECIPES:
        raise UserError(row.benchmark, "is a benchmark without a recipe")
    if row.batch is None:
        raise UserError("a row", "states no global batch")
    devices = row.nodes * row.per_node
    layout = row.layout or (LAYOUTS.get((row.benchmark, devices)) if row.round == "5.1.0" else None)
    stated_axes = (layout, row.accumulation) if layout else None
    device = catalog.device(row.accelerator).name
    place = (device, devices, row.per_node, row.batch, _dtype(row, device))
    due = ROUND_YEARS[row.round]
    release = min(due, release_of({"source": f"{row.system} {row.framework}"}) or due)
    software = (row.software, _cuda_graphs(row), release)
    spec, estimate = _estimated(row.benchmark, place, software, stated_axes)
    time = time_to_train(spec, estimate, row.round)
    return {
        "dtype": spec.training.dtype,
        "layout": estimate.layout,
        "step_s": estimate.step_time_s,
        "step_low_s": estimate.low_s,
        "step_high_s": estimate.high_s,
        "samples": time.samples,
        "minutes": time.minutes,
        "low_minutes": time.low_minutes,
        "high_minutes": time.high_minutes,
    }


@cache
def _estimated(
    benchmark: str,
    place: tuple[str, int, int, int, str],
    software: tuple[str, CudaGraphs, float],
    stated_axes: tuple[tuple[int, int, int, int], int | None] | None,
) -> tuple[RunSpec, Estimate]:
    """Return the run and its estimate.

    `place` is device, devices, devices per node, batch and dtype. `software` is its name, the scope
    of CUDA graphs, and its release.
    `stated_axes` are tp, pp, cp, ep and the gradient accumulation steps.
    """
    device, devices, per_node, batch, dtype = place
    changes = (f"training.global_batch={batch}", f"training.dtype={dtype}")
    stack, cuda_graphs, release = software
    question = EstimateRequest(
        *(RECIPES[benchmark], device, devices, "mlperf-trial", changes, min(per_node, devices)),
        software=stack,
        cuda_graphs=cuda_graphs,
        software_date=release,
    )
    spec, machine = question.spec_of_any_layout, question.machine
    if stated_axes is None:
        sizes = (spec.world_size, batch, spec.training.seq_len)
        layouts, _ = feasible_layouts(spec.model, *sizes, SPACE)
    else:
        layouts = _stated_layouts(spec, *stated_axes)
    if not layouts:
        raise UserError(f"{benchmark} on {devices} devices", "has no layout that divides")
    every = estimates_of_layouts(
        spec, machine, shipped_evidence(), layouts, question.resolved_software
    )
    fastest = int(np.lexsort((every.step_time_s, ~every.fits))[0])
    spec = spec.model_copy(update={"layout": layouts[fastest]})
    return spec, estimate_on(machine, spec, question, shipped_evidence())


def _stated_layouts(
    spec: RunSpec, axes: tuple[int, int, int, int], accumulation: int | None
) -> list[Layout]:
    """A pipeline of that many stages in every number of chunks that comes out even."""
    (tp, pp, cp, ep), layers = axes, spec.model.num_layers
    batch, devices = spec.training.global_batch, spec.world_size
    each = batch * tp * pp * cp // devices
    micro = 1 if pp > 1 else max(1, each // (accumulation or 1))
    return [
        Layout(
            tp=tp, pp=pp, cp=cp, ep=ep, vp=vp, micro_batch=micro, zero_stage=1,
            sequence_parallel=tp > 1 and spec.model.kind == "decoder",
        )
        for vp in range(1, 1 + layers // pp if pp > 1 else 2)
        if pp == 1 or any((layers + more) % (pp * vp) == 0 for more in BESIDE_LAYERS)
    ]  # fmt: skip


def _cuda_graphs(row: Row) -> CudaGraphs:
    """Return the scope of CUDA graphs according to the submitters' logs and configurations.

    Whole iterations of language models in NVIDIA's NeMo, blocks of Flux.1 there, nothing of AMD's.
    """
    if row.maker == "AMD":
        return "none"
    return "blocks" if row.benchmark == "flux1" else "iteration"


def _dtype(row: Row, device: str) -> str:
    """Return the stated dtype, else that of the module's rule; 4 bits for AMD since round 6.0."""
    peaks = catalog.device(device).peaks
    if row.dtype in peaks:
        return row.dtype
    eight = row.benchmark == "flux1" or (row.maker == "AMD" and row.round == "5.1.0")
    widths = WIDTHS[FOUR_BIT:] if eight else WIDTHS
    return next(width for width in widths if width in peaks)


def summary(rows: Sequence[dict[str, Any]], of: str) -> dict[str, Any]:
    """Errors of predictions over published values, and how many intervals hold them."""
    logs = [log(row["predicted"][of] / row["published"][of]) for row in rows]
    ends = {"minutes": ("low_minutes", "high_minutes"), "step_s": ("step_low_s", "step_high_s")}[of]
    inside = [
        row["predicted"][ends[0]] <= row["published"][of] <= row["predicted"][ends[1]]
        for row in rows
    ]
    return {
        "n": len(rows),
        "mape": fmean(abs(exp(each) - 1) for each in logs) if logs else None,
        "median": median(map(abs, logs)) if logs else None,
        "bias": fmean(logs) if logs else None,
        "coverage_80": fmean(inside) if logs else None,
    }


def summaries(rows: Sequence[dict[str, Any]], of: str) -> dict[str, Any]:
    """Return the summary of all rows, and by round, benchmark and device vendor."""
    published = [row for row in rows if row["published"][of]]
    keys = {(kind, row[kind]) for row in published for kind in ("round", "benchmark", "vendor")}
    parts = {
        f"{kind} {value}": summary([row for row in published if row[kind] == value], of)
        for kind, value in sorted(keys)
    }
    return {"all": summary(published, of), **parts}


def compare_rows(rows: Iterable[Row]) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """(rows that were predicted, those that were not and why)."""
    predictions: list[dict[str, Any]] = []
    omissions: list[dict[str, str]] = []
    for row in rows:
        print(f"{row.submitter} {row.system} {row.benchmark}", file=sys.stderr, flush=True)
        names = {name: getattr(row, name) for name in ("round", "submitter", "system", "benchmark")}
        try:
            estimate = predicted(row)
        except UserError as error:
            omissions.append({**names, "reason": f"{error.where} {error.what}"})
            continue
        devices = {"devices": f"{row.nodes * row.per_node} x {row.accelerator}"}
        published = {"minutes": row.minutes, "step_s": row.step_s, "samples": row.samples}
        predictions.append(
            {**names, "vendor": row.maker, **devices, "batch": row.batch}
            | {"predicted": estimate, "published": published}
        )
    return predictions, omissions


def _software(text: str | None) -> str:
    return "nemo" if "nemo" in (text or "").lower() else "any"


def _number(text: str) -> float | None:
    return float(text) if text.strip() else None


def _whole(text: str) -> int | None:
    value = _number(text)
    return None if value is None else int(value)


def main() -> int:
    """Print and store the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--open", type=Path)
    parser.add_argument("--lambda", type=Path, dest="of_lambda")
    options, around = parser.parse_args(), Surroundings()
    rows = [*rows_of_round_51()]
    rows += rows_of_open(options.open) if options.open else []
    rows += rows_of_lambda(options.of_lambda) if options.of_lambda else []
    predictions, omissions = compare_rows(rows)
    scores = {of: summaries(predictions, of) for of in ("minutes", "step_s")}
    for of, by in scores.items():
        for name, each in by.items():
            if each["n"]:
                print(
                    f"{of:8} {name:28} n {each['n']:3}  MAPE {each['mape']:6.1%}  "
                    f"median {each['median']:.3f}  bias {each['bias']:+.3f}  "
                    f"in 80% {each['coverage_80']:.0%}"
                )
    for reason, count in Counter(each["reason"] for each in omissions).most_common():
        print(f"not predicted: {count} x {reason}")
    keep(
        "mlperf_time_to_train",
        "minutes",
        around,
        scores=scores,
        rows=predictions,
        not_predicted=omissions,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
