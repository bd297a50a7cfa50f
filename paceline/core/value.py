"""The base of every value that crosses a file boundary, and the whole numbers that it may hold."""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from paceline.core.units import LARGEST_INT

PositiveInt = Annotated[int, Field(gt=0, le=LARGEST_INT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST_INT)]
BlockCount = Annotated[int, Field(gt=0, le=10_000)]
"""Blocks of a model, which layouts, memory and time are counted through one by one."""
MoreBlocks = Annotated[int, Field(ge=0, le=10_000)]
"""Blocks beside these, none among them."""


class FieldMark(Enum):
    """What a field is for, declared with its type: `Annotated[str, FieldMark.LABEL]`."""

    LABEL = "label"
    """It says what a run is called, where it runs or how it is watched, and not what runs."""
    TRAINED = "trained"
    """It says what is trained, which nobody knows of a command without a recipe."""


T = TypeVar("T")
RunLabel = Annotated[T, FieldMark.LABEL]


class Value(BaseModel):
    """A frozen record that refuses unknown keys; its declaration is also its file format.

    Numbers are finite: JSON has no other, so a file that held one could not be read again.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


@cache
def marked_fields(model: type[BaseModel], mark: FieldMark) -> dict[str, Any]:
    """Return the fields with a mark, nested ones included, in the form of `exclude`."""
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        kind = field.annotation
        if mark in field.metadata:
            found[name] = True
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            found[name] = marked_fields(kind, mark)
    return {name: fields for name, fields in found.items() if fields}
