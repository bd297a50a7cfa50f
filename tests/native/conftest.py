"""Lets the tests import the trainer's files as the trainer does, with the same numbers each time."""

from __future__ import annotations

import sys

import pytest

from tests.native.example import TRAINER

sys.path.insert(0, str(TRAINER))


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    import torch

    torch.manual_seed(7)
