"""Settings in a Hugging Face Trainer's log.

They come from its own block, its arguments, and DeepSpeed's printed configuration.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from paceline.core.units import pluralize
from paceline.engines.log_reading.log_content import LogContent, numbers
from paceline.engines.log_reading.records import Records, field, store_whole_numbers

RUNNING = b"***** Running training *****"
_NUMBERING = re.compile(
    rb"(?=\*{5} Running training \*{5}|logging_steps|max_steps|Total optimization steps)"
)
"""Statements that change the numbering of what follows."""
LONGEST_RECORD = 8000

_MARKS = (
    b"batch",
    b"_steps",
    b"ation steps",
    b"world_size .",
    b"_stage .",
    b"16=True",
    b"TrainOutput(",
)
"""Strings of which each statement contains one, so the surrounding text does not matter."""

_SETTING = re.compile(
    rb"(?<![\w-])(Instantaneous batch size per device|Total train batch size|Total batch size"
    rb"|Gradient [Aa]ccumulation steps|Total optimization steps|logging_steps|max_steps"
    rb"|per_device_train_batch_size|gradient_accumulation_steps|train_micro_batch_size_per_gpu"
    rb"|(?:train_batch_size|world_size|zero_optimization_stage)(?= \.))"
    rb"(?: \([^){}\r\n]{1,80}\))?(?: = |=|[\"']: | {1,3}\.{0,40} {0,3})"
    rb"([0-9][0-9,]{0,30})(?![0-9.])"
)
_DTYPE = re.compile(rb"(?<![\w-])(bf16|fp16)=True")
_FINISHED = re.compile(rb"TrainOutput\(global_step=(\d{1,15}),")

_FACTS = {
    b"Instantaneous batch size per device": "micro_batch",
    b"per_device_train_batch_size": "micro_batch",
    b"train_micro_batch_size_per_gpu": "micro_batch",
    b"Total train batch size": "global_batch",
    b"Total batch size": "global_batch",
    b"train_batch_size": "global_batch",
    b"Gradient Accumulation steps": "gradient_accumulation",
    b"Gradient accumulation steps": "gradient_accumulation",
    b"gradient_accumulation_steps": "gradient_accumulation",
    b"Total optimization steps": "total_steps",
    b"max_steps": "total_steps",
    b"logging_steps": "log_interval",
    b"world_size": "num_devices",
    b"zero_optimization_stage": "zero_stage",
}


def pieces(text: bytes) -> list[bytes]:
    """Return `text` split before each statement that changes the numbering of what follows.

    A step's own dictionary may repeat such a statement; it stays whole.
    """
    if not (RUNNING in text or b"_steps" in text or b"ation steps" in text):
        return [text]
    places = (match.start() for match in _NUMBERING.finditer(text))
    starts = [at for at in places if not _is_within_record(text, at)]
    return [text[start:end] for start, end in pairwise([0, *starts, len(text)])]


def _is_within_record(text: bytes, at: int) -> bool:
    """Return whether a place is in a dictionary with a loss."""
    begin = text.rfind(b"{", max(0, at - LONGEST_RECORD), at)
    record = text[begin + 1 : text.find(b"}", at, at + LONGEST_RECORD)] if begin >= 0 else b""
    return b"loss" in record and b"{" not in record and b"}" not in record


def read_settings(text: bytes, log: LogContent) -> None:
    """Store the settings in `text` as facts; the last of several attempts in one log wins."""
    if not any(mark in text for mark in _MARKS):
        return
    store_whole_numbers(log, _FACTS, _SETTING.findall(text))
    for dtype in _DTYPE.findall(text):
        log.facts["dtype"] = dtype.decode()
    for steps in _FINISHED.findall(text):
        log.figures["timed_steps"] = float(steps)


def complete_settings(log: LogContent) -> None:
    """Add the number of devices, if known: total / (batch per device x accumulation)."""
    total, part = log.facts.get("global_batch"), log.facts.get("micro_batch")
    accumulation = log.facts.get("gradient_accumulation")
    if isinstance(total, int) and isinstance(part, int) and isinstance(accumulation, int):
        devices, remainder = divmod(total, part * accumulation)
        if devices and not remainder:
            log.facts.setdefault("num_devices", devices)


SAME_RUN_TOLERANCE = 0.05
"""Maximum relative difference between the times of one run's ranks; else there are several runs."""

TOKENS_TOLERANCE = 0.01
"""Maximum relative difference at which tokens / seconds agrees with the printed tokens/s."""

MIN_DIGITS = 3
"""Minimum number of significant digits of a printed rate that gives a step time."""

LARGEST_RUN_S = 1e9
_EVALUATION = field(rb"'eval_runtime': '?")
_FIELDS = {
    "run_time_s": field(rb"'train_runtime': '?"),
    "samples_per_s": field(rb"'train_samples_per_second': '?"),
    "steps_per_s": field(rb"'train_steps_per_second': '?"),
    "tokens_per_s": field(rb"'train_tokens_per_second': '?"),
    "tokens": field(rb"'num_input_tokens_seen': '?"),
}


