"""Samples that the tiny variants need to reach their targets: 20 runs each, in turn.

    python benchmarks/tiny_convergence.py [--runs 20] [--only NAME] [--write]
    python benchmarks/tiny_convergence.py --curve [--runs 3] [--only NAME]

`--curve` shows how the held-out loss falls over all steps, whatever the target. Samples do not
depend on how fast the machine is. `--write` puts the points into
paceline/files/references/mlperf-tiny.yaml; an interrupted series is resumed. A call for one variant
keeps the points of the others, marked as an earlier call's.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from _result import Surroundings, earlier, keep

from paceline.cli.mlperf_run import TrialsDisplay
from paceline.files.documents import write_text
from paceline.files.run_folder import runs_root
from paceline.machines.placement import Request
from paceline.mlperf.result_logs import read_log
from paceline.mlperf.rules import BENCHMARKS
from paceline.mlperf.run.request import SeriesRequest, plan_trials
from paceline.mlperf.run.trials import run_trials
from paceline.mlperf.score.convergence import TINY_POINTS, olympic_mean

NAMES = {benchmark.option: benchmark.name for benchmark in BENCHMARKS.values()}
"""Names on the command line and in the rules."""
REFERENCES = Path(__file__).parents[1] / f"paceline/files/references/{TINY_POINTS}.yaml"
HEADER = """\
# Reference convergence points of Paceline's tiny variants of the benchmarks: samples to the target
# in {runs} runs each, recorded by benchmarks/tiny_convergence.py with Python {python} and
# PyTorch {torch}. They say nothing about MLPerf, and no round has them.
source: Runs of Paceline's tiny variants of MLPerf Training
where: benchmarks/tiny_convergence.py
window: samples to target
convergence:
"""


def record_runs(name: str, num_runs: int) -> dict[str, Any]:
    """Return one variant's samples to the target by run, and the software of the recording."""
    request = Request("", None, (), 1, "cpu")
    display = TrialsDisplay()
    trials = plan_trials(
        SeriesRequest(
            name,
            request,
            tiny=True,
            trials=num_runs,
            name=f"{NAMES[name]}-reference",
            root=runs_root(None),
        ),
        display.base,
    )
    series, _ = run_trials(trials, display)
    samples = [t.samples_to_target for t in series.trials if t.samples_to_target]
    if len(samples) < num_runs:
        raise SystemExit(f"{name}: {num_runs - len(samples)} runs did not reach the target")
    plan = trials.plan_trial(series.trials[0])
    training = plan.spec.training
    return {
        "benchmark": series.benchmark,
        "global_batch": training.global_batch,
        "samples_to_target": samples,
        "olympic_mean": olympic_mean(samples),
        "mean": fmean(samples),
        "stdev": pstdev(samples),
        "distinct": len(set(samples)),
        "minutes": [trial.minutes for trial in series.trials],
        "target": training.evaluation and training.evaluation.target,
        "data_digest": series.data_digest,
        "key": series.key,
        "learning_rate": training.lr,
        "steps": training.steps,
    }


def curve(name: str, seed: int) -> list[tuple[int, float]]:
    """(samples, held-out loss) at every evaluation of a run that no target ends."""
    no_target = ("training.evaluation.target=1e-9", "training.evaluation.skip_first=0")
    display, request = TrialsDisplay(), Request("", None, no_target, 1, "cpu")
    order = SeriesRequest(
        name,
        request,
        tiny=True,
        trials=1,
        first_seed=seed,
        root=runs_root(None),
        name=f"{NAMES[name]}-curve-{seed}",
    )
    trials = plan_trials(order, display.base)
    series, _ = run_trials(trials, display)
    log = read_log(trials.folder / str(series.trials[0].file)).trials[0]
    return [(samples or 0, loss) for samples, loss in log.evaluations]


def show_curves(names: list[str], num_runs: int) -> None:
    """Losses of some seeds side by side."""
    for name in names:
        print(f"{name}: samples, then the loss with each seed")
        for rows in zip(*(curve(name, seed) for seed in range(1, num_runs + 1)), strict=True):
            print(f"{rows[0][0]:7,}  " + "  ".join(f"{loss:.4f}" for _, loss in rows))


def reference_file(points: list[dict[str, Any]], versions: dict[str, Any]) -> str:
    """The text of the references file."""
    runs = max(len(point["samples_to_target"]) for point in points)
    text = HEADER.format(runs=runs, python=versions.get("python"), torch=versions.get("torch"))
    for point in points:
        samples = ", ".join(map(str, point["samples_to_target"]))
        text += (
            f"  # data {point['data_digest']}, target {point['target']:g}\n"
            f"  - id: tiny-{point['benchmark'].replace('_', '-')}-{point['global_batch']}\n"
            f"    benchmark: {point['benchmark']}\n"
            "    rulesets: [tiny]\n"
            f"    global_batch: {point['global_batch']}\n"
            f"    hyperparameters: {{opt_base_learning_rate: {point['learning_rate']:g}, "
            f"max_steps: {point['steps']}}}\n"
            f"    samples_to_target: [{samples}]\n"
        )
    return text


def main() -> None:
    """Record, print, keep, and with --write put the points into the references."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int)
    parser.add_argument("--curve", action="store_true")
    parser.add_argument("--only", choices=NAMES)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("PACELINE_RUNS", str(Path.home() / ".cache" / "paceline" / "tiny-runs"))
    names = [name for name in NAMES if options.only in (None, name)]
    if options.curve:
        show_curves(names, options.runs or 3)
        return
    around = Surroundings()
    points = [record_runs(name, options.runs or 20) for name in names]
    for point in points:
        print(
            f"{point['benchmark']}: {point['olympic_mean']:.1f} samples (olympic mean), deviation "
            f"{point['stdev']:.1f}, {point['distinct']} different values, "
            f"n={len(point['samples_to_target'])}, "
            f"longest run {max(point['minutes']):.2f} minutes"
        )
    points += earlier("tiny_convergence", "points", points, lambda point: point["benchmark"])
    order = [f"{name}_tiny" for name in NAMES.values()]
    points.sort(key=lambda point: order.index(point["benchmark"]))
    keep("tiny_convergence", "samples", around, points=points)
    if options.write:
        write_text(REFERENCES, reference_file(points, around.record()["versions"]))


if __name__ == "__main__":
    main()
