"""The bubble of every pipeline schedule, measured, against its formula.

    python benchmarks/pipeline_bubble.py [--repeats 7] [--quick]

The schedules, stages and exchanges are the trainer's. Where processes would compete for cores, a
pass is a sleep of fixed length instead of arithmetic; two stages run real arithmetic as well. The
measured bubble is 1 - the ranks' time in passes / (ranks x the time from the first pass to the last
one's end). Next to the formula is the result of following the observed order of passes
without any cost of exchange: with equal passes, and with the passes as long as they were. The rest
is lost between passes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from _result import Surroundings, keep, spread_of, spread_text
from _worlds import settings, start

from paceline.core.layout import Schedule
from paceline.core.pipeline import bubble_fraction
from tests.core.schedules import Pass, idle_fraction

SLEEP_S = 0.02
"""A rank's forward pass of one micro-batch; backward twice that."""
SCHEDULES: tuple[tuple[Schedule, int], ...] = (
    ("gpipe", 1),
    ("1f1b", 1),
    ("zero-bubble", 1),
    ("gpipe", 2),
    ("interleaved", 2),
    ("zero-bubble", 2),
)
ARITHMETIC = ("num_layers=8", "vocab_size=128", "ffn_size=768")
"""Little vocabulary, so that the stage with the head has hardly more to do."""

Trace = list[tuple[str, int, int, float, float]]


@dataclass(frozen=True)
class Case:
    """One pipeline."""

    schedule: Schedule
    pp: int
    vp: int
    num_microbatches: int
    sleeps: bool

    def question(self, repeats: int) -> dict[str, Any]:
        """Input of the ranks."""
        size = (
            [f"model.{name}" for name in ARITHMETIC]
            if not self.sleeps
            else [
                f"model.num_layers={self.pp * self.vp}",
                "seq_len=8",
            ]
        )
        layout = {"pp": self.pp, "vp": self.vp, "schedule": self.schedule, "micro_batch": 1}
        content = settings(
            self.pp,
            *size,
            *(f"layout.{name}={value}" for name, value in layout.items()),
            f"global_batch={self.num_microbatches}",
            "dtype=fp32",
        )
        sleep_s = SLEEP_S if self.sleeps else None
        return {"settings": content, "repeats": repeats, "sleep_s": sleep_s}

    def equal(self, work: Pass) -> float:
        """Equal stages; PyTorch's first one has no input's gradient and does all of it with W."""
        if work.kind in ("B", "W") and work.stage == 0:
            return 2.0 * (work.kind == "W")
        return 2.0 if work.kind == "BW" else 1.0


def measured(traces: list[Trace]) -> float:
    """Idle share of one step from all ranks' passes."""
    busy = sum(end - begin for trace in traces for *_, begin, end in trace)
    begins = min(begin for trace in traces for *_, begin, _ in trace)
    ends = max(end for trace in traces for *_, end in trace)
    return 1 - busy / (len(traces) * (ends - begins))


def follow_traces(traces: list[Trace]) -> tuple[list[list[Pass]], dict[Pass, float]]:
    """The order of each rank's passes, and how long each took."""
    took = {Pass(kind, stage, mb): e - b for trace in traces for kind, stage, mb, b, e in trace}  # type: ignore[arg-type]
    orders = [[Pass(kind, stage, mb) for kind, stage, mb, *_ in trace] for trace in traces]  # type: ignore[arg-type]
    return orders, took


def between_s(traces: list[Trace]) -> float:
    """Seconds that a rank loses at every pass beyond what order and lengths of passes explain."""
    orders, took = follow_traces(traces)
    begins = min(begin for trace in traces for *_, begin, _ in trace)
    length = max(end for trace in traces for *_, end in trace) - begins
    explanation = length * (1 - measured(traces)) / (1 - idle_fraction(orders, took.__getitem__))
    return (length - explanation) / len(orders[0])


def row(case: Case, by_rank: list[list[Trace]]) -> dict[str, Any]:
    """Formula, measurement, and what the order alone explains."""
    repeats = [list(traces) for traces in zip(*by_rank, strict=True)]
    orders, _ = follow_traces(repeats[0])
    with_durations = [idle_fraction(o, took.__getitem__) for o, took in map(follow_traces, repeats)]
    return {
        "work": "sleep" if case.sleeps else "arithmetic",
        "schedule": case.schedule,
        "pp": case.pp,
        "vp": case.vp,
        "num_microbatches": case.num_microbatches,
        "formula": bubble_fraction(case.schedule, case.pp, case.vp, case.num_microbatches),
        "order_with_equal_passes": idle_fraction(orders, case.equal),
        "order_with_measured_passes": spread_of(with_durations),
        "measured": spread_of([measured(traces) for traces in repeats]),
        "between_passes_s": spread_of([between_s(traces) for traces in repeats]),
    }


def cases(quick: bool) -> list[Case]:
    """Every schedule: two and four sleeping stages, and two that compute."""
    counts = (8,) if quick else (4, 8, 16)
    return [
        *(Case(s, 2, vp, 8, sleeps=False) for s, vp in SCHEDULES),
        *(Case(s, 2, vp, 8, sleeps=True) for s, vp in SCHEDULES),
        *(Case(s, 4, vp, m, sleeps=True) for m in counts for s, vp in SCHEDULES),
    ]


def rows_of(all_cases: list[Case], pp: int, repeats: int) -> list[dict[str, Any]]:
    """All cases of one world."""
    world_cases = [case for case in all_cases if case.pp == pp]
    with tempfile.TemporaryDirectory() as name:
        questions = [case.question(repeats) for case in world_cases]
        ranks = start("_pipeline_ranks.py", pp, questions, Path(name))
    return [row(case, [rank[i] for rank in ranks]) for i, case in enumerate(world_cases)]


def main() -> int:
    """Measure, print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="Fewer cases; nothing is written.")
    options = parser.parse_args()
    around, all_cases = Surroundings(), cases(options.quick)
    print(
        "| passes | schedule | pp | vp | micro-batches | formula | order, equal passes "
        "| order, passes as measured | measured (min-max) | lost at a pass |"
    )
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    rows = [row for pp in (2, 4) for row in rows_of(all_cases, pp, options.repeats)]
    for r in rows:
        print(
            f"| {r['work']} | {r['schedule']} | {r['pp']} | {r['vp']} | {r['num_microbatches']} "
            f"| {r['formula']:.3f} | {r['order_with_equal_passes']:.3f} "
            f"| {r['order_with_measured_passes']['median']:.3f} | {spread_text(r['measured'])} "
            f"| {r['between_passes_s']['median'] * 1e3:.2f} ms |"
        )
    if not options.quick:
        keep("pipeline_bubble", "idle share of the step", around, sleep_s=SLEEP_S, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
