"""Training to a quality: what is evaluated when, and what a benchmark's log says of the run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, StringConstraints

from paceline.core.value import NonNegativeInt, PositiveInt, Value

Label = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\r\n]+$")]


class Evaluation(Value):
    """When training stops for a look at samples that it never trains on, and when for good."""

    every_samples: PositiveInt
    """Samples between two evaluations, rounded up to whole batches."""
    skip_first: NonNegativeInt = 0
    """Evaluations at the start that are left out."""
    samples: PositiveInt
    """Held-out samples of one evaluation."""
    target: PositiveFloat | None = None
    """Training ends when the held-out loss is not above it; None only evaluates."""
    path: str | None = None
    """A file of held-out samples; None keeps the last ones of the training's data apart."""
    loss_mask: str | None = None
    """A file with a byte for each token held out: where it is 0 the loss does not count it."""
    mean: Literal["targets", "samples"] = "targets"
    """What counts the same: every target, or every sample with the mean loss of its targets."""


class MlperfLog(Value):
    """What an MLPerf log states about a run besides what the run itself knows."""

    benchmark: Annotated[str, StringConstraints(pattern=r"^\w{1,60}$")]
    """The rules' name of it."""
    org: Label
    """Who would submit."""
    platform: Label
    division: Literal["closed", "open"] = "closed"
    status: Label = "Research, Development, or Internal (RDI)"
    """Availability of the system, in the rules' words."""
    warmup_steps: Annotated[int, Field(ge=0, le=1000)] = 2
    """Steps on random samples before the clock starts, which leave nothing behind."""
    cache_cleared: bool | None = None
    """Whether file caches were dropped before this run; None when nobody says."""
