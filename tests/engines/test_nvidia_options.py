"""What engines nemo and megatron_bridge render is accepted by NVIDIA's programs.

`nvidia_options.json` lists the options, configuration keys and variables of each program at a
commit: names, types and choices.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from paceline.core.run import RunSpec
from paceline.engines import engine
from paceline.engines.nemo.launch import profiled_ranks, variables
from paceline.engines.nemo.overrides import overrides
from tests.engines.batch_site import LLMB, NEMO, site, spec_of

ACCEPTED: dict[str, Any] = json.loads(
    Path(__file__).with_name("nvidia_options.json").read_text(encoding="utf-8")
)
RUNS = (
    ("llama31-8b", None, 1),
    ("llama31-8b", "fp8", 16),
    ("llama31-70b", None, 8),
    ("llama31-70b", "fp8", 256),
    ("llama31-405b", "dgxc", 72),
)
BRIDGE_RUNS = (
    ("llama31-8b", None, 1),
    ("llama31-8b", "bridge-fp8", 8),
    ("llama31-70b", "bridge", 8),
    ("llama31-70b", "bridge-fp8", 8),
    ("llama31-405b", "bridge", 128),
    ("deepseek-v3", None, 128),
)


def nemo(recipe: str, variant: str | None, nodes: int, **settings: Any) -> RunSpec:
    cluster = site(nodes, 8, "H100-SXM")
    return spec_of("nemo", recipe, cluster, {**NEMO, **settings}, variant)


@pytest.mark.parametrize("settings", [{}, {"dataset": True}, {"profile": True}])
@pytest.mark.parametrize("run", RUNS)
def test_each_override_is_a_key_of_nemos_configuration(
    run: tuple[str, str | None, int], settings: dict[str, Any]
) -> None:
    spec = nemo(*run, **settings)
    assert engine("nemo").unsupported(spec) == []
    model: Any = spec.model
    keys = ACCEPTED["nemo_config"]["keys"]
    for override in overrides(spec, model, profiled_ranks(spec)):
        name = override.partition("=")[0]
        is_known = any(key == name.lstrip("~") or key.startswith(f"{name[1:]}.") for key in keys)
        assert name.startswith("++") or is_known, override


@pytest.mark.parametrize("run", RUNS)
def test_each_variable_is_read_by_the_recipes_scripts(run: tuple[str, str | None, int]) -> None:
    spec = nemo(*run, script="/recipe/launch.sh", profile=True, profile_start_step=5)
    assert set(variables(spec)) <= set(ACCEPTED["recipe_variables"]["names"])


@pytest.mark.parametrize("commit", ["067f987d", "b50da4c7"])
@pytest.mark.parametrize("run", BRIDGE_RUNS)
def test_each_argument_is_an_option_of_megatron_bridge(
    run: tuple[str, str | None, int], commit: str
) -> None:
    recipe, variant, nodes = run
    settings = {"checkout": "/opt/Megatron-Bridge", "variant": "v1"}
    cluster = site(nodes, 8, "H100-SXM")
    routing = ("training.routing=forced",) if recipe == "deepseek-v3" else ()
    spec = spec_of("megatron_bridge", recipe, cluster, settings, variant, *routing)
    assert engine("megatron_bridge").unsupported(spec) == []
    options: dict[str, Any] = ACCEPTED[f"bridge_{commit}"]["options"]
    words = [*engine("megatron_bridge").job(spec, "x").program, "--"]
    arguments = {word[2:]: after for word, after in pairwise(words) if word.startswith("--")}
    for name, value in arguments.items():
        option = options[name]
        assert option["type"] != "int" or value.isdigit(), name
        assert value in option.get("choices", [value]), name
    required = {name for name, option in options.items() if option.get("required")}
    assert required <= set(arguments)


@pytest.mark.parametrize("recipe", ["llama31-8b", "llama31-70b", "llama31-405b"])
def test_each_word_is_an_option_of_llmb_run(recipe: str) -> None:
    cluster = site(128, 8, "H100-SXM", exclude=["n3"], reservation="r", constraint="c", segment=8)
    cluster = cluster.model_copy(update={"env": {"NCCL_IB_HCA": "mlx5_0"}})
    settings = engine("nemo").settings(
        spec_of("nemo", recipe, cluster, {**LLMB, "profile": True, "force": True, "variant": "v1"})
    )
    names = [word.partition("=")[0] for word in settings["command"] if word.startswith("-")]
    assert set(names) <= set(ACCEPTED["llmb_run_1.16.2"]["options"])
    newer = set(names) - set(ACCEPTED["llmb_run_1.15.0"]["options"])
    assert newer == {"--mbridge-arg"}
    assert set(settings["variables"]) <= set(ACCEPTED["llama31_variables"]["names"])
