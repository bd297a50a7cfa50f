"""The products of the native trainer's step alone: python _step_products_in_turns.py FILE BLOCK.

The second step of a training without compilation says which products there are, with their shapes,
strides and dtypes. They are done again in that order, into the same memory for equal ones, which is
less to move than in a training. A trainer that does them one by one by PyTorch's kernels takes no
less time a step; one that joins some of them may, by a few per cent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from _turns import BlockTimer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.trainer import train
from paceline.trainer.config import parse_config, read_json
from paceline.trainer.data.batches import Loader
from paceline.trainer.measure.event_log import EventLog
from paceline.trainer.measure.heartbeat import Heartbeat
from paceline.trainer.measure.mllog import open_run

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addmm_", "baddbmm_")
GROUPED = ("grouped_linear", "grouped_weight_gradient")
"""Operators of the native trainer that do one product per expert."""
Product = Callable[[], Any]


class _Recorded(BaseException):
    """The step is over; BaseException, so that the trainer does not report it."""


class Recorder(TorchDispatchMode):
    """Keeps what each product is of, and its result's form."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Product] = []
        self._equal: dict[Any, Product] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, and note it when it is a product."""
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in (*PRODUCTS, *GROUPED):
            key = (name, str([_form(value) for value in args]), str(kwargs))
            if key not in self._equal:
                self._equal[key] = _recorded_product(name.rstrip("_"), args, kwargs or {}, out)
            self.calls.append(self._equal[key])
        return out


def _form(value: Any) -> Any:
    return (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value


def _like(value: Any) -> Any:
    """Return a new tensor with the same shape and strides; other values stay unchanged."""
    if not isinstance(value, Tensor):
        return value
    new = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return new.fill_(0.01)


def _recorded_product(name: str, args: Any, kwargs: dict[str, Any], out: Tensor) -> Product:
    if name in GROUPED:
        counts = args[-1].clone()
        inputs, operator = [_like(value) for value in args[:-1]], getattr(torch.ops.paceline, name)
        return lambda: operator(*inputs, counts)
    inputs, result = [_like(value) for value in args], _like(out)
    scales = {key: value for key, value in kwargs.items() if key in ("alpha", "beta")}
    operation = getattr(torch, name)
    return lambda: operation(*inputs, **scales, out=result)


def products_of(path: str) -> list[Product]:
    """Train as the file says up to the end of the second step; the products of that one."""
    config, events = parse_config(read_json(path)), EventLog("steps", 0)
    recorder, num_batches, take = Recorder(), 0, Loader.next

    def count_and_take(self: Loader) -> Any:
        nonlocal num_batches
        num_batches += 1
        if num_batches == 2:
            recorder.__enter__()
        if num_batches == 3:
            recorder.__exit__(None, None, None)
            raise _Recorded
        return take(self)

    Loader.next = count_and_take  # type: ignore[method-assign]
    timed_run = open_run(config, rank=0)
    timed_run.begin()
    with suppress(_Recorded):
        train.train(config, events, Heartbeat(events, "stack"), timed_run)
    return recorder.calls


def main(path: str, block: int) -> None:
    """Do them until nobody wants another block."""
    turn = BlockTimer(block)
    turn.step()
    calls = products_of(path)
    if not calls:
        raise SystemExit("the step had no products")
    with torch.no_grad():
        while True:
            for product in calls:
                product()
            turn.step()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
