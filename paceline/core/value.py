"""The base of every value that crosses a file boundary, and the whole numbers that it may hold."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from paceline.core.units import LARGEST_INT

PositiveInt = Annotated[int, Field(gt=0, le=LARGEST_INT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST_INT)]
BlockCount = Annotated[int, Field(gt=0, le=10_000)]
"""Blocks of a model, which layouts, memory and time are counted through one by one."""
MoreBlocks = Annotated[int, Field(ge=0, le=10_000)]
"""Blocks beside these, none among them."""


class Value(BaseModel):
    """A frozen record that refuses unknown keys; its declaration is also its file format.

    Numbers are finite: JSON has no other, so a file that held one could not be read again.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
