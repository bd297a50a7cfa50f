"""Base class of all values in files, and types of bounded integers."""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from paceline.core.units import LARGEST_INT

PositiveInt = Annotated[int, Field(gt=0, le=LARGEST_INT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST_INT)]
BlockCount = Annotated[int, Field(gt=0, le=10_000)]
"""Number of blocks of a model. It is bounded because layouts, memory and time loop over blocks."""
MoreBlocks = Annotated[int, Field(ge=0, le=10_000)]
"""Number of additional blocks; may be 0."""


class FieldMark(Enum):
    """Purpose of a field, declared with its type: `Annotated[str, FieldMark.LABEL]`."""

    LABEL = "label"
    """The field states a run's name, where it runs or how it is monitored, not what runs."""
    TRAINED = "trained"
    """The field states what is trained, which is unknown for a command without a recipe."""


T = TypeVar("T")
RunLabel = Annotated[T, FieldMark.LABEL]


class Value(BaseModel):
    """A frozen record that refuses unknown keys. Its declaration is also its file format.

    Numbers are finite. JSON has no other numbers, so a file with others could not be read again.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


@cache
def marked_fields(model: type[BaseModel], mark: FieldMark) -> dict[str, Any]:
    """Return the fields with a mark, including nested ones, in the form of pydantic's `exclude`."""
    marks: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        kind = field.annotation
        if mark in field.metadata:
            marks[name] = True
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            marks[name] = marked_fields(kind, mark)
    return {name: fields for name, fields in marks.items() if fields}
