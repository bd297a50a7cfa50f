"""Peak rates of this CPU: GEMMs by dtype, memory, gloo's exchanges, each alone.

    python benchmarks/cpu_limits.py [--repeats 15]

The figures that bound every training on a CPU; docs/dev/evidence/system.md says which bounds which.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from _result import Surroundings, keep, spread_of
from _worlds import start

from paceline.machines.probe.inventory import usable_cores


def main() -> int:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    question = {"repeats": parser.parse_args().repeats, "threads": usable_cores()}
    around, rows = Surroundings(), list[dict[str, object]]()
    print("| processes | what | median | min-max | n |\n|---:|---|---:|---:|---:|")
    for ranks in (1, 2, 4):
        with tempfile.TemporaryDirectory() as folder:
            answers = start("_limit_ranks.py", ranks, question, Path(folder))
        for name, values in answers[0].items():
            spread = spread_of(values)
            rows.append({"processes": ranks, "what": name, **spread})
            print(
                f"| {ranks} | {name} | {spread['median']:.3g} "
                f"| {spread['min']:.3g}-{spread['max']:.3g} | {spread['n']} |",
                flush=True,
            )
    keep("cpu_limits", "as each row says", around, threads=question["threads"], rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
