"""Settings in a DeepSpeed log: launch command, hostfile, configuration dumps."""

from __future__ import annotations

import re

from paceline.engines.log_reading.log_content import Fact, LogContent
from paceline.engines.log_reading.records import product

MAX_HOSTS = 100_000
BATCH_FACTORS = ("micro_batch", "num_devices", "gradient_accumulation")

_ARGUMENT_MARKS = (b"--per_device_train_batch_size", b"--max_", b"model_name_or_path")
_ARGUMENT = re.compile(
    rb"--(per_device_train_batch_size|gradient_accumulation_steps|max_seq_len|max_prompt_seq_len"
    rb"|max_answer_seq_len|(?:actor_)?zero_stage|(?:actor_)?model_name_or_path|dtype)"
    rb"['\"]?(?:, |[ =])['\"]?([^\s'\"]{1,400})"
)
_HOST = re.compile(rb"^([^\s#]{1,255}) slots=(\d{1,6})[ \t\r]*$", re.MULTILINE)
_WORLD = re.compile(rb"dist_world_size=(\d{1,9})")
_VERSION = re.compile(rb"DeepSpeed info: version=([^\s,]{1,40})")
_OPTIMIZER = re.compile(rb"Creating (?:torch\.)?(fp16|float16|bf16|BF16|bfloat16|float32) ")
_DUMPED = re.compile(
    rb'"(train_batch_size|train_micro_batch_size_per_gpu|gradient_accumulation_steps|stage)": '
    rb"([0-9.e+]{1,16})"
)
_PRINTED = re.compile(
    rb"  (train_batch_size|train_micro_batch_size_per_gpu|gradient_accumulation_steps|world_size"
    rb"|zero_optimization_stage|fp16_enabled|bfloat16_enabled) \.{0,29} ?([0-9A-Za-z]{1,16})"
)
_CACHED_MODEL = re.compile(r"models--(.+?)/snapshots/")

NAMES = {
    "per_device_train_batch_size": "micro_batch",
    "train_micro_batch_size_per_gpu": "micro_batch",
    "gradient_accumulation_steps": "gradient_accumulation",
    "max_seq_len": "seq_len",
    "zero_stage": "zero_stage",
    "actor_zero_stage": "zero_stage",
    "zero_optimization_stage": "zero_stage",
    "stage": "zero_stage",
    "train_batch_size": "global_batch",
    "world_size": "num_devices",
}
"""Fact names by the names of whole numbers in DeepSpeed and its chat example."""


class DeepSpeedSettings:
    """Collector of each setting's first value; a reward or critic model's come later."""

    def __init__(self) -> None:
        self.facts: dict[str, Fact] = {}
        self._hosts: dict[bytes, int] = {}
        self._lengths: dict[str, int] = {}

    def read(self, block: bytes) -> None:
        """Read the settings in `block`."""
        if any(mark in block for mark in _ARGUMENT_MARKS):
            self._take_all(_ARGUMENT, block)
        if b"_batch_size" in block or b'"stage": ' in block:
            self._take_all(_DUMPED, block)
        if b":print]" in block:
            self._take_all(_PRINTED, block)
        if b" slots=" in block:
            self._read_hosts(block)
        if b"dist_world_size=" in block and (world := _WORLD.search(block)):
            self._number("num_devices", world[1])
        if b"DeepSpeed info: " in block and (version := _VERSION.search(block)):
            self.facts.setdefault("framework_version", version[1].decode("ascii", "replace"))
        if b"Creating " in block and (kind := _OPTIMIZER.search(block)):
            self.facts.setdefault("dtype", kind[1].decode("ascii").lower())

    def keep(self, log: LogContent) -> None:
        """Store all settings and derived values in the log's facts."""
        if len(self._lengths) == 2:
            self.facts.setdefault("seq_len", sum(self._lengths.values()))
        if self._hosts:
            self.facts.setdefault("num_devices", sum(self._hosts.values()))
        batch = product(*(self.facts.get(name) for name in BATCH_FACTORS))
        if batch is not None:
            self.facts.setdefault("global_batch", batch)
        log.facts.update(self.facts)

    def _take_all(self, pattern: re.Pattern[bytes], block: bytes) -> None:
        for name, value in pattern.findall(block):
            self._take(name.decode("ascii"), value)

    def _take(self, name: str, value: bytes) -> None:
        if name in ("max_prompt_seq_len", "max_answer_seq_len") and value.isdigit():
            self._lengths.setdefault(name, int(value[:12]))
        elif name.endswith("model_name_or_path"):
            self.facts.setdefault("model", model_name(value.decode("utf-8", "replace")))
        elif name == "dtype":
            self.facts.setdefault("dtype", value.decode("utf-8", "replace")[:16])
        elif name in ("fp16_enabled", "bfloat16_enabled"):
            if value == b"True":
                self.facts.setdefault("dtype", name.removesuffix("_enabled"))
        else:
            self._number(NAMES[name], value)

    def _number(self, fact: str, text: bytes) -> None:
        """Store a whole number; DeepSpeed's dumps print 1.024000e+03 from 1000 up."""
        try:
            value = float(text)
        except ValueError:
            return
        minimum = 0 if fact == "zero_stage" else 1
        if value.is_integer() and minimum <= value < 1e12:
            self.facts.setdefault(fact, int(value))

    def _read_hosts(self, block: bytes) -> None:
        for host, slots in _HOST.findall(block):
            if len(self._hosts) < MAX_HOSTS:
                self._hosts[host] = int(slots)


def model_name(path: str) -> str:
    """Return a model's name from a Hugging Face name or a folder in its cache."""
    cached = _CACHED_MODEL.search(path)
    return cached[1].replace("--", "/") if cached else path
