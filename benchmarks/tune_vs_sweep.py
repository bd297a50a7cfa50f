"""`paceline tune` against an exhaustive sweep of the same layouts, and against random search.

    python benchmarks/tune_vs_sweep.py [--parts sweep,replay,again] [--rounds 10] [--quick]

sweep: every layout of a tiny model on two processes (at least 60 that can run), the trainer's own
       steps, all layouts in turn in one world; written to results/layout_sweep.json.
replay: 20 tunings and 20 random searches on the recorded sweep, each with a quarter of its runs. A
       run is the median of half of a layout's recorded rounds, redrawn for each replay; random
       search takes the layouts in another order each time and, like the tuning, knows nothing
       beforehand.
again: the layouts that the tunings chose, the sweep's winner and its second, as runs of `paceline`,
       five times in turn; without replay, of the stored replays.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _result import FOLDER, Surroundings, keep
from _worlds import start

from paceline.compare.over_time.repeats import has_figure
from paceline.compare.significance import student_t
from paceline.core.layout import Layout
from paceline.engines import native
from paceline.layouts.search.space import SearchSpace
from paceline.layouts.sweep.plan import Combination, Sweep
from paceline.layouts.sweep.trials import SweepTask, SweepTrial, run_sweep
from paceline.layouts.tune.candidates import Candidates, find_candidates
from paceline.layouts.tune.result import label
from paceline.layouts.tune.search import Budget, Learner, TrialOutcome, resume_search, start_search
from paceline.layouts.tune.tuning import SCHEDULES
from paceline.machines.placement import Request
from paceline.runs.plan import Plan

RANKS, REPLAYS, AGAIN = 2, 20, 5
MARGIN = 0.03
SETTINGS = (
    "data.source=synthetic",
    "seq_len=128",
    "global_batch=8",
    "layout.micro_batch=1",
    "dtype=fp32",
    "memory_parts=false",
)
SPACE = SearchSpace(
    micro_batches=(1, 2, 4), zero_stages=(0, 1, 3), recompute=("none", "full"), schedules=SCHEDULES
)
STEPS_OF_A_TURN = 3
REPLAYED = (
    "budget",
    "of",
    "replays",
    "mean_regret",
    "mean_regret_random",
    "difference",
    "difference_95",
    "better",
    "tied_with_best",
    "worse",
)
SWEEP = "layout_sweep"


def question(steps: int = 40) -> Candidates:
    """The layouts, by the code that `paceline tune` asks."""
    request = Request("tiny-llama", None, (*SETTINGS, f"steps={steps}"), RANKS, "cpu")
    return find_candidates(request, None, SPACE)


@dataclass(frozen=True)
class Recorded:
    """The sweep: seconds of every layout in each round."""

    layouts: list[Layout]
    seconds: np.ndarray[Any, np.dtype[np.float64]]

    @property
    def truth(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The time of each layout: the median of all rounds."""
        return np.median(self.seconds, axis=1)

    def regret(self, row: int) -> float:
        """Relative slowdown compared with the sweep's winner."""
        return float(self.truth[row] / self.truth.min()) - 1

    def draw(self, row: int, random: np.random.Generator) -> float:
        """A run: the median of half of the rounds."""
        rounds = self.seconds.shape[1]
        return float(
            np.median(random.choice(self.seconds[row], max(1, rounds // 2), replace=False))
        )


def sweep(find_candidates: Candidates, rounds: int) -> Recorded:
    """Measure all layouts."""
    specs = [
        find_candidates.spec.model_copy(update={"layout": layout})
        for layout in find_candidates.layouts
    ]
    order = {
        "layouts": [native.settings(spec) for spec in specs],
        "rounds": rounds,
        "steps": STEPS_OF_A_TURN,
        "threads": find_candidates.spec.cluster.threads_per_device,
    }
    with tempfile.TemporaryDirectory() as name:
        ranks = start("_sweep_ranks.py", RANKS, order, Path(name))
    return Recorded(list(find_candidates.layouts), np.array(ranks).max(axis=0))


def load_sweep() -> Recorded:
    """The sweep of before."""
    rows = json.loads((FOLDER / f"{SWEEP}.json").read_text())["rows"]
    layouts = [Layout.model_validate(row["layout"]) for row in rows]
    return Recorded(layouts, np.array([row["rounds_s"] for row in rows]))


def stored_replays() -> dict[str, Any]:
    """Return the stored replays; empty before the first."""
    path = FOLDER / "tune_vs_sweep.json"
    if not path.is_file():
        return {}
    content = json.loads(path.read_text())
    return {name: content[name] for name in REPLAYED}


def replays(find_candidates: Candidates, world: Recorded) -> dict[str, Any]:
    """Tunings and random searches on the recorded sweep."""
    budget = len(world.layouts) // 4
    rows = {layout: row for row, layout in enumerate(world.layouts)}
    replays: list[dict[str, Any]] = []
    for seed in range(REPLAYS):
        random = np.random.default_rng(seed)

        def measure(row: int, random: np.random.Generator = random) -> TrialOutcome:
            return TrialOutcome("ok", world.draw(rows[find_candidates.layouts[row]], random), 1.0)

        search = start_search(find_candidates, Learner(find_candidates))
        resume_search(search, measure, Budget(runs=budget))
        assert search.best is not None
        row = rows[find_candidates.layouts[search.best]]
        runs = len(search.took_s)
        replays.append(
            {
                "row": row,
                "runs": runs,
                "layouts": len(search.tried_layouts),
                "stop": search.stop,
                "regret": world.regret(row),
                "random": _random(world, budget, seed),
            }
        )
        print(
            f"replay {seed}: {runs} runs of {len(search.tried_layouts)} layouts ({search.stop}), "
            f"{replays[-1]['regret']:.1%} slower than the best; "
            f"random search {replays[-1]['random']:.1%}"
        )
    return {"budget": budget, "of": len(world.layouts), "replays": replays, **_comparison(replays)}


def _random(world: Recorded, runs: int, seed: int) -> float:
    """Return the distance from the winner of the best of `count` random layouts."""
    random = np.random.default_rng(1000 + seed)
    rows = random.choice(len(world.layouts), runs, replace=False)
    return world.regret(min(rows.tolist(), key=lambda row: world.draw(row, random)))


def _comparison(replays: list[dict[str, Any]]) -> dict[str, Any]:
    ours, others = (np.array([row[name] for row in replays]) for name in ("regret", "random"))
    random = np.random.default_rng(0)
    picks = random.integers(0, len(ours), (10_000, len(ours)))
    low, high = np.quantile((others - ours)[picks].mean(axis=1), (0.025, 0.975))
    return {
        "mean_regret": float(ours.mean()),
        "mean_regret_random": float(others.mean()),
        "difference": float((others - ours).mean()),
        "difference_95": [float(low), float(high)],
        "better": int((ours < others).sum()),
        "level": int((ours == others).sum()),
        "worse": int((ours > others).sum()),
    }


class Silent:
    """An observer of runs that only names them."""

    @contextmanager
    def running(self, task: SweepTask, plan: Plan):
        print(f"run {task.repeat} of {task.trial.choice.settings['layout']}")
        yield lambda progress: None

    def task_ended(self, task: SweepTask, outcome: Any) -> None:
        """Do nothing."""

    def slot_lost(self, slot: Any, why: str, for_good: bool) -> None:
        """Do nothing."""


def rerun(candidates: list[Layout], winner: Layout, repeats: int) -> list[dict[str, Any]]:
    """Run layouts and the winner in turn; return ratios of their times with 95% intervals."""
    find_candidates = question()
    layouts = list(dict.fromkeys([winner, *candidates]))
    rows = [find_candidates.layouts.index(layout) for layout in layouts]
    choices = tuple(
        Combination({"layout": label(layout, RANKS)}, layout, find_candidates.plan(row))
        for layout, row in zip(layouts, rows, strict=True)
    )
    trials = [SweepTrial(choice, number) for number, choice in enumerate(choices, start=1)]
    with tempfile.TemporaryDirectory() as name:
        run_sweep(
            Sweep("again", "tiny-llama", None, (), choices, repeats),
            trials,
            Path(name),
            ["paceline", "tune"],
            Silent(),
        )
        times = [
            [r.metrics["step_time_s"].value for r in t.results if has_figure(r)] for t in trials
        ]
    return [_ratio(label(layout, RANKS), times[i], times[0]) for i, layout in enumerate(layouts)]


def _ratio(name: str, ours: list[Any], best: list[Any]) -> dict[str, Any]:
    n = min(len(ours), len(best))
    logs = np.log(np.array(ours[:n], dtype=float) / np.array(best[:n], dtype=float))
    half = student_t(0.975, n - 1) * logs.std(ddof=1) / n**0.5 if n > 1 else float("nan")
    low, middle, high = np.exp([logs.mean() - half, logs.mean(), logs.mean() + half])
    return {
        "layout": name,
        "step_times_s": ours,
        "ratio": float(middle),
        "low": float(low),
        "high": float(high),
        "within_3_percent": bool(middle <= 1 + MARGIN),
    }


def main() -> int:
    """Measure, print and keep the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--parts", default="sweep,replay,again")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--quick", action="store_true", help="Two rounds and repeats; nothing is written."
    )
    options = parser.parse_args()
    parts, around = options.parts.split(","), Surroundings()
    find_candidates = question()
    print(
        f"{len(find_candidates.layouts)} layouts can run, {find_candidates.num_infeasible} cannot"
    )
    world = (
        sweep(find_candidates, 2 if options.quick else options.rounds)
        if "sweep" in parts
        else load_sweep()
    )
    if "sweep" in parts and not options.quick:
        _keep_sweep(find_candidates, world, around)
    winner = world.layouts[int(world.truth.argmin())]
    print(
        f"the sweep's winner: {label(winner, RANKS)}, {world.truth.min():.4f} s; "
        f"slowest {world.truth.max():.4f} s"
    )
    content = stored_replays()
    if "replay" in parts:
        content = replays(find_candidates, world)
        print({name: value for name, value in content.items() if name != "replays"})
    if "again" in parts and content:
        picks = [world.layouts[replay["row"]] for replay in content["replays"]]
        common = sorted(set(picks), key=lambda layout: -picks.count(layout))[:3]
        second = world.layouts[int(world.truth.argsort()[1])]
        content["again"] = rerun([*common, second], winner, 2 if options.quick else AGAIN)
        for row in content["again"]:
            row["chosen_by"] = [label(layout, RANKS) for layout in picks].count(row["layout"])
            print(
                f"{row['layout']}, chosen by {row['chosen_by']} of {len(picks)}: "
                f"{row['ratio']:.3f} of the winner ({row['low']:.3f}-{row['high']:.3f})"
            )
    if content and not options.quick:
        keep("tune_vs_sweep", "share slower than the sweep's winner", around, **content)
    return 0


def _keep_sweep(find_candidates: Candidates, world: Recorded, around: Surroundings) -> None:
    rows = [
        {
            "layout": layout.model_dump(mode="json"),
            "label": label(layout, RANKS),
            "step_time_s": float(np.median(times)),
            "rounds_s": times.tolist(),
        }
        for layout, times in zip(world.layouts, world.seconds, strict=True)
    ]
    keep(
        SWEEP,
        "s a step",
        around,
        settings=SETTINGS,
        ranks=RANKS,
        n_layouts=len(rows),
        n_infeasible=find_candidates.num_infeasible,
        rows=rows,
    )


if __name__ == "__main__":
    sys.exit(main())
