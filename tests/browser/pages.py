"""A page of every kind, of results that are awkward to lay out, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks._simulated_cluster import Fault, SimulatedCluster, simulate
from paceline.compare.judgement import Comparison
from paceline.compare.over_time.step_changes import History
from paceline.estimate.costs import Prices
from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.report import EstimateOutput, estimate_document
from paceline.estimate.request import EstimateRequest
from paceline.estimate.scenarios import compare_scenarios, step_time_ratio
from paceline.estimate.single_estimate import Estimate, estimate
from paceline.explain.diagnosis import explain
from paceline.explain.report import explanation_document
from paceline.layouts.sweep.report import sweep_document
from paceline.mlperf.compare.comparison import compare
from paceline.mlperf.compare.report import scores_document
from paceline.profiles.profile import waterfall
from paceline.profiles.torch_traces import read_file
from paceline.report.html import render_document
from paceline.runs.comparison import ComparisonOptions, compare_runs
from paceline.runs.comparison_report import comparison_document
from paceline.runs.goodput.attempt import attempts_of_run
from paceline.runs.goodput.ledger import ledger_of
from paceline.runs.goodput.report import goodput_document
from paceline.runs.history import recipe_history
from paceline.runs.history_report import history_document
from paceline.runs.profile_report import profile_document
from paceline.runs.watch.reader import RunReader
from paceline.runs.watch.report import snapshot_document
from paceline.scaling.analysis.result import scale_result
from paceline.scaling.report import scaling_document
from tests.explain.example import write_parts
from tests.layouts.sweep.test_charts import EXPECTED, result, row
from tests.mlperf.submissions import ten_runs
from tests.profiles.traces import kernel, step, write
from tests.report import example
from tests.runs.goodput.test_goodput import write_attempt
from tests.runs.series_example import around, make_finished

LONG = "a-host-with-a-name-that-somebody-made-long-enough-to-need-two-lines-0017"


def run_page() -> str:
    """A run with references."""
    return example.render_html(example.referenced_report())


def many_ranks_page() -> str:
    """A run of 64 ranks, whose table is long."""
    return example.render_html(example.report(64, 200, 37))


def estimate_page() -> str:
    """One estimate."""
    found = _estimated(EstimateRequest("llama31-405b", "H100-SXM", 16384))
    return render_document(estimate_document(EstimateOutput([found])))


def scenarios_page() -> str:
    """Three scenarios, two of them on the same devices."""
    price = Prices(per_device_hour=2.5)
    questions = [
        EstimateRequest("llama31-8b", "H100-SXM", 64, prices=price),
        EstimateRequest("llama31-8b", "B200", 32, prices=price),
        EstimateRequest("llama31-8b", "H100-SXM", 64),
    ]
    estimates = [_estimated(question) for question in questions]
    first, evidence = questions[0], shipped_evidence()
    beside = [
        compare_scenarios(estimates[0], other, step_time_ratio(first, question, evidence))
        for other, question in zip(estimates[1:], questions[1:], strict=True)
    ]
    return render_document(estimate_document(EstimateOutput(estimates, beside)))


def _estimated(question: EstimateRequest) -> Estimate:
    return estimate(question, shipped_evidence())


def scaling_page() -> str:
    """Four sizes with a slow node."""
    analysis = simulate(SimulatedCluster(32, (Fault("slow", 7, 0.08),)), [1, 2, 8, 32])
    result = scale_result(analysis)
    return render_document(scaling_document(result, analysis.measured, "results-of-the-night.csv"))


def sweep_page() -> str:
    """Rows with and without a speed, one with a long reason."""
    rows = (
        row(1, speed=100.0, prediction=EXPECTED, dp=4, nodes=1, devices=8),
        row(2, speed=123_456.0, prediction=EXPECTED, low_s=0.9, high_s=1.1, devices=8),
        row(4, "oom", reason=f"no room for 12.34 GiB on {LONG}"),
        row(8, "refused", reason="pp 3 does not divide 16 layers; 1, 2, 4, 8 or 16 do " * 3),
    )
    found = result(*rows).model_copy(update={"sentences": ("best: mbs 2, 0.9 s",)})
    return render_document(sweep_document(found))


def history() -> History:
    """Fourteen runs that became slower with another torch."""
    with TemporaryDirectory() as folder:
        root = Path(folder)
        before = [make_finished(root, at, t) for at, t in enumerate(around(0.155, 8))]
        after = [
            make_finished(root, at, t, torch="2.14.0")
            for at, t in enumerate(around(0.163, 6, 3), start=8)
        ]
        return recipe_history("example", before + after, "step_time_s", 0.01)


def comparison() -> Comparison:
    """Three runs against three slower ones, by their long names."""
    with TemporaryDirectory() as folder:
        root = Path(folder)
        before = [make_finished(root, at, t).name for at, t in enumerate(around(0.155, 3))]
        slower = enumerate(around(0.163, 3, 3), start=8)
        after = [make_finished(root, at, t, torch="2.14.0").name for at, t in slower]
        return compare_runs(root, ",".join(before), ",".join(after), ComparisonOptions())


def mlperf_page() -> str:
    """Two sizes compared with published results."""
    with TemporaryDirectory() as folder:
        small = ten_runs(Path(folder) / "eight")
        large = ten_runs(Path(folder) / "sixty-four", global_batch_size=16, samples=4224)
        compared = compare([small, large], num_devices=[8, 64], accelerator="GB200")
        return render_document(scores_document(compared))


def explain_page() -> str:
    """Two causes against another run."""
    with TemporaryDirectory() as folder:
        root, late = Path(folder), {"checkpoint": 0.1, "data": 0.1}
        write_parts(root, "before")
        write_parts(root, f"after-{LONG}", (late, late))
        return render_document(
            explanation_document(explain(root / f"after-{LONG}", "before", root))
        )


def goodput_page() -> str:
    """A training that was killed and went on."""
    with TemporaryDirectory() as folder:
        root = Path(folder)
        ended = write_attempt(root, "first", 0, 1, 37, killed=True)
        write_attempt(root, LONG, ended + 60, 31, 60)
        attempts = [each for name in ("first", LONG) for each in attempts_of_run(root / name)]
        return render_document(goodput_document(ledger_of(attempts)))


def watch_page() -> str:
    """A moment of two ranks, one of which is waited for."""
    with TemporaryDirectory() as folder:
        write_parts(Path(folder), LONG, ({"data": 0.05}, {"work": 1.5, "comm": 0.02}))
        return render_document(snapshot_document(RunReader(Path(folder) / LONG).state()))


def profile_page() -> str:
    """Two ranks under PyTorch's profiler, a kernel with a name of C++'s length among theirs."""
    with TemporaryDirectory() as folder:
        for rank in range(2):
            events = [*step(20, 0, 900), kernel(f"void cutlass::gemm::{LONG}<4, {LONG}>", 0, 400)]
            write(Path(folder) / f"rank-{rank}.json", events, rank=rank)
        read = read_file(Path(folder))
    levels = waterfall(read, flops_per_step=1e8, peak_flops_per_s=1e12)
    return render_document(
        profile_document(read.model_copy(update={"waterfall": levels}), "tiny-llama")
    )


MADE: dict[str, Callable[[], str]] = {
    "run": run_page,
    "many ranks": many_ranks_page,
    "estimate": estimate_page,
    "scenarios": scenarios_page,
    "scale": scaling_page,
    "sweep": sweep_page,
    "compare": lambda: render_document(comparison_document(comparison())),
    "history": lambda: render_document(history_document(history())),
    "mlperf": mlperf_page,
    "profile": profile_page,
    "explain": explain_page,
    "goodput": goodput_page,
    "watch": watch_page,
}
"""What makes each page."""


@cache
def page(name: str) -> str:
    """The page of that name."""
    return MADE[name]()
