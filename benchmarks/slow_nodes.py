"""Detection of a really slow node, and false alarms on healthy nodes.

    python benchmarks/slow_nodes.py [--trials 20] [--seed 0]        (`make nightly`)

Eight virtual hosts with a real sshd each. In every trial the luck of the seed decides whether one
is slowed, which, and how much; a control step measures how much slower it really is; `paceline
scale` trains the tiny variant of OPT-350M on every host over SSH and flags slow hosts. At most two
hosts compute at the same time. Exit code 1 when fewer than 95% of the slowed hosts are named or
healthy ones are blamed in more than one trial. Needs root and the packages of `make deps-clusters`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _result import Surroundings, keep

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.clusters.bed import Bed
from tests.clusters.bed.needs import lacking
from tests.clusters.slow_nodes import PLAN, Fault, Trial, broken_rules, planned, run_trial


def main() -> int:
    """Print and store every trial; 1 when a rule is broken, 2 where the hosts cannot be had."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if missing := lacking(PLAN):
        print(missing, file=sys.stderr)
        return 2
    around = Surroundings()
    trials = run_trials(planned(options.trials, options.seed))
    failures = broken_rules(trials)
    faulty = [trial for trial in trials if trial.fault]
    keep(
        "slow_nodes",
        "1",
        around,
        seed=options.seed,
        slowed=len(faulty),
        named=sum(trial.named for trial in faulty),
        trials_that_blame_a_healthy_node=sum(bool(trial.blamed) for trial in trials),
        broken_rules=failures,
        trials=[as_row(trial) for trial in trials],
    )
    print("\n".join(failures) or "every rule holds")
    return int(bool(failures))


def run_trials(faults: list[Fault | None]) -> list[Trial]:
    """All trials on one bed, each told as it ends."""
    bed = Bed.up(f"slow-nodes-{os.getpid()}", PLAN, tied=True)
    trials: list[Trial] = []
    try:
        for number, fault in enumerate(faults, 1):
            with tempfile.TemporaryDirectory() as folder:
                trials.append(run_trial(bed, fault, Path(folder)))
            bed.repair()
            print(f"{number:2} {trial_line(trials[-1])}", flush=True)
    finally:
        bed.down()
    return trials


def trial_line(trial: Trial) -> str:
    """One line: what was done and what was said."""
    slow, fault = trial.true_slowdown, trial.fault
    what = f"{fault.host} {slow:.2f} times slower" if fault and slow else "no fault"
    return f"{what}: flagged {', '.join(trial.flagged) or 'nobody'} ({trial.seconds:.0f} s)"


def as_row(trial: Trial) -> dict[str, Any]:
    """The trial and what follows from it."""
    follows = {"named": trial.named, "blamed": trial.blamed, "true_slowdown": trial.true_slowdown}
    return {**asdict(trial), **(follows if trial.fault else {"blamed": trial.blamed})}


if __name__ == "__main__":
    sys.exit(main())
