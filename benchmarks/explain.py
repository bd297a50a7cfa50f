"""Share of slow runs whose cause ranks first, and false causes on healthy runs.

    python benchmarks/explain.py [--healthy 4]

The median one of some healthy trainings of the native trainer is the baseline of all. Twelve others
have one fault each, seeded for real: a rank that stands still again and again, a loopback of 300
Mbit/s, a late loader, a CPU quota, other busy loops, both ranks on one core, a checkpoint every
step, unequal loads or padded exchanges of experts, and settings. `paceline explain` is asked
against the baseline and against the run itself. Ranks go before other programs of the machine,
which needs root, as some of the faults do. Exit code 1 when fewer than nine in ten faults are named
first, or a cause is named on a healthy run.
"""

from __future__ import annotations

import argparse
import atexit
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from _result import Surroundings, keep

sys.path.insert(0, str(Path(__file__).parents[1]))

from paceline.explain.explanation import Explanation
from tests.explain.faults import FAULTS, SETTINGS, as_urgent, explain_tagged_run, train

URGENT = 19
MIN_NAMED = 0.9


def main() -> int:
    """Print and store what is said of every run; 1 when too little or too much is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--healthy", type=int, default=4)
    options = parser.parse_args()
    around = Surroundings()
    as_urgent(os.getpid(), -URGENT)
    atexit.register(as_urgent, os.getpid(), 0)  # the session's priority would stay
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        tags = [f"healthy-{number}" for number in range(options.healthy)]
        for tag in tags:
            train(root, tag, urgent=URGENT)
        tags.sort(key=lambda tag: explain_tagged_run(root, tag, None).step_s)
        usual = tags.pop(len(tags) // 2)
        healthy = [_row(root, tag, usual, None) for tag in tags]
        faults = [_faulty(root, cause, usual) for cause in FAULTS if FAULTS[cause].needs()]
    num_named = sum(row["named_first"] for row in faults)
    wrong = sum(bool(row["against_run"]["causes"]) for row in healthy)
    print(
        f"{num_named} of {len(faults)} causes ranked first; false causes on {wrong} of "
        f"{len(healthy)} healthy runs"
    )
    keep(
        "explain",
        "share of the lost time",
        around,
        settings=SETTINGS,
        left_out=[cause for cause in FAULTS if not FAULTS[cause].needs()],
        faults=len(faults),
        named_first=num_named,
        healthy=len(healthy),
        healthy_with_a_cause=wrong,
        runs=[*faults, *healthy],
    )
    return int(num_named < MIN_NAMED * len(faults) or wrong > 0)


def _faulty(root: Path, cause: str, usual: str) -> dict[str, Any]:
    tag, fault = cause.replace(" ", "-"), FAULTS[cause]
    train(root, tag, fault, urgent=URGENT)
    if fault.baseline:
        usual = f"{tag}-usual"
        train(root, usual, urgent=URGENT, settings=fault.baseline)
    row = _row(root, tag, usual, cause)
    row["named_first"] = row["against_run"]["causes"][:1] == [cause]
    row["named_first_alone"] = row["against_itself"]["causes"][:1] == [cause]
    return row


def _row(root: Path, tag: str, usual: str, fault: str | None) -> dict[str, Any]:
    faulty, alone = explain_tagged_run(root, tag, usual), explain_tagged_run(root, tag, None)
    row = {"fault": fault, "against_run": _as_json(faulty), "against_itself": _as_json(alone)}
    causes = ", ".join(f"{c.cause} {c.share:.0%}" for c in faulty.causes) or "nothing"
    print(
        f"{fault or 'healthy':18} {faulty.step_s:.3f} s, lost {faulty.lost_s:.3f}: {causes}",
        flush=True,
    )
    return row


def _as_json(answer: Explanation) -> dict[str, Any]:
    return {
        "step_s": answer.step_s,
        "baseline_s": answer.baseline_s,
        "n": answer.n,
        "lost_s": answer.lost_s,
        "causes": [cause.cause for cause in answer.causes],
        "shares": [cause.share for cause in answer.causes],
        "unexplained_s": answer.unexplained_s,
        "parts_s": answer.parts_s,
    }


if __name__ == "__main__":
    sys.exit(main())
