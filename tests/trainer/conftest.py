"""The same random numbers for each test."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    import torch

    torch.manual_seed(7)
