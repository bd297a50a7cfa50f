"""Where a run goes: what was asked for, else what is there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.core.hardware import Cluster, SlurmSettings, with_secrets
from paceline.core.hosts import Host
from paceline.files.recipe import load_recipe
from paceline.machines.placement import HostPlacement, Request, choose_cluster, with_placement
from paceline.machines.probe.inventory import inventory
from paceline.runs.plan import make_plan

TWO = (Host(name="node-1"), Host(name="node-2"))
CLUSTER = Cluster(name="c", device="H100-SXM", devices_per_node=8)


@pytest.fixture
def with_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An sbatch in the path."""
    (tmp_path / "sbatch").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


@pytest.mark.parametrize(
    ("where", "environment", "kind"),
    [
        (HostPlacement(), {}, "local"),
        (HostPlacement(), {"SLURM_JOB_ID": "7"}, "local"),
        (HostPlacement(TWO), {}, "ssh"),
        (HostPlacement(TWO), {"SLURM_JOB_ID": "7"}, "slurm"),
        (HostPlacement(nodes=4), {"SLURM_JOB_ID": "7"}, "slurm"),
        (HostPlacement(nodes=4), {}, "slurm"),
        (HostPlacement(nodes=1), {}, "local"),
        (HostPlacement(allocation="7"), {}, "slurm"),
        (HostPlacement(TWO, launcher="slurm"), {}, "slurm"),
        (HostPlacement(TWO, launcher="ssh"), {"SLURM_JOB_ID": "7"}, "ssh"),
    ],
)
@pytest.mark.usefixtures("with_slurm")
def test_the_launcher_is_picked_by_what_is_there(
    where: HostPlacement, environment: dict[str, str], kind: str
):
    assert where.kind(environment) == kind


def test_hosts_keep_the_launcher_of_the_cluster_file() -> None:
    cluster = CLUSTER.model_copy(update={"launcher": "slurm"})
    placed = with_placement(cluster, HostPlacement(TWO))
    assert placed.launcher == "slurm" and len(placed.hosts) == 2


