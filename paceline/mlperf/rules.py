"""What the rules of MLPerf Training (closed division) fix for each benchmark that is known here.

Source: mlcommons/training_policies, training_rules.adoc; mlcommons/logging 4.1, the rule files of
compliance_checker and the numbers of runs in rcp_checker.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.core.errors import EXIT_GATE_FAILED, UserError, did_you_mean
from paceline.engines.log_reading.mllog import MlRecord

UNOFFICIAL = "unofficial, not verified by MLCommons Association"
NOT_A_METRIC = "model FLOP/s are not an official MLPerf metric"
DEFAULT_RULESET = "5.1.0"
RULESET_ORIGINS = {
    "option": "as asked for",
    "logs": "as the logs state",
    "path": "the round in the path",
    "benchmark": "the latest round with the benchmark",
    "default": "the default",
}
"""Where a ruleset comes from, in words."""
_UNKNOWN_ROUND = "whose references are not known"
MOST_INITIALISATION_MINUTES = 30.0
"""In the closed division; what exceeds it has to be timed."""

RulesetOrigin = Literal["option", "logs", "path", "benchmark", "default"]

# A system's name may end in a number of its own: `box_n1_v5.0`.
_ROUND = re.compile(
    r"(?:(?:[a-z]{1,20}[_-]){0,4}(?:training|results|round|mlperf|submissions?)[_-])?"
    r"v(\d{1,2})\.(\d{1,2})",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Benchmark:
    """One benchmark: how often it is run, which quality ends a run, and our recipe of its model."""

    name: str
    num_runs: int
    target: float
    """The evaluation result that counts as converged: the largest loss, or the least accuracy."""
    recipe: str = ""
    """Ours of its model; empty for one that is scored here and not run."""
    variant: str | None = None
    sibling_of: str | None = None
    """The benchmark whose structure it has in small; it is none itself."""
    more_is_better: bool = False
    """Whether its evaluations are accuracies, not losses."""
    allowed_samples: int = 0
    """By which the convergence test lets a submission's mean be less than chance explains."""
    trains_on: str = ""
    """The data that `paceline mlperf run` needs, and the options that name it."""

    def reached_by(self, result: float) -> bool:
        """Whether an evaluation with this result ends a run."""
        return result >= self.target if self.more_is_better else 0 < result <= self.target

    def best(self, results: Iterable[float]) -> float:
        """The evaluation result that is nearest to the target or farthest beyond it."""
        return max(results) if self.more_is_better else min(results)

    @property
    def option(self) -> str:
        """The name on the command line: with hyphens."""
        return self.name.replace("_", "-")

    @property
    def label(self) -> str:
        """What is said of everything that its runs yield."""
        if self.sibling_of is None:
            return UNOFFICIAL
        return f"{NOT_A_RESULT}: a small sibling of {self.sibling_of}"


TRIAL_VARIANT = "mlperf-trial"
"""Of a recipe: what is trained to the target, and logged."""

BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark(
            "llama2_70b_lora",
            10,
            0.925,
            "llama2-70b-lora",
            trains_on="the packed GovReport sequences as token ids, with `--set "
            "training.initial_weights=CHECKPOINT` for the base weights and `--set "
            "training.evaluation.loss_mask=FILE` for the summaries",
        ),
        Benchmark(
            "llama31_8b",
            10,
            3.3,
            "llama31-8b",
            "mlperf",
            trains_on="the C4 subset of the rules as ids of Llama 3.1's tokenizer (`--set "
            "data.token_dtype=uint32`)",
        ),
        Benchmark(
            "flux1",
            10,
            0.586,
            "flux1-schnell",
            trains_on="CC12M as encoded latents, texts and pooled texts: shards as `paceline stage "
            "flux1-schnell --asset energon` makes them, or an index in JSON and bf16 files",
        ),
    )
}
SCORED_ONLY = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("gpt_oss_20b", 10, 3.34),
        Benchmark("deepseekv3_671b", 3, 3.6),
        Benchmark("llama31_405b", 3, 5.6, allowed_samples=46_080),
        Benchmark("dlrmv4", 10, 0.75, more_is_better=True),
        Benchmark("qwen35_397b_grpo", 3, 0.69, more_is_better=True),
    )
}
"""Benchmarks whose logs are scored and that are not run; recipes of three are estimated."""
SIBLINGS = {
    small.name: small
    for small in (
        Benchmark(
            "llama2_70b_lora_tiny",
            10,
            2.6,
            "llama2-70b-lora-tiny",
            TRIAL_VARIANT,
            sibling_of="llama2_70b_lora",
        ),
        Benchmark(
            "llama31_8b_tiny", 10, 2.55, "llama31-8b-tiny", TRIAL_VARIANT, sibling_of="llama31_8b"
        ),
        Benchmark("flux1_tiny", 10, 0.7, "flux1-schnell-tiny", TRIAL_VARIANT, sibling_of="flux1"),
    )
}
"""Small trainings to a quality of their own, made for machines without accelerators."""


