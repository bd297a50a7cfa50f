"""What carries collectives: the sentence, requirements, and interfaces nobody requested."""

from __future__ import annotations

import pytest

from paceline.core.fabric import FabricProof, Requirement, doubtful_interface, unmet


def proof(*between: str, within: tuple[str, ...] = ("nvlink",), nodes: int = 2) -> FabricProof:
    return FabricProof(nodes=nodes, on_gpus=True, within_node=within, between_nodes=between)


def test_the_sentence_names_transport_ports_and_bandwidth() -> None:
    full = proof("infiniband").model_copy(
        update={
            "used_ports": 7,
            "available_ports": 8,
            "gpu_direct": 1.0,
            "bus_bytes_per_s": 320e9,
            "expected_bytes_per_s": 400e9,
            "link": "InfiniBand-NDR",
        }
    )
    assert full.sentence == (
        "Collectives: InfiniBand between nodes, NVLink within a node (7 of 8 ports used, GPU "
        "Direct RDMA); all-reduce bus bandwidth 320 GB/s, 80% of 400 GB/s (InfiniBand-NDR)."
    )
    slow = proof("sockets").model_copy(update={"interfaces": ("eth0",), "gpu_direct": 0.0})
    assert slow.sentence == (
        "Collectives: TCP sockets between nodes, NVLink within a node (eth0, no GPU Direct RDMA)."
    )
    assert proof(within=()).sentence == "Collectives: transport unknown."


@pytest.mark.parametrize(
    ("required", "between", "within", "is_met"),
    [
        ("rdma", ("roce",), ("nvlink",), True),
        ("rdma", ("efa",), (), True),
        ("rdma", ("nvlink",), ("nvlink",), True),  # NVL72
        ("rdma", ("sockets",), ("nvlink",), False),
        ("rdma", ("infiniband", "sockets"), ("nvlink",), False),  # one node fell back
        ("rdma", ("tcpx",), ("nvlink",), False),
        ("infiniband", ("roce",), ("nvlink",), False),
        ("nvlink", ("sockets",), ("nvlink",), True),
        ("nvlink", ("infiniband",), ("nvlink", "shm"), False),
        ("nvlink", ("nvlink",), (), True),  # one GPU per node
        ("sockets", ("sockets",), ("nvlink",), True),
        ("sockets", ("infiniband",), ("nvlink",), False),
        ("rdma", (), ("nvlink",), False),  # no evidence
    ],
)
def test_a_requirement_is_met_only_by_every_transport(
    required: Requirement, between: tuple[str, ...], within: tuple[str, ...], is_met: bool
) -> None:
    assert (unmet(proof(*between, within=within), required) is None) is is_met


def test_a_network_requirement_does_not_apply_to_one_node() -> None:
    one = proof(within=("shm",), nodes=1)
    assert unmet(one, "rdma") is None
    assert "collectives use CPU memory (SHM)" in (unmet(one, "nvlink") or "")


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("eth1", "169.254.3.7"),
        ("docker0", "172.17.0.1"),
        ("br-0123456789ab", ""),
        ("cni0", ""),
        ("veth12ab", ""),
        ("cali7c0", ""),
        ("flannel.1", ""),
        ("ib0", "fe80::1"),
    ],
)
def test_container_and_link_local_interfaces_are_doubtful(name: str, address: str) -> None:
    assert name in (doubtful_interface(name, address) or "")


@pytest.mark.parametrize("name", ["eth0", "ib0", "bond0", "enp1s0f0", "ens5", "br0", "cx7"])
def test_other_interfaces_are_not(name: str) -> None:
    assert doubtful_interface(name, "10.0.0.7") is None