def test_slurm_settings_that_are_unset_come_from_the_users_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {
        "SBATCH_ACCOUNT": "bench",
        "SBATCH_PARTITION": "other",
        "SBATCH_SEGMENT_SIZE": "4",
        "SBATCH_REQUEUE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    cluster = CLUSTER.model_copy(update={"slurm": SlurmSettings(partition="gpu")})
    settings = with_placement(cluster, HostPlacement(nodes=4, launcher="slurm")).slurm
    assert settings == SlurmSettings(partition="gpu", account="bench", segment=4)
    assert settings.options() == {"partition": "gpu", "account": "bench", "segment": "4"}
    assert with_placement(cluster, HostPlacement(TWO, launcher="ssh")).slurm == cluster.slurm


def test_a_users_variable_that_is_empty_or_does_not_fit():
    assert SlurmSettings().with_variables({"SBATCH_PARTITION": ""}) == SlurmSettings()
    with pytest.raises(UserError, match=r"^SBATCH_SEGMENT_SIZE=many: .*valid integer"):
        SlurmSettings().with_variables({"SBATCH_SEGMENT_SIZE": "many"})


@pytest.mark.parametrize(
    ("timeout_s", "recipe_limits", "time"),
    [
        (None, (), "30"),
        (600.0, (), None),
        (None, ("time_limit_s=600",), None),
        (None, ("time_limit_s=null",), "30"),
    ],
)
def test_a_time_limit_of_the_run_goes_before_the_variable_of_sbatch(
    timeout_s: float | None,
    recipe_limits: tuple[str, ...],
    time: str | None,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("SBATCH_TIMELIMIT", "30")
    where = HostPlacement(TWO, launcher="slurm")
    request = Request("tiny-llama", cluster="dgx-h100", timeout_s=timeout_s, where=where)
    recipe = load_recipe("tiny-llama", None, recipe_limits)
    cluster, _ = choose_cluster(request, recipe, inventory())
    assert cluster.slurm.time == time


def test_without_slurm_many_nodes_need_hosts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert HostPlacement(nodes=4).kind({}) == "local"
    with pytest.raises(UserError, match="local runs only on this machine"):
        with_placement(CLUSTER, HostPlacement(nodes=4))


@pytest.mark.parametrize(
    ("launcher", "hosts", "nodes", "message"),
    [("ssh", (), None, "needs hosts; specify them"), ("ssh", TWO, 3, "there are 2 hosts")],
)
def test_what_is_not_there_is_refused(
    launcher: str, hosts: tuple[Host, ...], nodes: int | None, message: str
):
    with pytest.raises(UserError, match=message):
        with_placement(CLUSTER, HostPlacement(hosts, nodes, launcher))


def test_settings_of_the_place_reach_the_cluster(tmp_path: Path):
    config = tmp_path / "config"
    config.touch()
    where = HostPlacement(TWO, 1, "ssh", interface="ib0", bind="auto", ssh_config=config)
    cluster = with_placement(CLUSTER, where)
    assert (cluster.hosts, cluster.nodes, cluster.launcher) == (("node-1",), 1, "ssh")
    assert (cluster.interface, cluster.bind, cluster.ssh.config) == ("ib0", "auto", str(config))
    assert (
        with_placement(CLUSTER, HostPlacement(launcher="slurm", allocation="12")).slurm.allocation
        == "12"
    )


@pytest.mark.parametrize(
    ("slots", "devices", "per_node"), [(None, None, 1), (2, None, 2), (2, 4, 4)]
)
def test_slots_say_how_many_processes_a_host_runs(
    slots: int | None, devices: int | None, per_node: int
):
    hosts = tuple(Host(name=f"n{i}", slots=slots) for i in range(3))
    request = Request("tiny-llama", device="cpu", devices=devices, where=HostPlacement(hosts))
    cluster, notices = choose_cluster(request, load_recipe("tiny-llama", None, ()), inventory())
    assert (cluster.nodes, cluster.devices_per_node) == (3, per_node)
    assert any("assumed to be like this machine" in notice for notice in notices)


def test_slots_say_how_many_gpus_of_a_host_are_used():
    gpus = [{"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 80e9}] * 8
    machine = {**inventory(), "gpus": gpus, "packages": {"torch": "2.13.0"}}
    hosts = (Host(name="a", slots=4), Host(name="b", slots=4))
    request = Request("tiny-llama", where=HostPlacement(hosts))
    cluster, _ = choose_cluster(request, load_recipe("tiny-llama", None, ()), machine)
    assert (cluster.nodes, cluster.devices_per_node) == (2, 4)


@pytest.mark.parametrize("slots", [None, 1, 8])
def test_a_part_of_a_clusters_nodes_is_used_whatever_this_machine_has(slots: int | None):
    hosts = tuple(Host(name=name, slots=slots) for name in "ab")
    for count in (1, 8):
        request = Request(
            "tiny-llama",
            cluster="lambda-1cc-h100",
            devices_per_node=count,
            where=HostPlacement(hosts),
        )
        spec = make_plan(request).spec
        assert (spec.cluster.device, spec.cluster.nodes) == ("H100-SXM", 2)
        assert (spec.cluster.devices_per_node, spec.world_size) == (count, 2 * count)
    with pytest.raises(UserError, match=r"--gpus-per-node 9: a node of cluster .* has 8 devices"):
        make_plan(replace(request, devices_per_node=9))


def test_unequal_slots_are_refused():
    hosts = (Host(name="a", slots=2), Host(name="b", slots=4))
    with pytest.raises(UserError, match="2, 4 slots"):
        make_plan(Request("tiny-llama", device="cpu", where=HostPlacement(hosts)))
    first = make_plan(Request("tiny-llama", device="cpu", where=HostPlacement(hosts, nodes=1)))
    assert first.spec.cluster.devices_per_node == 2


def test_hosts_with_fewer_slots_than_the_cluster_has_devices_are_refused():
    for slots, words in ((4, "4 slots"), (1, "1 slot")):
        hosts = (Host(name="a", slots=8), Host(name="b", slots=slots))
        told = f"have {words}, and a node of cluster dgx-h100 8 devices"
        with pytest.raises(UserError, match=told):
            make_plan(Request("tiny-llama", cluster="dgx-h100", where=HostPlacement(hosts)))


def test_a_run_on_this_machine_bears_no_other_hosts_name():
    with pytest.raises(UserError, match="local runs only on this machine"):
        make_plan(
            Request("tiny-llama", device="cpu", where=HostPlacement(TWO[:1], launcher="local"))
        )


def test_hosts_are_no_setting():
    def key(*hosts: Host) -> str:
        return make_plan(Request("tiny-llama", device="cpu", where=HostPlacement(hosts))).spec.key

    assert key(*TWO) == key(Host(name="a"), Host(name="b")) != key(TWO[0])


def test_secrets_of_a_cluster_are_stored_by_name_alone(monkeypatch: pytest.MonkeyPatch):
    env = {"HF_TOKEN": "hf_s3cret", "OPEN": "http://proxy:3128"}
    behind = CLUSTER.model_copy(update={"env": {"https_proxy": "http://me:pw@proxy:3128"}})
    assert "pw" not in behind.model_dump_json()
    cluster = CLUSTER.model_copy(update={"env": env})
    stored = Cluster.model_validate_json(cluster.model_dump_json())
    assert "hf_s3cret" not in cluster.model_dump_json() and stored.env["OPEN"] == env["OPEN"]
    assert with_secrets(cluster.env, {}) == env
    assert with_secrets(stored.env, {"HF_TOKEN": "again"}) == {**env, "HF_TOKEN": "again"}
    with pytest.raises(UserError, match=r"HF_TOKEN.*was not stored"):
        with_secrets(stored.env, {})


def test_an_allocation_that_was_named_goes_before_the_one_of_this_shell(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    on_slurm = HostPlacement(launcher="slurm")
    named = CLUSTER.model_copy(
        update={"slurm": CLUSTER.slurm.model_copy(update={"allocation": "4"})}
    )
    assert with_placement(CLUSTER, on_slurm).slurm.allocation == "7"
    assert with_placement(named, on_slurm).slurm.allocation == "4"
    assert (
        with_placement(named, HostPlacement(launcher="slurm", allocation="9")).slurm.allocation
        == "9"
    )


def test_from_a_machine_without_gpus_those_of_the_hosts_must_be_named():
    machine, recipe = {**inventory(), "gpus": []}, load_recipe("tiny-gpt")
    _, notices = choose_cluster(Request("tiny-gpt", where=HostPlacement(TWO)), recipe, machine)
    assert (
        "no GPU is visible here" in notices[-1]
        and "specify them with --cluster FILE" in notices[-1]
    )
    with pytest.raises(UserError, match="specify them with --cluster FILE"):
        choose_cluster(
            Request("tiny-gpt", device="cuda", where=HostPlacement(TWO)), recipe, machine
        )
    _, notices = choose_cluster(
        Request("tiny-gpt", device="cpu", where=HostPlacement(TWO)), recipe, machine
    )
    assert "--cluster" not in notices[-1]
