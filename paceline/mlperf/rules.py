"""Rules of MLPerf Training (closed division) for each benchmark supported here.

Source: mlcommons/training_policies, training_rules.adoc; mlcommons/logging 4.1, the rule files of
compliance_checker and the numbers of runs in rcp_checker.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor
from pathlib import Path
from typing import Literal

from paceline.core.errors import EXIT_GATE_FAILED, UserError, unknown_name
from paceline.engines.log_reading.mllog import MlRecord

UNOFFICIAL = "unofficial, not verified by MLCommons Association"
NOT_A_METRIC = "model FLOP/s are not an official MLPerf metric"
DEFAULT_RULESET = "5.1.0"
RULESET_ORIGINS = {
    "option": "from --ruleset",
    "logs": "from the logs",
    "path": "from the path",
    "benchmark": "the latest round with the benchmark",
    "default": "the default",
}
"""Description of each source that a ruleset can come from."""
_NO_REFERENCES = "which has no reference points in Paceline"
MAX_INITIALIZATION_MINUTES = 30.0
"""Maximum untimed initialization in the closed division, in minutes; any excess is timed."""

RulesetOrigin = Literal["option", "logs", "path", "benchmark", "default"]

# A system's name may end in a number of its own: `box_n1_v5.0`.
_ROUND = re.compile(
    r"(?:(?:[a-z]{1,20}[_-]){0,4}(?:training|results|round|mlperf|submissions?)[_-])?"
    r"v(\d{1,2})\.(\d{1,2})",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Benchmark:
    """One benchmark: its number of runs, its target quality, and the recipe of its model."""

    name: str
    num_runs: int
    target: float
    """Evaluation result that counts as converged: the largest loss, or the smallest accuracy."""
    recipe: str = ""
    """Recipe of its model; empty for a benchmark that is scored but not run."""
    variant: str | None = None
    tiny_variant_of: str | None = None
    """Official benchmark that this tiny variant imitates; None for an official benchmark."""
    more_is_better: bool = False
    """True if evaluations are accuracies instead of losses."""
    must_exceed_target: bool = False
    """True if an accuracy equal to the target is not enough."""
    allowed_samples: int = 0
    """Samples by which the convergence test lowers the least mean that it accepts."""
    trains_on: str = ""
    """Data that `paceline mlperf run` needs, and the options that select it."""

    def reached_by(self, result: float) -> bool:
        """Return whether an evaluation with this result ends a run."""
        if not self.more_is_better:
            return 0 < result <= self.target
        return result > self.target or (result == self.target and not self.must_exceed_target)

    def best(self, results: Iterable[float]) -> float:
        """Return the best evaluation result: the largest accuracy or the smallest loss."""
        return max(results) if self.more_is_better else min(results)

    @property
    def option(self) -> str:
        """Name on the command line, with hyphens."""
        return self.name.replace("_", "-")

    @property
    def label(self) -> str:
        """Label of everything that its runs produce."""
        if self.tiny_variant_of is None:
            return UNOFFICIAL
        return f"{NOT_A_RESULT}: tiny variant of {self.tiny_variant_of}"


TRIAL_VARIANT = "mlperf-trial"
"""Recipe variant that trains to the target and writes an MLPerf log."""

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
            trains_on="CC12M as encoded latents, texts and pooled texts: shards as `paceline "
            "recipes stage flux1-schnell --asset energon` makes them, or an index in JSON and bf16 "
            "files",
        ),
        Benchmark(
            "gpt_oss_20b",
            10,
            3.34,
            "gpt-oss-20b",
            trains_on="the C4 subset of llama31_8b (`paceline recipes stage llama31-8b --asset "
            "c4-8b`), with `--set data.token_dtype=uint32`",
        ),
    )
}
SCORED_ONLY = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("deepseekv3_671b", 3, 3.6),
        Benchmark("llama31_405b", 3, 5.6, allowed_samples=46_080),
        Benchmark("dlrmv4", 10, 0.75, more_is_better=True),
        Benchmark("qwen35_397b_grpo", 3, 0.69, more_is_better=True, must_exceed_target=True),
    )
}
"""Benchmarks whose logs are scored but that are not run; three have recipes for estimates."""
TINY_VARIANTS = {
    small.name: small
    for small in (
        Benchmark(
            "llama2_70b_lora_tiny",
            10,
            2.6,
            "llama2-70b-lora-tiny",
            TRIAL_VARIANT,
            tiny_variant_of="llama2_70b_lora",
        ),
        Benchmark(
            "llama31_8b_tiny",
            10,
            2.55,
            "llama31-8b-tiny",
            TRIAL_VARIANT,
            tiny_variant_of="llama31_8b",
        ),
        Benchmark(
            "flux1_tiny", 10, 0.7, "flux1-schnell-tiny", TRIAL_VARIANT, tiny_variant_of="flux1"
        ),
        Benchmark(
            "gpt_oss_20b_tiny",
            10,
            2.75,
            "gpt-oss-20b-tiny",
            TRIAL_VARIANT,
            tiny_variant_of="gpt_oss_20b",
        ),
    )
}
"""Tiny variants with a target quality of their own, for machines without accelerators."""


DLRMV4_TRAIN_SAMPLES = 2_290_835_423


def _first_of_dlrmv4(batch: int) -> int:
    """Return the first multiple of 0.1% of the samples at or after a line in the batch size.

    The line is the earliest convergence of the reference, less two evaluations.
    """
    interval = ceil(0.001 * DLRMV4_TRAIN_SAMPLES / batch) * batch
    return ceil((4480 * batch + 135_331_840) // 3 / interval) * interval


FIRST_EVALUATION_RULESET = "6.1.0"
"""Round that introduced checks of the first evaluation."""
FIRST_EVALUATIONS: Mapping[str, Callable[[int], int]] = {
    "deepseekv3_671b": lambda batch: batch * floor(42 + 24576 / batch),
    "qwen35_397b_grpo": lambda batch: batch * ceil(2.5 + 3840 / batch),
    "dlrmv4": _first_of_dlrmv4,
}
"""Samples of the first evaluation that the closed division requires, by global batch size.

