"""The best layout as a recipe: nothing of the recipe is lost, and it can be read again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.core.hardware import Cluster
from paceline.core.hosts import Host
from paceline.core.layout import Layout
from paceline.files.recipe import load_recipe, recipe_names
from paceline.layouts.tune.candidates import Candidates
from paceline.layouts.tune.tuning import (
    check_recipe_path,
    rerun_command,
    tuned_recipe,
    write_recipe,
)
from paceline.machines.placement import HostPlacement, Request
from tests.layouts.tune.worlds import made_up


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_the_same_when_it_is_read_again(name: str, tmp_path: Path):
    recipe = load_recipe(name)
    write_recipe(recipe, tmp_path / "r.yaml", "one line")
    assert load_recipe(str(tmp_path / "r.yaml")) == recipe
    assert (tmp_path / "r.yaml").read_text().startswith("# one line\nname: ")


def test_a_link_that_the_user_names_is_followed(tmp_path: Path):
    target, link = tmp_path / "kept.yaml", tmp_path / "link.yaml"
    target.touch()
    link.symlink_to(target)
    check_recipe_path(link, "tiny-llama")
    write_recipe(load_recipe("tiny-llama"), link, "one line", follow=True)
    assert link.is_symlink() and target.read_text().startswith("# one line\n")
    with pytest.raises(UserError, match="is the recipe itself"):
        check_recipe_path(link, str(target))


def on(devices: int, nodes: int = 1) -> Candidates:
    layouts = made_up([Layout(tp=8, sequence_parallel=True)], blind=True)
    cluster = Cluster(name="c", device="cpu", devices_per_node=devices, nodes=nodes)
    return replace(layouts, spec=layouts.spec.model_copy(update={"cluster": cluster}))


def test_the_question_is_kept_and_the_layout_is_the_best():
    request = Request("tiny-llama", None, ("lr=2e-3",))
    recipe, left_out = tuned_recipe(request, on(2), Layout(tp=2, sequence_parallel=True))
    assert recipe.training.lr == 2e-3 and recipe.layout.tp == 2 and recipe.devices == 2
    assert left_out is None and recipe.name == "tiny-llama-tuned"


def test_devices_of_several_hosts_are_left_to_the_command():
    recipe, _ = tuned_recipe(Request("tiny-llama"), on(2, nodes=2), Layout())
    assert recipe.devices is None


def test_a_ramp_up_stays_where_the_layout_divides_it():
    kept, left_out = tuned_recipe(Request("gpt-1b3-tiny"), on(2), Layout(micro_batch=2))
    assert kept.training.ramp_up is not None and left_out is None
    steady, left_out = tuned_recipe(Request("gpt-1b3-tiny"), on(2), Layout(micro_batch=8))
    assert steady.training.ramp_up is None and "ramp_up" in (left_out or "")


def test_a_variant_becomes_part_of_the_recipe():
    recipe, _ = tuned_recipe(Request("gpt-1b3-tiny", "no-recompute"), on(2), Layout(micro_batch=2))
    assert recipe.variants == {} and recipe.layout.recompute == "none"


def test_on_hosts_the_command_names_them_and_the_devices_of_each():
    hosts = tuple(Host(name=name) for name in ("n1", "n2"))
    where = HostPlacement(hosts=hosts, nodes=2, interface="ib0", ssh_config=Path("a b"))
    there = Cluster(
        name="c", device="cpu", devices_per_node=4, nodes=2, hosts=("n1", "n2"), launcher="ssh"
    )
    command = rerun_command(Request("tiny-llama", device="cpu", where=where), there, Path("x.yaml"))
    assert command == (
        "paceline run x.yaml '--hosts=n[1-2]' --nodes=2 --interface=ib0 '--ssh-config=a b' "
        "--devices=4 --device=cpu"
    )


def test_a_named_cluster_has_its_devices_and_this_machine_needs_no_command():
    there = Cluster(name="c", device="cpu", devices_per_node=4, launcher="slurm")
    request = Request("tiny-llama", cluster="c.yaml", where=HostPlacement(allocation="7", nodes=2))
    command = rerun_command(request, there, Path("x.yaml"))
    assert command == "paceline run x.yaml --cluster=c.yaml --nodes=2 --allocation=7"
    this_machine = Cluster(name="c", device="cpu", devices_per_node=4)
    assert rerun_command(Request("tiny-llama"), this_machine, Path("x.yaml")) is None
