"""Trainings in low precision by recipe, and the deviation of their loss from bf16's."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from _gpu_cases import ALONE, WARMUP

from paceline.core.hardware import Cluster
from paceline.core.run import RunSpec
from paceline.files.recipe import load_recipe, resolve

STEPS = 50
REFUSALS = ("does not support it with PyTorch", "needs torchao", "needs a GPU")
"""Messages of the trainer if a device or torchao lacks a GEMM."""


@dataclass(frozen=True)
class Variant:
    """One way to train a shape."""

    name: str
    settings: tuple[str, ...]


BASE = Variant("bf16", ("dtype=bf16",))
YARDSTICKS = (
    Variant("bf16 again", ("dtype=bf16",)),
    Variant("bf16, weights and order by another seed", ("dtype=bf16", "seed=4321")),
)
"""Repetitions of bf16, which show its own variation."""
RECIPES = (
    *(
        Variant(recipe, ("dtype=fp8", f"fp8_recipe={recipe}"))
        for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise")
    ),
    Variant("mxfp8", ("dtype=mxfp8",)),
    Variant("nvfp4", ("dtype=nvfp4",)),
)
SIDES = (BASE, Variant("fp32", ("dtype=fp32",)), *YARDSTICKS, *RECIPES)
SHAPES: dict[str, tuple[str, ...]] = {
    "tiny-llama": ("tiny-llama",),
    "tiny-gpt": ("tiny-gpt",),
}
"""Recipe and its overrides."""
LARGE = "Llama 3.1 8B's blocks at 8192, 4 layers"
ON_A_GPU = {LARGE: ("llama31-8b", "model.num_layers=4", "layout.recompute=none")}
"""Large enough for products to decide the speed."""


def spec_of(shape: Sequence[str], side: Variant, device: str, steps: int) -> RunSpec:
    """The run of a shape by a side; on a GPU all sides compile their blocks."""
    recipe, *overrides = shape
    of_one = ALONE[1:] if recipe.startswith("tiny") else ALONE
    batch = 8 if recipe.startswith("tiny") else 1
    changes = (
        *(*of_one, *overrides, *side.settings, f"steps={steps}"),
        *(f"layout.micro_batch={batch}", f"global_batch={batch}"),
        f"compile={'none' if device == 'cpu' else 'blocks'}",
    )
    threads = os.cpu_count() if device == "cpu" else None
    cluster = Cluster(name="here", device=device, devices_per_node=1, threads_per_device=threads)
    return resolve(load_recipe(recipe, None, changes), cluster, True, None)


def figures(
    side: Variant, spec: RunSpec, figures: dict[str, Any], base: dict[str, Any]
) -> dict[str, Any]:
    """Return each step's relative loss deviation from `base`, and the ratio of the speeds."""
    off = [
        abs(loss - expected) / expected
        for loss, expected in zip(figures["loss"], base["loss"], strict=True)
    ]
    warmup = WARMUP["cpu" if spec.cluster.device == "cpu" else "cuda"]
    step_s, base_s = (median(one["times_s"][warmup:]) for one in (figures, base))
    return {
        "side": side.name,
        "steps": len(off),
        "first_loss": figures["loss"][0],
        "last_loss": figures["loss"][-1],
        "max_off": max(off),
        "mean_off": fmean(off),
        "last_off": figures["loss"][-1] / base["loss"][-1] - 1,
        "tokens_per_s": spec.training.global_batch * spec.training.seq_len / step_s,
        "speed_of_bf16": base_s / step_s,
    }


class Deviations:
    """Trains one shape by one side after the other, bf16 first, and keeps their rows."""

    def __init__(
        self,
        shape: Sequence[str],
        device: str,
        steps: int,
        train: Callable[[RunSpec], dict[str, Any]],
    ) -> None:
        self.shape, self.device, self.steps, self.train = shape, device, steps, train
        self.base: dict[str, Any] | None = None
        self.rows: list[dict[str, Any]] = []

    def measure(self, side: Variant) -> str:
        """Add a side's row, or why it is refused; its line. Raises as `train`."""
        spec = spec_of(self.shape, side, self.device, self.steps)
        try:
            run = self.train(spec)
        except RuntimeError as error:
            reason = str(error).strip().rpartition("\n")[2]
            if not any(words in reason for words in REFUSALS):
                raise
            self.rows.append({"side": side.name, "refused": reason})
            return f"| {self.shape[0]} | {side.name} | refused: {reason} |"
        if self.base is None:
            self.base = run
        self.rows.append(figures(side, spec, run, self.base))
        return table_row(self.shape[0], self.rows[-1])


def table_row(shape: str, row: dict[str, Any]) -> str:
    """A side in one line."""
    speed = f"{row['speed_of_bf16']:.2f}"
    offs = f"{row['max_off']:.2%} | {row['mean_off']:.2%} | {row['last_off']:+.2%}"
    return f"| {shape} | {row['side']} | {row['last_loss']:.4f} | {offs} | {speed} |"


HEADER = (
    "| shape | side | last loss | max off | mean off | last off | speed / bf16 |\n"
    "|---|---|---:|---:|---:|---:|---:|"
)
