"""Time of `tune --estimate-only` to rank every layout on 65,536 devices.

    python benchmarks/tune_ranking.py [--repeats 3]

Processor seconds of one thread from the request to the ranked list, with the catalog's files reread
included; the limit is 10 s. The model with experts is Llama 3.1 405B with 128 of them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

from _result import Surroundings, keep, spread_of, spread_text

LIMIT_S = 10.0
DEVICES = 65_536
EXPERTS = ("model.num_experts=128", "model.experts_per_token=8", "model.ffn_size=4096")
CASES = {
    "llama31-70b": (),
    "llama31-405b": (),
    "llama31-405b, 128 experts": EXPERTS,
}
PROGRAM = """
import json, resource, sys, time
from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.request import EstimateRequest
from paceline.layouts.search.space import SearchSpace
from paceline.layouts.tune.ranking import rank_layouts

recipe, devices, *overrides = sys.argv[1:]
begin = time.process_time()
answer = rank_layouts(
    EstimateRequest(recipe, "H100", int(devices), overrides=tuple(overrides)),
    shipped_evidence(), SearchSpace(), 50,
)
print(json.dumps({
    "processor_s": time.process_time() - begin,
    "estimated": answer.n_layouts,
    "infeasible": answer.n_infeasible,
    "fastest": answer.layouts[0].label,
}))
"""


def rank_layouts(name: str) -> dict[str, Any]:
    """One ranking in a process of its own."""
    command = [sys.executable, "-c", PROGRAM, name.partition(",")[0], str(DEVICES), *CASES[name]]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(result.stdout)


def main() -> int:
    """Print and store the processor seconds; 1 when a median is beyond the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats, around = parser.parse_args().repeats, Surroundings()
    rows: dict[str, Any] = {}
    for name in CASES:
        answers = [rank_layouts(name) for _ in range(repeats)]
        seconds = spread_of([answer.pop("processor_s") for answer in answers])
        rows[name] = {**answers[0], "processor_s": seconds}
        print(f"{name}: {spread_text(seconds, 2)} s, {answers[0]['estimated']:,} layouts estimated")
    keep("tune_ranking", "processor seconds", around, limit=LIMIT_S, devices=DEVICES, rows=rows)
    return int(any(row["processor_s"]["median"] > LIMIT_S for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
