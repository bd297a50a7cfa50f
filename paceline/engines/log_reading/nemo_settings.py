"""Settings and end of a run, as both NeMo 1 and NeMo 2 log them."""

from __future__ import annotations

import re

from paceline.engines.log_reading.log_content import LogContent
from paceline.engines.log_reading.records import product, store_whole_numbers

ENDS = b"`Trainer.fit` stopped:"

_RANKS = re.compile(rb"MEMBER: \d{1,9}/(\d{1,9})")
_RELEASE = re.compile(rb"NVIDIA Release (\d\d\.\d\d)")
_MAX_STEPS = re.compile(r"max_steps=(\d{1,12})`? reached")
_SETTING = re.compile(rb"(?:^|[ \t:])([a-z_0-9]{3,40}): ([\w.-]{1,24})[ \t]*$", re.MULTILINE)

_FACTS = {
    b"MEMBER": "num_devices",
    b"global_batch_size": "global_batch",
    b"micro_batch_size": "micro_batch",
    b"encoder_seq_length": "seq_len",
    b"tensor_model_parallel_size": "tp",
    b"pipeline_model_parallel_size": "pp",
    b"context_parallel_size": "cp",
    b"virtual_pipeline_model_parallel_size": "vp",
    b"expert_model_parallel_size": "ep",
    b"num_layers": "num_layers",
    b"hidden_size": "hidden_size",
    b"ffn_hidden_size": "ffn_size",
    b"num_attention_heads": "num_heads",
    b"num_query_groups": "num_kv_heads",
    b"max_steps": "total_steps",
}
_OTHERS = {b"devices", b"num_nodes", b"precision", b"fp8"}
_DTYPES = {b"bf16": "bf16", b"16": "fp16", b"32": "fp32"}


class NemoSettings:
    """Settings printed before the first step as YAML, one `key: value` per line.

    Its sections (data sets) repeat names; the first value of each name wins.
    """

    def __init__(self, step: re.Pattern[bytes]) -> None:
        self._step = step
        """Pattern of a step line, after which there are no settings."""
        self._reading = True
        self._values: dict[bytes, bytes] = {}
        self._release: bytes | None = None

    def read(self, block: bytes) -> None:
        """Read the settings in `block` before the first step."""
        if not self._reading:
            return
        first = self._step.search(block)
        self._reading = first is None
        head = (block[: first.start()] if first else block).replace(b"\r", b"\n")
        for key, value in _SETTING.findall(head):
            if key in _FACTS or key in _OTHERS:
                self._values.setdefault(key, value)
        if match := _RANKS.search(head):
            self._values[b"MEMBER"] = match[1]
        if match := _RELEASE.search(head):
            self._release = match[1]

    def keep(self, log: LogContent) -> None:
        """Store the settings in the log's facts, with those in its last line."""
        store_whole_numbers(log, _FACTS, self._values.items())
        ranks = product(
            *(_whole_number(self._values.get(key)) for key in (b"devices", b"num_nodes"))
        )
        if ranks is not None:
            log.facts.setdefault("num_devices", ranks)
        dtype = _DTYPES.get(self._values.get(b"precision", b"").partition(b"-")[0])
        if self._values.get(b"fp8", b"").lower() == b"true":
            dtype = "fp8"
        if dtype is not None:
            log.facts["dtype"] = dtype
        if self._release is not None:
            log.facts["framework_version"] = self._release.decode()
        if log.end_line and (match := _MAX_STEPS.search(log.end_line)):
            log.facts["total_steps"] = int(match[1])


def _whole_number(text: bytes | None) -> int | None:
    return int(text) if text is not None and text.isdigit() and len(text) < 19 else None
