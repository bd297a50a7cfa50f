"""Before anything starts: what cannot run here is refused with the reason and what would do."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.core.hardware import Cluster, SlurmSettings
from paceline.core.hosts import Host
from paceline.engines import native
from paceline.files.recipe import load_recipe, recipe_path
from paceline.machines.placement import HostPlacement, Request, choose_cluster, device_kind
from paceline.machines.probe.inventory import inventory
from paceline.runs import flow
from paceline.runs.plan import busy_notice, make_plan, replan, would_fit
from tests.example import make_spec
from tests.machines.slurm.fake_slurm import put


def test_a_plan_is_the_script_that_will_run():
    plan = make_plan(Request("tiny-llama", devices=2))
    assert "agent.py 1 0 2 " in plan.script and plan.script.endswith("trainer trainer.json\n")
    assert {"trainer.json", "trainer/__main__.py"} <= set(plan.job.files)


def test_planning_needs_nothing_beside_the_controller_and_starting_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(native.importlib.util, "find_spec", lambda name: None)
    fp8 = Request(
        "llama31-70b",
        cluster="lambda-1cc-h100",
        overrides=("training.dtype=fp8",),
        where=HostPlacement(hosts=tuple(Host(name=f"node-{n}") for n in range(8))),
    )
    assert '"dtype": "fp8"' in make_plan(fp8).job.files["trainer.json"]
    plan = make_plan(Request("tiny-llama", devices=2))
    with pytest.raises(UserError, match="engine native: torch is not installed"):
        flow.run(plan, tmp_path, [], lambda progress: None)
    assert not list(tmp_path.iterdir())


def test_a_schedule_without_mtp_is_refused_with_the_reason():
    changes = ("mtp_layers=2", "layout.pp=2", "layout.schedule=zero-bubble")
    with pytest.raises(UserError) as caught:
        make_plan(Request("tiny-llama", overrides=changes, devices=2))
    why = "zero-bubble (mtp_layers 2) is not supported with model.mtp_layers: PyTorch cannot delay"
    assert why in str(caught.value)


def test_seventy_billion_parameters_are_refused_with_what_would_fit():
    with pytest.raises(UserError) as caught:
        make_plan(Request("llama31-70b", device="cpu"))
    message = str(caught.value)
    assert "cannot fit" in message and "1,051.33 GiB" in message
    assert "x H100-SXM" in message and "paceline run llama31-70b-tiny" in message


def test_a_layout_too_large_for_one_device_says_how_much_it_needs():
    with pytest.raises(UserError, match="cannot fit: a device needs at least"):
        make_plan(
            Request(
                "tiny-llama",
                overrides=("layout.micro_batch=100000", "global_batch=200000"),
                devices=2,
            )
        )


def test_force_trains_in_what_a_cpu_emulates():
    plan = make_plan(Request("tiny-llama", overrides=("dtype=fp16",), devices=1, force=True))
    assert plan.spec.training.dtype == "fp16"


@pytest.mark.parametrize("dtype", ["fp8", "mxfp8", "nvfp4"])
def test_force_trains_in_nothing_that_a_cpu_lacks(dtype: str):
    with pytest.raises(UserError, match=f"training.dtype {dtype} needs a GPU"):
        make_plan(Request("tiny-llama", overrides=(f"dtype={dtype}",), devices=1, force=True))


def test_force_runs_what_the_bound_refuses():
    overrides = ("layout.micro_batch=100000", "global_batch=200000")
    assert make_plan(Request("tiny-llama", overrides=overrides, devices=2, force=True)).script


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("dtype=fp16",), "fp16 is emulated on a CPU"),
        (("dtype=fp8",), "training.dtype fp8 needs a GPU: use bf16 or fp32 on a CPU"),
        (("dtype=nvfp4",), "training.dtype nvfp4 needs a GPU"),
        (
            ("dtype=mxfp8", "layout.tp=2", "model.ffn_size=800"),
            "matrices 400 wide .* mxfp8, because it takes multiples of 32: use a tp below 2 or",
        ),
        (
            ("dtype=nvfp4", "layout.micro_batch=1", "seq_len=200"),
            "200 tokens of a micro-batch .* nvfp4, .* blocks of 16: use another layout.micro_batch",
        ),
        (
            ("dtype=fp8", "fp8_recipe=blockwise", "layout.tp=2"),
            "matrices 64 wide cannot be multiplied in blockwise fp8, .* multiples of 128",
        ),
        (("fp8_recipe=rowwise",), "fp8_recipe rowwise is for training.dtype=fp8, not"),
        (
            ("fp8_recipe=mxfp8",),
            "mxfp8 is a dtype, not an fp8 recipe: set training.dtype=mxfp8",
        ),
        (("layout.ep=2",), "ep 2 spreads experts over ranks, and the model has none"),
        (
            ("layout.pp=2", "layout.vp=2", "global_batch=40", "model.num_layers=4"),
            "5 micro-batches a step cannot be split into 2 equal rounds",
        ),
    ],
)
def test_what_the_trainer_cannot_do_is_said_before_it_starts(
    overrides: tuple[str, ...], words: str
):
    with pytest.raises(UserError, match=words):
        make_plan(Request("tiny-llama", overrides=overrides, devices=2))


@pytest.mark.parametrize(
    "setting", ["layout.gradient_sync=last", "data.document_mask=true"], ids=["sync", "documents"]
)
def test_another_engine_is_not_given_what_the_native_trainer_alone_can_do(setting: str):
    said = rf"{setting.partition('=')[0]} \w+ is not supported: only engine native supports it"
    asked = ("engine=hf_trainer", setting)
    with pytest.raises(UserError, match=said):
        make_plan(Request("tiny-llama", overrides=asked, devices=2))


def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(UserError, match="no visible NVIDIA GPU"):
        device_kind("cuda", {"gpus": [], "packages": {}})


def test_a_cpu_build_of_torch_leaves_gpus_alone_and_says_so():
    kind, notices = device_kind("auto", {"gpus": [{}], "packages": {"torch": "2.13.0+cpu"}})
    assert kind == "cpu" and "CPU build" in notices[0]


def test_ranks_share_the_cores_and_the_memory():
    alone, pair = (make_plan(Request("tiny-llama", devices=n)).spec.cluster for n in (1, 2))
    assert alone.device_memory_bytes == pytest.approx(2 * (pair.device_memory_bytes or 0))
    assert (alone.threads_per_device or 0) >= (pair.threads_per_device or 0) >= 1


def test_settings_carry_what_the_trainer_needs():
    content = native.settings(make_spec())
    assert content["expected_parameters"] > 0 and content["num_microbatches"] == 1
    assert content["model"]["padded_vocab"] == 320 and content["device"] == "cpu"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("data.source=text",), "needs a file"),
        (("data.source=jsonl", "data.path=/no/such/file"), "is not a file"),
        (("data.source=webdataset", "data.path=/no/such/folder"), "is not a folder of shards"),
        (("model.vocab_size=100",), "is too small for text"),
        (("references=[nope]",), "'nope'"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(overrides: tuple[str, ...], words: str):
    with pytest.raises(UserError, match=words):
        make_plan(Request("tiny-llama", overrides=overrides, devices=2))


def test_learned_positions_limit_the_sequence():
    with pytest.raises(UserError, match="exceeds the 256 learned positions"):
        make_plan(Request("tiny-gpt", overrides=("seq_len=512",), devices=2))


def test_a_data_file_is_sought_beside_the_recipe_too(tmp_path: Path):
    (tmp_path / "corpus.txt").write_text("words")
    recipe = tmp_path / "mine.yaml"
    text = recipe_path("tiny-llama").read_text()
    recipe.write_text(text.replace("source: stdlib", "source: text\n  path: corpus.txt"))
    assert make_plan(Request(str(recipe))).spec.data.path == str(tmp_path / "corpus.txt")


def resumed(runs: Path, name: str) -> str | None:
    overrides = (f"checkpoint.resume={name}",)
    plan = make_plan(Request("tiny-llama", overrides=overrides, devices=2, runs_dir=runs))
    return plan.spec.checkpoint.resume


def test_a_checkpoint_is_pinned_however_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = tmp_path / "runs" / "2026-11-20-example"
    folder = run / "checkpoints" / "step-000040"
    folder.mkdir(parents=True)
    (folder / "state.json").touch()
    (folder.parent / "latest").write_text("step-000040\n")
    (run / "run.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for name in (
        "last",
        "2026-11-20-ex",
        "runs/2026-11-20-example",
        str(folder),
        str(folder.parent),
    ):
        assert resumed(tmp_path / "runs", name) == str(folder)


@pytest.mark.parametrize(
    "field", ["data.path", "data.tokenizer", "training.initial_weights", "checkpoint.resume"]
)
def test_a_path_of_nobodys_home_is_refused_by_its_field(field: str):
    text = ("data.source=text", "data.path=/etc/hostname", "data.tokenizer=null")
    overrides = (*text, f"{field}=~no-such-user/x")
    words = f"{field} ~no-such-user/x: refers to a user without a home folder; give"
    with pytest.raises(UserError, match=words):
        make_plan(Request("tiny-llama", overrides=overrides, devices=2))


def test_weights_of_the_hub_are_a_folder(tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    overrides = (f"training.initial_weights={tmp_path / 'model'}",)
    plan = make_plan(Request("tiny-llama", overrides=overrides, devices=2, runs_dir=tmp_path))
    assert plan.spec.training.initial_weights == str(tmp_path / "model")


def test_a_run_without_a_checkpoint_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"has no complete checkpoint.*checkpoint\.every=N"):
        resumed(tmp_path, str(tmp_path))
    with pytest.raises(UserError, match="contains no runs"):
        resumed(tmp_path / "runs", "nowhere")


def test_more_ranks_than_cores_are_told():
    assert any("share" in notice for notice in make_plan(Request("tiny-llama", devices=64)).notices)


@pytest.mark.parametrize(
    ("overrides", "devices"),
    [
        (("tp=2", "pp=2"), 4),
        (("tp=2", "cp=2", "pp=2", "vp=2", "sequence_parallel=true"), 8),
        (("zero_stage=3", "dp_shard=4"), 4),
        (("tp=2",), 2),
        (("layout.recompute=selective",), 2),
    ],
)
def test_a_run_takes_as_many_devices_as_its_layout_needs(overrides: tuple[str, ...], devices: int):
    plan = make_plan(Request("tiny-llama", overrides=overrides, device="cpu"))
    assert plan.spec.world_size == devices
    assert any("share" in n for n in plan.notices) == (devices > inventory()["cpu"]["usable_cores"])


def test_devices_that_make_no_whole_replicas_are_refused():
    with pytest.raises(UserError, match="does not divide 3 devices: use a multiple of 2"):
        make_plan(Request("tiny-llama", overrides=("tp=2",), devices=3, device="cpu"))


def test_a_cluster_names_its_devices_itself():
    with pytest.raises(UserError, match="already specifies the devices"):
        make_plan(Request("tiny-llama", cluster="dgx-h100", devices=2))


def test_one_device_in_the_recipe_is_one_rank():
    assert make_plan(Request("tiny-llama", overrides=("devices=1",))).spec.world_size == 1


FOUND_GPUS = {
    **inventory(),
    "gpus": [{"name": "Tesla V100-SXM3-32GB", "memory_bytes": 34e9}] * 4,
    "packages": {"torch": "2.11"},
}


def test_a_device_that_is_only_nearly_known_is_told():
    cluster, notices = choose_cluster(Request("tiny-llama"), load_recipe("tiny-llama"), FOUND_GPUS)
    assert cluster.world_size == 4 and any("V100-SXM3" in notice for notice in notices)


def test_fewer_gpus_than_the_recipe_names_are_told():
    _, notices = choose_cluster(Request("gpt-1b3"), load_recipe("gpt-1b3"), FOUND_GPUS)
    assert any("uses 8 devices" in notice for notice in notices)


def test_a_run_takes_no_more_gpus_than_make_whole_copies_of_its_layout():
    eight = {**FOUND_GPUS, "gpus": FOUND_GPUS["gpus"] * 2}
    for devices, taken in (("null", 6), ("8", 6), ("3", 3), ("5", 3), ("2", 3)):
        recipe = load_recipe("tiny-llama", None, ["tp=3", f"devices={devices}"])
        cluster, notices = choose_cluster(Request("tiny-llama"), recipe, eight)
        assert cluster.world_size == taken
        is_noticed = devices in ("8", "5")
        assert any(f"this run uses the {taken}" in notice for notice in notices) == is_noticed


def test_a_layout_for_more_gpus_than_there_are_is_refused():
    recipe = load_recipe("tiny-llama", None, ["tp=4", "pp=2"])
    with pytest.raises(UserError, match="a layout of 8 devices: this machine has 4 GPUs"):
        choose_cluster(Request("tiny-llama"), recipe, FOUND_GPUS)
    one = {**FOUND_GPUS, "gpus": FOUND_GPUS["gpus"][:1]}
    with pytest.raises(UserError, match=r"this machine has 1 GPU$"):
        choose_cluster(Request("tiny-llama"), recipe, one)
    wider = load_recipe("tiny-llama", None, ["tp=4", "devices=2"])
    assert choose_cluster(Request("tiny-llama"), wider, FOUND_GPUS)[0].world_size == 4


def test_what_would_fit_leaves_every_axis_alone():
    recipe = load_recipe(
        "llama31-8b", None, ["tp=2", "zero_stage=2", "dp_shard=2", "recompute=full"]
    )
    words = would_fit(recipe)
    for change in ("layout.tp=1", "layout.dp_shard=null", "layout.zero_stage=3"):
        assert f"--set {change}" in words
    overrides = tuple(word for word in words.replace(",", "").split() if "=" in word)
    assert load_recipe("llama31-8b", None, overrides).layout.dp_shard is None


def test_hybrid_shards_are_not_taken_for_more_memory():
    request = Request("llama31-70b", overrides=("zero_stage=3", "dp_shard=64"), device="cpu")
    with pytest.raises(UserError, match=r"1,051\.33 GiB"):
        make_plan(request)


def test_a_busy_machine_is_told_where_it_trains_itself_and_a_quiet_one_is_not():
    here = make_spec().cluster
    assert busy_notice({"cpu_busy_fraction": 0.05}, here) == []
    (notice,) = busy_notice({"cpu_busy_fraction": 0.8}, here)
    assert "80%" in notice
    elsewhere = here.model_copy(update={"launcher": "ssh"})
    assert busy_notice({"cpu_busy_fraction": 0.8}, elsewhere) == []


@pytest.mark.parametrize(("allocation", "told"), [(None, 0), ("7", 1)])
def test_a_job_that_waits_in_a_queue_is_not_told_how_busy_this_machine_is(
    allocation: str | None, told: int
):
    slurm = SlurmSettings(allocation=allocation)
    cluster = make_spec().cluster.model_copy(update={"launcher": "slurm", "slurm": slurm})
    assert len(busy_notice({"cpu_busy_fraction": 0.8}, cluster)) == told


def test_a_run_that_fits_as_it_stands_is_told_no_changes():
    phrase = would_fit(load_recipe("llama2-70b-lora"))
    assert "1 x B200, by the static memory bound" in phrase


@pytest.mark.parametrize(
    ("shell", "state", "then"), [("8", "RUNNING", "8"), (None, "RUNNING", "7"), (None, "", None)]
)
def test_another_run_is_in_this_shells_allocation_or_in_its_own_while_that_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str | None, state: str, then: str | None
):
    put(tmp_path, monkeypatch, squeue=f"[ -z '{state}' ] || echo '7|{state}|a|None'")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if shell:
        monkeypatch.setenv("SLURM_JOB_ID", shell)
    cluster = Cluster(
        name="c",
        device="cpu",
        devices_per_node=1,
        launcher="slurm",
        slurm=SlurmSettings(allocation="7"),
    )
    plan = replan(make_spec(cluster=cluster))
    assert plan.spec.cluster.slurm.allocation == then
    assert any("allocation 7 has ended" in notice for notice in plan.notices) == (then is None)
