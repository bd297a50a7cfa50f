"""Log format of MaxText: one `completed step` line per step, printed by the first process.

It is not a table, because a configuration after steps starts an attempt, masks follow from targets
compared with positions, and axes are products of sizes within and across slices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator

import numpy as np

from paceline.core.layout import MODEL_AXES
from paceline.core.steps import FloatColumn
from paceline.core.units import GIB, TERA
from paceline.engines.log_reading.log_content import (
    LogContent,
    LogFormat,
    excerpt,
    numbers,
    whole_numbers,
)
from paceline.engines.log_reading.records import (
    NUMBER,
    note_decimals,
    product,
    store_whole_numbers,
    watch_end,
)

MIN_UNMASKED = 0.9
"""Share of targets in positions below which more than padding is excluded from the loss."""

_STEP = re.compile(
    rb"completed step: (\d{1,18}), seconds: "
    + NUMBER
    + rb"(?:, TFLOP/s(?:/device)?: "
    + NUMBER
    + rb")?"
    + rb"(?:, Tokens/s/device: "
    + NUMBER
    + rb")?"
    + rb"(?:, total_weights: "
    + NUMBER
    + rb")?"
    + rb"(?:(?:, [^,\r\n]{1,60}){0,4}?, loss: "
    + NUMBER
    + rb")?"
)
_INCOMPLETE = re.compile(rb"completed step: (?!\d{1,18}, seconds: [0-9.]{1,24},)")


def read(blocks: Iterable[bytes], log: LogContent) -> None:
    """Read steps, numbered from 0.

    `TFLOP/s` is per device. `total_weights` is the number of targets of the loss; without masks
    these are the step's text tokens. `Tokens/s/device` covers all positions. While the batch ramps
    up, the line has no rates.
    """
    settings = _Settings()
    attempt_start = 0
    for block in _attempts(watch_end(blocks, log, incomplete=_INCOMPLETE)):
        if len(log) > attempt_start and b"Config param " in block:
            settings.keep(log)
            log.begin_attempt()
            settings, attempt_start = _Settings(), len(log)
        settings.read(block)
        matches = _STEP.findall(block)
        if not matches:
            continue
        index, seconds, tflops, tokens_per_s, tokens, loss = zip(*matches, strict=True)
        log.add_steps(
            whole_numbers(index),
            step_time_s=numbers(seconds),
            flops_per_s_per_device=numbers(tflops) * TERA,
            tokens_per_s_per_device=numbers(tokens_per_s),
            tokens=numbers(tokens),
            loss=numbers(loss),
        )
        settings.count_targets(numbers(tokens), numbers(tokens_per_s), numbers(seconds))
        note_decimals(log, seconds)
    settings.keep(log)


def _attempts(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the blocks, split where a configuration follows steps: a new attempt starts there."""
    for block in blocks:
        begin = 0
        while (step := block.find(b"completed step: ", begin)) >= 0:
            config = block.find(b"Config param ", step)
            if config < 0:
                break
            line = block.rfind(b"\n", begin, config) + 1
            yield block[begin:line]
            begin = line
        yield block[begin:]


_SETTING = re.compile(rb"Config param (\w{1,64}): ([^\r\n]{1,100})")
_DEVICES = re.compile(rb"Num_devices: (\d{1,9})")
_PARAMETERS = re.compile(rb"number parameters: ([0-9.]{1,16}) billion")
_DEVICE = re.compile(rb"TFRT (TPU [^\r\n]{1,40})")
_JAX = re.compile(rb"Jax Version: ([\w.+-]{1,60})")
_PLANNED = re.compile(rb"Total memory size: ([0-9.]{1,16}) GB")
_IN_USE = re.compile(rb"Using \(GB\) ([0-9.]{1,16}) / ")

_FACTS = {
    b"Num_devices": "num_devices",
    b"global_batch_size_to_train_on": "global_batch",
    b"gradient_accumulation_steps": "gradient_accumulation",
    b"max_target_length": "seq_len",
    b"steps": "total_steps",
    b"num_decoder_layers": "num_layers",
    b"emb_dim": "hidden_size",
    b"mlp_dim": "ffn_size",
    b"num_query_heads": "num_heads",
    b"num_kv_heads": "num_kv_heads",
    b"vocab_size": "vocab_size",
}
_MASKING = (b"use_sft", b"use_dpo", b"use_grpo")
_AXES = {
    "tp": (b"tensor", b"tensor_transpose", b"tensor_sequence"),
    "pp": (b"pipeline",),
    "cp": (b"context",),
    "ep": (b"expert",),
}


