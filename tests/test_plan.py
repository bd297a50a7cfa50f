"""Before anything starts: what cannot run here is refused with the reason and what would do."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.engines import native
from paceline.errors import UserError
from paceline.plan import Request, busy_notice, choose_cluster, device_kind, make_plan
from paceline.probe.inventory import inventory
from paceline.recipe import load_recipe, recipe_path
from tests.example import make_spec


def test_a_plan_is_the_script_that_will_run():
    plan = make_plan(Request("tiny-llama", devices=2))
    assert "--nproc-per-node=2" in plan.script and "native/main.py trainer.json" in plan.script
    assert {"trainer.json", "native/main.py"} <= set(plan.job.files)


def test_seventy_billion_parameters_are_refused_with_what_would_fit():
    with pytest.raises(UserError) as caught:
        make_plan(Request("llama31-70b", device="cpu"))
    message = str(caught.value)
    assert "cannot fit" in message and "1,051.33 GiB" in message
    assert "x H100-SXM" in message and "tiny-llama" in message


def test_a_layout_too_large_for_one_device_says_how_much_it_needs():
    with pytest.raises(UserError, match="cannot fit: a device needs at least"):
        make_plan(
            Request("tiny-llama", overrides=("layout.micro_batch=100000", "global_batch=200000"),
                    devices=2)
        )  # fmt: skip


def test_force_runs_what_the_bound_refuses():
    overrides = ("layout.micro_batch=100000", "global_batch=200000")
    assert make_plan(Request("tiny-llama", overrides=overrides, devices=2, force=True)).script


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("dtype=fp16",), "fp16 on a CPU is emulated"),
        (("dtype=fp8",), "dtype fp8 is not among"),
        (("layout.tp=2", "global_batch=8"), "tp 2 is not in the native trainer"),
        (("layout.recompute=selective",), "recompute selective"),
    ],
)
def test_what_the_trainer_cannot_do_is_said_before_it_starts(
    overrides: tuple[str, ...], words: str
):
    with pytest.raises(UserError, match=words):
        make_plan(Request("tiny-llama", overrides=overrides, devices=2))


def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(UserError, match="no NVIDIA GPU"):
        device_kind("cuda", {"gpus": [], "packages": {}})


def test_a_cpu_build_of_torch_leaves_gpus_alone_and_says_so():
    kind, notices = device_kind("auto", {"gpus": [{}], "packages": {"torch": "2.13.0+cpu"}})
    assert kind == "cpu" and "CPU build" in notices[0]


def test_ranks_share_the_cores_and_the_memory():
    one, two = (make_plan(Request("tiny-llama", devices=n)).spec.cluster for n in (1, 2))
    assert one.device_memory_bytes == pytest.approx(2 * (two.device_memory_bytes or 0))
    assert (one.threads_per_device or 0) >= (two.threads_per_device or 0) >= 1


def test_settings_carry_what_the_trainer_needs():
    content = native.settings(make_spec())
    assert content["expected_parameters"] > 0 and content["num_microbatches"] == 1
    assert content["model"]["padded_vocab"] == 320 and content["device"] == "cpu"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("data.source=text",), "needs a file"),
        (("data.source=jsonl", "data.path=/no/such/file"), "is not a file"),
        (("model.vocab_size=100",), "no room for text"),
        (("references=[nope]",), "'nope'"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(overrides: tuple[str, ...], words: str):
    with pytest.raises(UserError, match=words):
        make_plan(Request("tiny-llama", overrides=overrides, devices=2))


def test_learned_positions_limit_the_sequence():
    with pytest.raises(UserError, match="beyond 256 learned positions"):
        make_plan(Request("tiny-gpt", overrides=("seq_len=512",), devices=2))


def test_a_data_file_is_sought_beside_the_recipe_too(tmp_path: Path):
    (tmp_path / "corpus.txt").write_text("words")
    recipe = tmp_path / "mine.yaml"
    text = recipe_path("tiny-llama").read_text()
    recipe.write_text(text.replace("source: stdlib", "source: text\n  path: corpus.txt"))
    assert make_plan(Request(str(recipe))).spec.data.path == str(tmp_path / "corpus.txt")


def test_more_ranks_than_cores_are_told():
    assert any("share" in notice for notice in make_plan(Request("tiny-llama", devices=64)).notices)


def test_a_cluster_names_its_devices_itself():
    with pytest.raises(UserError, match="names the devices itself"):
        make_plan(Request("tiny-llama", cluster="dgx-h100", devices=2))


def test_one_device_in_the_recipe_is_one_rank():
    assert make_plan(Request("tiny-llama", overrides=("devices=1",))).spec.world_size == 1


FOUND_GPUS = {
    **inventory(), "gpus": [{"name": "Tesla V100-SXM3-32GB", "memory_bytes": 34e9}] * 4,
    "packages": {"torch": "2.11"},
}  # fmt: skip


def test_a_device_that_is_only_nearly_known_is_told():
    cluster, notices = choose_cluster(Request("tiny-llama"), load_recipe("tiny-llama"), FOUND_GPUS)
    assert cluster.world_size == 4 and any("V100-SXM3" in notice for notice in notices)


def test_fewer_gpus_than_the_recipe_names_are_told():
    _, notices = choose_cluster(Request("gpt-1b3"), load_recipe("gpt-1b3"), FOUND_GPUS)
    assert any("names 8 devices" in notice for notice in notices)


def test_a_busy_machine_is_told_and_a_quiet_one_is_not():
    assert busy_notice({"cpu_busy_fraction": 0.05}) == []
    (notice,) = busy_notice({"cpu_busy_fraction": 0.8})
    assert "80 %" in notice
