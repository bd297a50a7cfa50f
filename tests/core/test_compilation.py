"""When `training.compile: auto` compiles blocks."""

from __future__ import annotations

import pytest

from paceline.core.compilation import PAYS_FROM_STEPS
from paceline.core.hardware import Cluster
from paceline.core.run import RunSpec
from paceline.files.recipe import load_recipe, resolve

LONG = f"steps={PAYS_FROM_STEPS}"
SHORT = f"steps={PAYS_FROM_STEPS - 1}"


def resolved(name: str, *sets: str, device: str = "cpu", has_compiler: bool = True) -> RunSpec:
    cluster = Cluster(name="here", device=device, nodes=1, devices_per_node=2)
    return resolve(load_recipe(name, None, sets), cluster, True, None, has_compiler)


def compiled(name: str, *sets: str, **where: str | bool) -> str:
    return resolved(name, *sets, **where).training.compile  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["tiny-llama", "llama2-70b-lora-tiny", "flux1-schnell-tiny"])
def test_long_runs_of_what_gains_are_compiled(name: str):
    assert compiled(name, LONG) == "blocks"
    assert compiled(name, SHORT) == "none"


@pytest.mark.parametrize("name", ["opt-350m-sft-tiny", "gpt-1b3-tiny"])
def test_models_that_gain_little_or_lose_are_left_as_they_are(name: str):
    assert compiled(name, LONG) == "none"


def test_what_is_stated_counts():
    assert compiled("tiny-llama", LONG, "compile=none") == "none"
    assert compiled("tiny-llama", SHORT, "compile=blocks") == "blocks"


def test_nothing_is_compiled_that_cannot_be():
    pipeline = ("layout.pp=2", "layout.schedule=zero-bubble", "layout.micro_batch=1")
    assert compiled("tiny-llama", LONG, *pipeline) == "none"
    documents = ("data.document_mask=true", "layout.recompute=full")
    assert compiled("tiny-llama", LONG, *documents) == "none"
    assert compiled("tiny-llama", LONG, documents[0]) == "blocks"
    assert compiled("tiny-llama", LONG, has_compiler=False) == "none"


def test_engines_of_others_keep_their_own_ways():
    assert compiled("tiny-llama", LONG, "engine=hf_trainer") == "none"
