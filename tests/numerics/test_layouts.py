"""Every layout gives the single process's losses, norms, gradients and weights."""

from __future__ import annotations

import pytest
import torch

from paceline.core.shape import LoraSpec
from tests.numerics.cases import (
    WITH_EXPERTS,
    Case,
    by_inductor,
    dropping,
    exact,
    reference,
    rounded,
    trained_table,
)
from tests.numerics.compare import (
    BF16_FACTOR,
    ROUTED_FACTOR,
    TOLERANCE,
    difference,
    largest_difference,
    worse_than_rounding,
)
from tests.numerics.models import MODELS
from tests.numerics.pool import Results

ROUNDED = rounded()
LOSS_TOLERANCE = 1e-5


def named(case: Case) -> str:
    """A test's id."""
    return case.name


@pytest.mark.parametrize("case", [*trained_table(), *by_inductor()], ids=named)
def test_a_layout_changes_nothing_but_the_work(case: Case, results: Results) -> None:
    worst, where = largest_difference(results[case], results[reference(case)])

    assert worst < TOLERANCE["fp64"], where


@pytest.mark.parametrize("case", [c for c in ROUNDED if c.dtype == "fp32"], ids=named)
def test_fp32_differs_by_rounding_alone_and_all_sgd_steps_end_at_the_same_loss(
    case: Case, results: Results
) -> None:
    found, wanted = results[case], results[reference(case)]

    worst, where = largest_difference(found, wanted)

    assert worst < TOLERANCE["fp32"], where
    assert difference(found["figures"][-1, 0], wanted["figures"][-1, 0]) < LOSS_TOLERANCE


@pytest.mark.parametrize("case", [c for c in ROUNDED if c.dtype == "bf16"], ids=named)
def test_bf16_is_as_far_from_fp32_as_it_is_in_one_process(case: Case, results: Results) -> None:
    single = reference(case)

    trainings = results[case], results[single], results[exact(single)]
    factor = ROUTED_FACTOR if case.model in WITH_EXPERTS else BF16_FACTOR

    times, where = worse_than_rounding(*trainings, of_gradients=True)
    assert times < factor, where

    times, where = worse_than_rounding(*trainings, of_gradients=False)
    assert times < BF16_FACTOR, where


@pytest.mark.parametrize(("kept", "recomputed"), dropping(), ids=named)
def test_recomputing_drops_what_was_dropped_before(
    kept: Case, recomputed: Case, results: Results
) -> None:
    worst, where = largest_difference(results[recomputed], results[kept])
    dropped, _ = largest_difference(results[kept], results[reference(kept)])

    assert worst < TOLERANCE["fp64"], where
    assert dropped > 0.1


@pytest.mark.parametrize("model", MODELS)
def test_training_moves_every_weight_that_is_not_frozen(model: str, results: Results) -> None:
    """Equal results prove nothing when nothing was trained."""
    trained, lora = results[Case(1, "", model, "fp64")], MODELS[model].lora
    norms = {
        name: torch.linalg.vector_norm(gradient).item()
        for name, gradient in trained["gradients"][0].items()
    }
    biases = {name for name in trained["weights"] if name.endswith("choice_bias")}
    frozen = trained["weights"].keys() - norms.keys() - biases

    assert trained["figures"][:, 0].min() < trained["figures"][0, 0]
    # Adding the same to every score changes nothing: the gradient of a key's bias is rounding, but
    # not where a sink has a score of its own.
    sinks = any(name.endswith("sinks") for name in norms)
    assert {name for name, norm in norms.items() if norm < 1e-6} == {
        name for name in norms if name.endswith("k.bias") and not sinks
    }
    assert frozen == {name for name in trained["weights"] if lora and is_frozen(name, lora)}
    assert all(trained["weights"][name].abs().max() > 0 for name in biases)


def is_frozen(name: str, lora: LoraSpec) -> bool:
    """Whether an adapted model does not train a weight."""
    *_, layer, kind = name.split(".")
    adapted = layer in lora.targets and kind == "weight"
    return not kind.startswith("lora_") and (adapted or not lora.train_rest)


def test_twenty_sgd_steps_lower_the_loss(results: Results) -> None:
    losses = results[Case(1, "", "llama", "fp32")]["figures"][:, 0]

    assert len(losses) == 20
    assert losses[-1] < 0.98 * losses[0]