Source: mlcommons/logging 4.1.68, compliance_checker/training_6.1.0.
"""


def first_evaluation(benchmark: str, ruleset: str, global_batch: int | None) -> int | None:
    """Return the samples at which a round requires the first evaluation; None without a rule."""
    if ruleset != FIRST_EVALUATION_RULESET or benchmark not in FIRST_EVALUATIONS:
        return None
    return FIRST_EVALUATIONS[benchmark](global_batch) if global_batch else None


def find_benchmark(name: str, where: str) -> Benchmark:
    """Return the benchmark called `name`.

    Raises UserError for an unknown name; `where` is the location in its message.
    """
    benchmarks = BENCHMARKS | SCORED_ONLY | TINY_VARIANTS
    if name not in benchmarks:
        raise unknown_name(
            where,
            f"benchmark {name!r} is unknown",
            name,
            (*BENCHMARKS, *SCORED_ONLY),
            aliases=benchmarks,
        )
    return benchmarks[name]


@dataclass(frozen=True)
class Ruleset:
    """Rules of a round, and where the choice came from."""

    name: str
    origin: RulesetOrigin
    warnings: tuple[str, ...] = ()


def select_ruleset(
    place: Path, from_logs: Iterable[str], rulesets: Sequence[str], with_benchmark: Sequence[str]
) -> Ruleset:
    """Return the ruleset of the logs, else of the round in the path, else the default.

    `known` lists all rulesets, oldest first. `having` lists those that include the benchmark; any
    other ruleset is skipped with a warning.
    """
    in_path, in_logs = round_in(place), sorted(set(from_logs))
    proposals: list[tuple[RulesetOrigin, str, str]] = []
    if len(in_logs) == 1:
        proposals.append(("logs", in_logs[0], f"the logs report ruleset {in_logs[0]}"))
    if in_path:
        proposals.append(("path", in_path[1], f"the path contains {in_path[0]}"))
    possible = with_benchmark or rulesets
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
        f"{text}, {'which lacks the benchmark' if proposal in rulesets else _NO_REFERENCES}; "
        f"using {name}"
        for _, proposal, text in proposals
        if proposal not in possible
    ]
    if len(in_logs) > 1:
        warnings.append(f"the logs report different rulesets ({', '.join(in_logs)}); using {name}")
    if len(usable) > 1 and usable[1][1] != name:
        warnings.append(f"{proposals[1][2]}, but the logs report ruleset {name}; using {name}")
    return Ruleset(name, origin, tuple(warnings))


def round_in(place: Path) -> tuple[str, str] | None:
    """Return the innermost folder named after a round, and its ruleset.

    Examples of such names are `v5.1` and `training_results_v5.1`.
    """
    for part in reversed(place.resolve().parts):
        if match := _ROUND.fullmatch(part):
            return part, f"{match[1]}.{match[2]}.0"
    return None


NOT_A_RESULT = "not an MLPerf result"
"""Label that Paceline's own small runs write into their logs."""
OTHER_DATA = ("synthetic", "stdlib")
DATA_SOURCE = "data_source"
_TINY = re.compile(r"(?:(?<![a-z])|(?<=\dx))tiny(?![a-z])", re.IGNORECASE)
_NAMES = ("submission_benchmark", "submission_platform", "submission_org")


class RuleViolationError(UserError):
    """Refusal by the MLPerf rules rather than for a wrong command (exit code 3)."""

    exit_code = EXIT_GATE_FAILED


def not_a_result(lines: Iterable[MlRecord | None]) -> str | None:
    """Return why these lines are not an MLPerf result, or None if nothing rules them out."""
    for line in lines:
        if line is None:
            continue
        value = str(line.value)
        if NOT_A_RESULT in value:
            return f"the log is labelled {NOT_A_RESULT!r}"
        if line.key == DATA_SOURCE and value in OTHER_DATA:
            return f"it trained on {value} data, not on the benchmark's data"
        if line.key in _NAMES and is_tiny(value):
            return f"its {line.key} is {value[:60]!r}: a tiny variant of the benchmark"
    return None


def is_tiny(name: str | None) -> bool:
    """Return whether a system's name says that it ran a tiny variant."""
    return bool(name and _TINY.search(name))
