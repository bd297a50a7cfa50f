"""Megatron-DeepSpeed's log (BigScience and its followers): Megatron's records and more fields.

Argonne's fork writes the same records as `iteration=1/ 50 | elapsed_time_per_iteration_ms=3420.2`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from paceline.engines.log_reading.iteration_log import IterationLog
from paceline.engines.log_reading.log_content import LogContent, LogFormat, numbers

__all__ = ["LOG_FORMAT"]


def read(blocks: Iterable[bytes], log: LogContent) -> None:
    """Times in seconds, before 2022 in milliseconds; `TFLOPs` are of one device, samples of all.

    For some weeks of 2021 `samples per second` was divided by milliseconds; it is kept as printed.
    DeepSpeed's own timer may print a running average beside them, which times no step.
    """
    for batch in IterationLog(log).batches(_with_colons(blocks)):
        log.add_steps(batch.index, **batch.columns)
        if b"RunningAvgSamplesPerSec=" in batch.text:
            _keep_running_average(batch.text, log)


_KEYED = b"elapsed_time_per_iteration_ms="
_NAMES = {
    b"iteration=": b"iteration ",
    _KEYED: b"elapsed time per iteration (ms): ",
    b"consumed_samples=": b"consumed samples: ",
    b"consumed_tokens=": b"consumed tokens: ",
    b"global_batch_size=": b"global batch size: ",
    b"grad_norm=": b"grad norm: ",
    b"actual_seqlen=": b"actual seqlen: ",
    b"number_of_skipped_iterations=": b"number of skipped iterations: ",
    b"number_of_nan_iterations=": b"number of nan iterations: ",
    b"samples_per_second=": b"samples per second: ",
    b"tokens_per_gpu_per_second_tgs=": b"tokens per gpu per second (tgs): ",
    b"[DS]TFLOPs=": b"TFLOPs: ",
    b"[DS]-TFLOPs=": b"TFLOPs: ",
    b"[LM]TFLOPs=": b"Megatron-LM FLOPs: ",
    b"[LM]-TFLOPs=": b"Megatron-LM FLOPs: ",
}
"""Names of fields as forks write them, and as the others do."""

_OTHER_NAME = re.compile(rb"(?<=\| )([A-Za-z][\w ]{0,60})=(?=[ 0-9+-])")
_RUNNING = re.compile(rb"RunningAvgSamplesPerSec=([0-9.]{1,24})")


def _with_colons(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The blocks with `name: value` where a fork writes `name=value`."""
    keyed = False
    for block in blocks:
        keyed = keyed or _KEYED in block
        if keyed:
            for name, usual in _NAMES.items():
                block = block.replace(name, usual)
            block = _OTHER_NAME.sub(rb"\1: ", block)
        yield block


def _keep_running_average(text: bytes, log: LogContent) -> None:
    values = numbers(_RUNNING.findall(text)[-1:])
    if len(values) and 0 < values[0] < float("inf"):
        log.figures["running_samples_per_s"] = float(values[0])


_OWN_FIELD = re.compile(
    rb"\| (?:consumed tokens: {1,24}+\d{1,18} \||elapsed time per iteration \(s\): |lm-loss: "
    rb"|samples per second: {0,8}+[0-9.]{1,18} \|"
    rb"|elapsed_time_per_iteration_ms= {0,8}+[0-9.]{1,18} \|)"
)

LOG_FORMAT = LogFormat(
    title="Megatron-DeepSpeed",
    marks=(b"elapsed time per iteration (", b" | consumed samples: ", _KEYED),
    step_line=_OWN_FIELD,
    read=read,
    end_marker="[after training is done]",
    precedence=3,
    convention="megatron-deepspeed+recompute",
)