def benchmark_named(name: str, where: str) -> Benchmark:
    """The benchmark called `name`; raises UserError that speaks of `where` for an unknown one."""
    benchmarks = BENCHMARKS | SCORED_ONLY | SIBLINGS
    if name not in benchmarks:
        raise UserError(
            where,
            f"benchmark {name!r} is not known here",
            allowed=", ".join((*BENCHMARKS, *SCORED_ONLY)),
            remedy=did_you_mean(name, benchmarks) or None,
        )
    return benchmarks[name]


@dataclass(frozen=True)
class Ruleset:
    """The rules of a round, and why it is this one."""

    name: str
    origin: RulesetOrigin
    warnings: tuple[str, ...] = ()


def settled_ruleset(
    place: Path, stated: Iterable[str], known: Sequence[str], having: Sequence[str]
) -> Ruleset:
    """The ruleset that the logs state, else that of the round in the path, else the default.

    `known` are those that there are, oldest first, `having` those of them with the benchmark:
    another one is passed over with a warning.
    """
    in_path, in_logs = round_in(place), sorted(set(stated))
    proposals: list[tuple[RulesetOrigin, str, str]] = []
    if len(in_logs) == 1:
        proposals.append(("logs", in_logs[0], f"the logs state ruleset {in_logs[0]}"))
    if in_path:
        proposals.append(("path", in_path[1], f"the path speaks of {in_path[0]}"))
    possible = having or known
    usable: list[tuple[RulesetOrigin, str]] = [
        (origin, name) for origin, name, _ in proposals if name in possible
    ]
    if not usable:
        usable = (
            [("default", DEFAULT_RULESET)]
            if DEFAULT_RULESET in possible
            else [("benchmark", possible[-1])]
        )
    origin, name = usable[0]
    warnings = [
        f"{words}, {'which does not have the benchmark' if told in known else _UNKNOWN_ROUND}: "
        f"{name} is used"
        for _, told, words in proposals
        if told not in possible
    ]
    if len(in_logs) > 1:
        warnings.append(f"the logs state different rulesets ({', '.join(in_logs)}): {name} is used")
    if len(usable) > 1 and usable[1][1] != name:
        warnings.append(f"{proposals[1][2]}, the logs state ruleset {name}, which is used")
    return Ruleset(name, origin, tuple(warnings))


def round_in(place: Path) -> tuple[str, str] | None:
    """The innermost folder named after a round (`v5.1`, `training_results_v5.1`), its ruleset."""
    for part in reversed(place.resolve().parts):
        if match := _ROUND.fullmatch(part):
            return part, f"{match[1]}.{match[2]}.0"
    return None


NOT_A_RESULT = "not an MLPerf result"
"""What our own small runs say of themselves in their logs."""
MADE_UP_DATA = ("synthetic", "stdlib")
DATA_SOURCE = "data_source"
_TINY = re.compile(r"(?:(?<![a-z])|(?<=\dx))tiny(?![a-z])", re.IGNORECASE)
_NAMES = ("submission_benchmark", "submission_platform", "submission_org")


class RefusedError(UserError):
    """The rules, not the command, stand against it (exit code 3)."""

    exit_code = EXIT_GATE_FAILED


def not_a_result(lines: Iterable[MlRecord | None]) -> str | None:
    """Why the run of these lines is no MLPerf result, None when nothing speaks against it."""
    for line in lines:
        if line is None:
            continue
        value = str(line.value)
        if NOT_A_RESULT in value:
            return f"it says of itself that it is {NOT_A_RESULT}"
        if line.key == DATA_SOURCE and value in MADE_UP_DATA:
            return f"it trained on {value} data, not on the benchmark's"
        if line.key in _NAMES and is_tiny(value):
            return f"its {line.key} is {value[:60]!r}: a small sibling of the benchmark"
    return None


def is_tiny(name: str | None) -> bool:
    """Whether a system's name says that it ran a small sibling."""
    return bool(name and _TINY.search(name))
