"""`training.compile: auto` becomes what pays in the run's own steps, by its layout's rules."""

from __future__ import annotations

import pytest

from paceline.core.hardware import Cluster
from paceline.core.run import RunSpec
from paceline.files.recipe import load_recipe, resolve

LONG = "training.steps=100000"


def spec(*overrides: str, recipe: str = "tiny-llama", launcher: str = "local") -> RunSpec:
    here = Cluster(
        name="here",
        device="cpu",
        devices_per_node=2,
        threads_per_device=1,
        launcher=launcher,
        hosts=() if launcher == "local" else ("a",),
    )
    return resolve(load_recipe(recipe, None, overrides), here, True, None)


def test_a_long_run_is_compiled_and_a_short_one_is_not():
    assert spec().training.compile == "none"
    assert spec(LONG).training.compile == "blocks"


def test_what_is_asked_for_is_taken():
    assert spec(LONG, "training.compile=none").training.compile == "none"
    assert spec("training.compile=blocks").training.compile == "blocks"


def test_the_key_tells_what_was_taken_and_not_how_it_was_asked():
    assert spec().key == spec("training.compile=none").key
    assert spec(LONG).key == spec(LONG, "training.compile=blocks").key
    assert spec(LONG).key != spec(LONG, "training.compile=none").key


@pytest.mark.parametrize(
    "overrides",
    [
        ("layout.pp=2", "layout.schedule=zero-bubble", "layout.micro_batch=4"),
        ("engine=hf-trainer",),
        ("training.dtype=fp16",),
        ("model.num_experts=4", "model.experts_per_token=2"),
    ],
)
def test_it_stays_off_where_it_cannot_be_or_is_not_known(overrides: tuple[str, ...]):
    assert spec(LONG, *overrides).training.compile == "none"


def test_hosts_that_nobody_looked_at_compile_nothing_by_themselves():
    assert spec(LONG, launcher="ssh").training.compile == "none"
    asked = spec(LONG, "training.compile=blocks", launcher="ssh")
    assert asked.training.compile == "blocks"


def test_a_growing_batch_counts_as_its_smallest():
    grown = ("training.batch_per_device=null", "training.global_batch=4096", "layout.micro_batch=1")
    ramp = "training.ramp_up={start: 2, increment: 2, samples: 100000}"
    assert spec(*grown).training.compile == "blocks"
    assert spec(*grown, ramp).training.compile == "none"