class _Settings:
    """Settings that MaxText prints, one parameter per line, and those that it detects."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._planned_gib = self._in_use_gib = 0.0
        self._targets = self._positions_per_device = 0.0

    def read(self, block: bytes) -> None:
        """Read the settings in `block`; a restart repeats them."""
        if b"Config param " in block:
            self._values.update(_SETTING.findall(block))
        for mark, pattern in _MARKED.items():
            if mark in block and (matches := pattern.findall(block)):
                self._values[mark] = matches[-1]
        if b"memory size: " in block:
            self._planned_gib = max(self._planned_gib, _largest(_PLANNED.findall(block)))
        if b"Using (GB) " in block:
            self._in_use_gib = max(self._in_use_gib, _largest(_IN_USE.findall(block)))

    def count_targets(
        self, targets: FloatColumn, positions_per_s: FloatColumn, times_s: FloatColumn
    ) -> None:
        """Add targets and positions per device for steps that print both."""
        sound = np.isfinite(targets) & np.isfinite(positions_per_s) & np.isfinite(times_s)
        self._targets += float(targets[sound].sum())
        self._positions_per_device += float(positions_per_s[sound] @ times_s[sound])

    def keep(self, log: LogContent) -> None:
        """Store the settings in the log."""
        values = self._values
        store_whole_numbers(log, _FACTS, values.items())
        for name, axes in _AXES.items():
            size = self._axis(axes)
            if size is not None:
                log.facts[name] = size
        if values.get(b"num_experts", b"1") != b"1":
            log.facts.pop("ffn_size", None)
        billions = _largest([values.get(b"number parameters", b"")])
        if billions:
            log.facts["num_parameters"] = round(billions * 1e9)
        if b"Jax Version" in values:
            log.facts["framework_version"] = f"JAX {values[b'Jax Version'].decode()}"
        for name, key in (("device", b"TFRT"), ("model", b"model_name")):
            if values.get(key, b"default").strip() not in (b"", b"default"):
                log.facts[name] = excerpt(values[key])
        self._keep_batch_and_dtype(log)
        self._keep_masks(log)
        self._keep_memory(log)

    def _keep_batch_and_dtype(self, log: LogContent) -> None:
        sharded = product(*(log.facts.get(name, 1) for name in MODEL_AXES))
        if sharded == 1:
            batch = self._values.get(b"per_device_batch_size", b"").removesuffix(b".0")
            store_whole_numbers(log, {b"n": "micro_batch"}, [(b"n", batch)])
        quantization = self._values.get(b"quantization", b"").lower()
        if b"fp8" in quantization:
            log.facts["dtype"] = "mxfp8" if b"mxfp8" in quantization else "fp8"
        elif b"dtype" in self._values and not quantization.strip():
            log.facts["dtype"] = excerpt(self._values[b"dtype"])

    def _keep_masks(self, log: LogContent) -> None:
        """Store whether targets are masked: as configured, or if over 10% are not counted."""
        positions = self._positions_per_device * int(log.facts.get("num_devices", 0))
        share = self._targets / positions if positions else 1.0
        is_configured = any(self._values.get(name, b"").strip() == b"True" for name in _MASKING)
        if is_configured or share < MIN_UNMASKED:
            log.facts["loss_on"] = "text"
            share_text = f" ({share:.1%} of the positions)" if positions else ""
            log.remark(
                f"total_weights counts only unmasked targets{share_text}: tokens/s counts these, "
                "samples/s and days count all positions"
            )

    def _keep_memory(self, log: LogContent) -> None:
        """Store memory (GB means GiB); XLA's plan takes precedence over use before training."""
        if self._planned_gib:
            log.peak("allocated", self._planned_gib * GIB)
            log.remark("memory is XLA's plan for the compiled step, not a measurement")
        elif self._in_use_gib:
            log.peak("allocated", self._in_use_gib * GIB)
            log.remark("memory is the use before the first step: the log prints no peak")

    def _axis(self, names: tuple[bytes, ...]) -> int | None:
        """Return the size of a mesh axis within and across slices; None if MaxText chooses it."""
        keys = [b"%s_%s_parallelism" % (mesh, name) for mesh in (b"ici", b"dcn") for name in names]
        sizes = [self._values[key].strip() for key in keys if key in self._values]
        if not sizes or not all(text.isdigit() and len(text) < 8 for text in sizes):
            return None
        size = product(*map(int, sizes))
        return size if size is not None and size < 1 << 31 else None


_MARKED = {
    b"Num_devices": _DEVICES,
    b"number parameters": _PARAMETERS,
    b"TFRT": _DEVICE,
    b"Jax Version": _JAX,
}


def _largest(texts: list[bytes]) -> float:
    """Return the largest of the numbers in `texts`, 0.0 without any."""
    values = numbers(texts)
    return max((value for value in values.tolist() if math.isfinite(value)), default=0.0)


LOG_FORMAT = LogFormat(
    title="MaxText",
    marks=(b"completed step: ",),
    step_line=re.compile(rb"completed step: \d+, seconds: [0-9.]"),
    read=read,
    example="`completed step: 15107, seconds: 2.167, TFLOP/s: 36.722`",
    numbering="from 0",
    convention="causal",
)
