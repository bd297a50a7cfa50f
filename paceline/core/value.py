"""The base of every value that crosses a file boundary."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Value(BaseModel):
    """A frozen record that refuses unknown keys; its declaration is also its file format."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=True)
