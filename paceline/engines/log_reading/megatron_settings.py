"""Information in Megatron logs other than iterations: arguments, parameters, memory, end."""

from __future__ import annotations

import math
import re

from paceline.core.units import GB, MIB
from paceline.engines.log_reading.iteration_records import last_record
from paceline.engines.log_reading.log_content import LogContent, excerpt, numbers
from paceline.engines.log_reading.records import out_of_memory_line

__all__ = ["MegatronSettings"]

ARGUMENTS: dict[bytes, str] = {
    b"world_size": "num_devices",
    b"global_batch_size": "global_batch",
    b"micro_batch_size": "micro_batch",
    b"seq_length": "seq_len",
    b"tensor_model_parallel_size": "tp",
    b"model_parallel_size": "tp",
    b"pipeline_model_parallel_size": "pp",
    b"context_parallel_size": "cp",
    b"virtual_pipeline_model_parallel_size": "vp",
    b"expert_model_parallel_size": "ep",
    b"zero_stage": "zero_stage",
    b"train_iters": "total_steps",
    b"log_interval": "log_interval",
    b"num_layers": "num_layers",
    b"hidden_size": "hidden_size",
    b"num_attention_heads": "num_heads",
    b"ffn_hidden_size": "ffn_size",
    b"padded_vocab_size": "vocab_size",
}
"""Fact names by the names of arguments with whole numbers."""

OLDER_ARGUMENTS: dict[bytes, str] = {
    b"pipe_parallel_size": "pp",
    b"train_batch_size": "global_batch",
}
"""Names in old Megatron-DeepSpeed and DeepSpeed's configuration; ARGUMENTS take precedence."""

GROWS = b"step_batch_size_schedule"
"""Batch size schedule.

With it, the printed global batch is that of one micro-batch per replica and is ignored.
"""
FLAGS = (
    *(b"params_dtype", b"group_query_attention", b"num_query_groups", b"deepspeed", b"fp8"),
    *(b"num_experts", b"moe_router_force_load_balancing", b"load"),
    GROWS,
)
DTYPES = {
    b"torch.bfloat16": "bf16",
    b"torch.float16": "fp16",
    b"torch.half": "fp16",
    b"torch.float32": "fp32",
}

_DOTTED = re.compile(rb" \.{2,48}+ (\S{1,64}+)")
"""Dotted setting; timers have dots too, but followed by a colon."""

_DEEPSPEED_PRINT = b":print]"
"""Mark of DeepSpeed's configuration, whose `world_size` is the data-parallel size of Megatron."""
_NAME_BEFORE = re.compile(rb"(?<![\w-])\w{1,48}\Z")
LONGEST_NAME = 50

_WORLD = re.compile(rb"using world size: (\d{1,9})([^\r\n]{0,400})")
_WORLD_PARTS = {
    "tp": re.compile(rb"(?<![\w-])tensor-model-parallel size: (\d{1,9})"),
    "pp": re.compile(rb"(?<![\w-])pipeline-model-parallel size: (\d{1,9})"),
    "cp": re.compile(rb"(?<!hierarchical )context-parallel size: (\d{1,9})"),
}
_VOCABULARY = re.compile(
    rb"padded vocab \(size: \d{1,9}\) with \d{1,9} dummy tokens \(new size: (\d{1,9})\)"
)
_MICRO_BATCH = re.compile(rb"train_micro_batch_size_per_gpu[\"' .:]{1,48}(\d{1,9})")

_PARAMETERS = re.compile(
    rb"number of parameters on \(tensor, pipeline\) model parallel rank \((\d{1,6}), (\d{1,6})\):"
    rb" (\d{1,15})"
)
_BILLIONS = re.compile(
    rb"(Total number of parameters|Number of parameters in most loaded shard) in billions: {1,4}"
    rb"([0-9.]{1,16})"
)
_UNIQUE = re.compile(rb"UNIQUE_PARAMS=(\d{1,15})")

_MEMORY_MIB = re.compile(rb" memory \(MB\) \|([^\r\n]{1,400})")
_PEAK_MIB = re.compile(rb"(?<!\w)max (allocated|reserved|resident): ([0-9.]{1,24})")
_PEAK_GB = re.compile(rb"(?<![\w-])mem-max-(allocated|reserved)-gigabytes: ([0-9.]{1,24})")

_ENDED = re.compile(
    rb"\[(?:after training is done|exiting program[^\]\r\n]{0,80})\] datetime[^\r\n]{0,40}"
)


MAX_DIGITS = 15
MAX_RANKS = 1000
HALF_STEP = 0.00501
"""Half of the last digit of the printed billions, plus a margin for rounding."""


