"""Inputs of all surfaces that others make, changed at random: does any fall, hang or grow?

    python benchmarks/fuzz.py [--inputs 100000] [--seconds 600] [--seed 1] [--surfaces "ssh peers"]
    python benchmarks/fuzz.py --replay "ssh peers" 4711 [--seed 1]

The surfaces and the property are those of tests/attacks. Each surface gets `--inputs` inputs, or
as many as it reads in `--seconds` of wall time. The exit code is 1 when an input had a fault.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from _result import FOLDER, Surroundings, keep

from paceline.core import stats
from tests.attacks.fuzzing import Place, Surface, peak_bytes
from tests.attacks.surfaces import SURFACES

HANG_S = 600
"""Limit of one input in seconds of wall time, which other load extends."""
ENVIRONMENT = {"PATH", "HOME", "LANG", "TZ"}
"""Environment variables that the readers see."""
BY_NAME = {surface.name: surface for surface in SURFACES}


def campaign(surface: Surface, options: argparse.Namespace, place: Place) -> dict[str, Any]:
    """Try the inputs of a surface; return counts, faults, and seconds.

    `first` is the number of the first input with a fault, which --replay brings again.
    """
    faults: Counter[str] = Counter()
    first: dict[str, int] = {}
    answers = place.num_answers
    number, slowest, began, processor = 0, 0.0, time.monotonic(), time.process_time()
    for parts in islice(surface.inputs(options.seed), options.inputs):
        if time.monotonic() - began > options.seconds:
            break
        before = time.process_time()
        signal.alarm(HANG_S)
        if fault := place.fault(surface, parts):
            faults[fault] += 1
            first.setdefault(fault, number)
        signal.alarm(0)
        number, slowest = number + 1, max(slowest, time.process_time() - before)
    return {
        "inputs": number,
        "answers": place.num_answers - answers,
        "faults": dict(faults.most_common()),
        "first": first,
        "wall_s": round(time.monotonic() - began, 1),
        "processor_s": round(time.process_time() - processor, 1),
        "slowest_processor_s": round(slowest, 3),
        "peak_memory_bytes": peak_bytes(),
    }


def _too_long(*_: object) -> None:
    raise TimeoutError(f"takes longer than {HANG_S} s")


def main() -> int:
    """Store what was done; 1 when an input had a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--surfaces", nargs="+", choices=list(BY_NAME), default=list(BY_NAME))
    parser.add_argument("--replay", nargs=2, metavar=("SURFACE", "NUMBER"))
    options = parser.parse_args()
    os.nice(10)
    for name in set(os.environ) - ENVIRONMENT:  # each line that is printed is compared with all
        del os.environ[name]
    around = Surroundings()
    signal.signal(signal.SIGALRM, _too_long)
    stats.BOOTSTRAP_RESAMPLES = 10  # its intervals do not matter here, and take most of the time
    os.fsync = lambda handle: None  # as does waiting for the disk
    memory = Path("/dev/shm")  # disks would take most of the time
    folder = memory if memory.is_dir() else None
    with tempfile.TemporaryDirectory(dir=folder) as name:
        place = Place(Path(name))
        if options.replay:
            return replay(BY_NAME[options.replay[0]], int(options.replay[1]), options.seed, place)
        for name in options.surfaces:
            outcome = campaign(BY_NAME[name], options, place)
            print(
                f"{name}: {outcome['inputs']:,} inputs in {outcome['wall_s']:.0f} s, "
                f"{sum(outcome['faults'].values())} faults",
                flush=True,
            )
            for fault, count in outcome["faults"].items():
                print(f"  {count} x {fault} (first: {outcome['first'][fault]})", flush=True)
            results = {**_stored_surfaces(options.seed), name: outcome}
            surfaces = {name: results[name] for name in BY_NAME if name in results}
            num_faults = sum(sum(each["faults"].values()) for each in surfaces.values())
            keep(
                "fuzz",
                "inputs",
                around,
                seed=options.seed,
                inputs=sum(each["inputs"] for each in surfaces.values()),
                faults=num_faults,
                durations="wall_s and processor_s are of all inputs of a surface in one process",
                surfaces=surfaces,
            )
    return int(num_faults > 0)


def replay(surface: Surface, number: int, seed: int, place: Place) -> int:
    """Bring one input again, with its traceback."""
    place.folder.mkdir()
    surface.read(next(islice(surface.inputs(seed), number, None)), place.folder)
    return 0


def _stored_surfaces(seed: int) -> dict[str, dict[str, Any]]:
    """Return the results of an earlier call with the seed; surfaces may run one by one."""
    try:
        content = json.loads((FOLDER / "fuzz.json").read_text())
    except FileNotFoundError:
        return {}
    return content.get("surfaces", {}) if content["seed"] == seed else {}


if __name__ == "__main__":
    sys.exit(main())