@dataclass(frozen=True)
class TrainSummary:
    """Figures of one rank, by the names of FIGURE_NAMES and `tokens`."""

    values: dict[str, float]
    texts: dict[str, bytes]

    @property
    def run_time_s(self) -> float:
        """Seconds from the first batch to the end, evaluations and checkpoints included."""
        return self.values["run_time_s"]


class TrainSummaries:
    """Summaries of one run; the longest is used, since a run lasts as long as its slowest rank."""

    def __init__(self) -> None:
        self._longest: TrainSummary | None = None
        self._shortest_s = self._evaluation_s = 0.0
        self._num_evaluations = self._count = 0

    def begin(self) -> None:
        """Discard earlier summaries because another run starts."""
        self._longest, self._count = None, 0
        self._evaluation_s, self._num_evaluations = 0.0, 0

    def add_evaluation(self, record: bytes) -> None:
        """Add the dictionary of an evaluation, which `train_runtime` includes if it comes later."""
        printed = Records([record]).texts(_EVALUATION)
        seconds = numbers(printed).item() if printed else 0.0
        if self._longest is None and 0 < seconds < LARGEST_RUN_S:
            self._evaluation_s += seconds
            self._num_evaluations += 1

    def add(self, record: bytes) -> None:
        """Add the dictionary of one rank."""
        fields = Records([record])
        texts = {name: printed[0] for name, f in _FIELDS.items() if (printed := fields.texts(f))}
        values = {name: numbers([text]).item() for name, text in texts.items()}
        sound = {name: value for name, value in values.items() if 0 < value < 1e18}
        if "run_time_s" not in sound:
            return
        summary = TrainSummary(sound, texts)
        longest = self._longest
        if longest is not None and not self._is_of_the_run(summary, longest):
            self.begin()
        self._count += 1
        if self._longest is None:
            self._longest, self._shortest_s = summary, summary.run_time_s
        elif summary.run_time_s > self._longest.run_time_s:
            self._longest = summary
        self._shortest_s = min(self._shortest_s, summary.run_time_s)

    def keep(self, log: LogContent) -> None:
        """Store the run's figures in the log."""
        if self._longest is None:
            return
        values, texts = self._longest.values, self._longest.texts
        for name in ("run_time_s", "samples_per_s"):
            if name in values:
                log.figures[name] = values[name]
        if "steps_per_s" in values:
            self._keep_steps(log, values["steps_per_s"], texts["steps_per_s"])
        if "tokens_per_s" in values:
            _keep_tokens(log, values)
        if self._count == 1 and 0 < self._evaluation_s < values["run_time_s"]:
            self._subtract_evaluations(log, values["run_time_s"])
        if self._count > 1:
            log.remark(
                f"{self._count:,} ranks print the run's figures, with run times of "
                f"{self._shortest_s:.7g} to {self._longest.run_time_s:.7g} s; the longest is used"
            )

    def _subtract_evaluations(self, log: LogContent, run_time_s: float) -> None:
        """Correct the printed rates, which divide by a run time that includes evaluations."""
        factor = run_time_s / (run_time_s - self._evaluation_s)
        for name in ("samples_per_s", "steps_per_s", "tokens_per_s"):
            if name in log.figures:
                log.figures[name] *= factor
        log.figures["evaluation_s"] = self._evaluation_s
        log.remark(
            f"train_runtime {run_time_s:g} s includes {self._evaluation_s:g} s of "
            f"{pluralize(self._num_evaluations, 'evaluation')} (eval_runtime); the rates are "
            f"those of training alone, {factor:.3g} times the printed ones"
        )

    def _is_of_the_run(self, summary: TrainSummary, longest: TrainSummary) -> bool:
        return (
            abs(summary.run_time_s - longest.run_time_s) <= SAME_RUN_TOLERANCE * longest.run_time_s
        )

    def _keep_steps(self, log: LogContent, value: float, text: bytes) -> None:
        digits = len(text.partition(b"e")[0].replace(b".", b"").lstrip(b"0"))
        if digits >= MIN_DIGITS:
            log.figures["steps_per_s"] = value
        else:
            log.remark(
                f"train_steps_per_second {value:g} is ignored: it has {digits} significant digit"
                f"{'' if digits == 1 else 's'}"
            )


def _keep_tokens(log: LogContent, values: dict[str, float]) -> None:
    """Store tokens/s only if it certainly covers all devices.

    Some versions count the tokens of one process. Then `num_input_tokens_seen`, which covers all
    processes, is a multiple of it.
    """
    value = values["tokens_per_s"]
    if "tokens" in values:
        is_of_all = abs(values["tokens"] / values["run_time_s"] / value - 1) <= TOKENS_TOLERANCE
    else:
        is_of_all = log.facts.get("num_devices") == 1
    if is_of_all:
        log.figures["tokens_per_s"] = value
    else:
        log.remark(
            f"train_tokens_per_second {value:g} is ignored: it may count only the tokens of one "
            "process"
        )