class MegatronSettings:
    """Collector of a run's settings from the pieces of its log."""

    def __init__(self, log: LogContent) -> None:
        self._log = log
        self._flags: dict[bytes, bytes] = {}
        self._older: dict[str, int] = {}
        self._parameters: dict[tuple[int, int], int] = {}
        self._billions: dict[bytes, float] = {}

    def read(self, text: bytes) -> None:
        """Read the settings in `text`; fast if it contains only iterations."""
        if b" .." in text:
            self._read_arguments(text)
        if b"using world size: " in text:
            for world in _WORLD.finditer(text):
                self._read_world(world)
        if b" dummy tokens (new size: " in text:
            self._put_last("vocab_size", _VOCABULARY, text)
        if b"train_micro_batch_size_per_gpu" in text:
            self._put_last("micro_batch", _MICRO_BATCH, text)
        if b"UNIQUE_PARAMS=" in text:
            self._put_last("num_parameters", _UNIQUE, text)
        if b"ber of parameters " in text:
            self._read_parameters(text)
        if b" memory (MB) |" in text:
            for line in _MEMORY_MIB.findall(text):
                self._take_peaks(_PEAK_MIB, MIB, line)
        if b"-gigabytes: " in text:
            self._take_peaks(_PEAK_GB, GB, text)
        self._read_end(text)

    def finish(self) -> None:
        """Store the settings that only the whole log can determine."""
        facts, flags = self._log.facts, self._flags
        for name, value in self._older.items():
            facts.setdefault(name, value)
        if "num_heads" in facts and b"group_query_attention" in flags:
            groups = flags.get(b"num_query_groups", b"")
            is_grouped = flags[b"group_query_attention"] == b"True" and _is_count(groups)
            facts["num_kv_heads"] = int(groups) if is_grouped else facts["num_heads"]
        if flags.get(b"fp8", b"None") not in (b"None", b"False"):
            facts["dtype"] = "fp8"
        elif flags.get(b"params_dtype") in DTYPES:
            facts["dtype"] = DTYPES[flags[b"params_dtype"]]
        if flags.get(b"deepspeed") != b"True":
            facts.pop("zero_stage", None)
        if flags.get(GROWS, b"None") != b"None":
            facts.pop("global_batch", None)
        if routing := self._routing():
            facts["routing"] = routing
        if parameters := self._num_parameters():
            facts["num_parameters"] = parameters

    def _put_last(self, name: str, pattern: re.Pattern[bytes], text: bytes) -> None:
        if sizes := pattern.findall(text):
            self._log.facts[name] = int(sizes[-1])

    def _read_arguments(self, text: bytes) -> None:
        for dots in _DOTTED.finditer(text):
            prefix = text[max(0, dots.start() - LONGEST_NAME) : dots.start()]
            before = _NAME_BEFORE.search(prefix)
            name, value = before[0] if before else b"", dots[1]
            if name in FLAGS:
                self._flags[name] = value
            elif name == b"world_size" and _DEEPSPEED_PRINT in prefix and _is_count(value):
                self._older["num_devices"] = max(1, int(value))
            elif name in ARGUMENTS and _is_count(value):
                self._log.facts[ARGUMENTS[name]] = int(value)
            elif name in OLDER_ARGUMENTS and _is_count(value):
                self._older[OLDER_ARGUMENTS[name]] = max(1, int(value))

    def _read_world(self, world: re.Match[bytes]) -> None:
        self._log.facts["num_devices"] = int(world[1])
        for name, pattern in _WORLD_PARTS.items():
            if part := pattern.search(world[2]):
                self._log.facts[name] = int(part[1])

    def _read_parameters(self, text: bytes) -> None:
        for tensor, pipeline, number in _PARAMETERS.findall(text):
            if len(self._parameters) < MAX_RANKS:
                self._parameters[int(tensor), int(pipeline)] = int(number)
        for name, number in _BILLIONS.findall(text):
            self._billions[name] = float(numbers([number])[0])

    def _num_parameters(self) -> int | None:
        """Return the parameters of the whole model, or None.

        Ranks after the first repeat norms and tied embeddings, so the sum over ranks is not used.
        With expert parallelism, a rank's number leaves out the other ranks' experts.
        """
        facts = self._log.facts
        if "num_parameters" in facts:
            return None
        is_whole = facts.get("tp") == facts.get("pp") == 1 == facts.get("ep", 1)
        if list(self._parameters) == [(0, 0)] and is_whole:
            return self._parameters[0, 0]
        total = self._billions.get(b"Total number of parameters", math.nan)
        shard = self._billions.get(b"Number of parameters in most loaded shard", math.nan)
        # The shard has two more digits; without model parallelism it is the whole model.
        billions = shard if abs(total - shard) <= HALF_STEP else total
        return round(billions * 1e9) if 0 < billions < math.inf else None

    def _take_peaks(self, pattern: re.Pattern[bytes], unit_bytes: int, text: bytes) -> None:
        for kind, number in pattern.findall(text):
            self._log.peak(kind.decode(), float(numbers([number])[0]) * unit_bytes)

    def _routing(self) -> str | None:
        """Return how experts are chosen; None without experts, or if a checkpoint was loaded."""
        flags = self._flags
        if not _is_count(flags.get(b"num_experts", b"")):
            return None
        if flags.get(b"moe_router_force_load_balancing") == b"True":
            return "forced"
        return "learned from scratch" if flags.get(b"load") == b"None" else None

    def _read_end(self, text: bytes) -> None:
        """Read how the run ended; later iterations mean that it was restarted."""
        log, last_start = self._log, last_record(text)
        if last_start >= 0:
            text = text[last_start:]
            log.out_of_memory = log.end_line = None
        if b"] datetime" in text and (end_lines := _ENDED.findall(text)):
            log.end_line = excerpt(end_lines[-1])
        if log.out_of_memory is None:
            log.out_of_memory = out_of_memory_line(text)


def _is_count(text: bytes) -> bool:
    return text.isdigit() and len(text) <= MAX_DIGITS
