"""Time of `paceline --help` compared with an empty program with the same command-line library.

    python benchmarks/help_time.py [--pairs 10]

The two run in turn; the contract is a median ratio of at most 2.5.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from paceline.files.documents import write_text

LIMIT = 2.5
HELP = [sys.executable, "-m", "paceline", "--help"]
EMPTY = [sys.executable, "-c", "import typer, rich.console"]


def seconds(command: list[str]) -> float:
    """Wall seconds of one run of `command`."""
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def ratios(pairs: int) -> list[float]:
    """help / empty for each of `pairs` neighbouring runs, after one warm-up of each."""
    seconds(HELP), seconds(EMPTY)
    return [seconds(HELP) / seconds(EMPTY) for _ in range(pairs)]


def main() -> int:
    """Print and store the ratio; 1 when it is beyond the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10)
    times = ratios(parser.parse_args().pairs)
    result = {
        "benchmark": "help_time",
        "limit": LIMIT,
        "ratio": {"median": median(times), "min": min(times), "max": max(times), "n": len(times)},
    }
    write_text(
        Path(__file__).parent / "results" / "help_time.json", json.dumps(result, indent=2) + "\n"
    )
    print(f"--help takes {median(times):.2f} times an empty program (limit {LIMIT})")
    return int(median(times) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
