"""Transports and ports by NCCL's logs of a run, one file per process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.profiles.nccl.fabric_facts import FabricFacts, fabric_facts, read_fabric_logs

NVLINK = "Pattern 4, crossNic 0, nChannels 12, bw 30.000000/30.000000, type NVL/PIX, sameChannels 1"
PCIE = "Pattern Ring, crossNic 0, nChannels 2, bw 10.0/10.0, type PHB/SYS, sameChannels 1"
ALONE = "Pattern 4, crossNic 0, nChannels 16, bw 40.0/40.0, type LOC/PIX, sameChannels 1"
PEER = "Channel 00/24 : 0[0] -> 1[1] via P2P/CUMEM/read"
MEMORY = "Channel 00/02 : 0[0] -> 1[1] via SHM/direct/direct"


def network(via: str, device: str = "0") -> str:
    return f"Channel 00/0 : 1[1] -> 2[0] [send] via NET/{via}/{device}/GDRDMA"


IB = "NET/IB : Using [0]mlx5_0:1/IB/SHARP [1]mlx5_1:1/IB/SHARP [RO]; OOB eth0:10.0.0.1<0>"
ROCE = "NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>"
SOCKET = "NET/Socket : Using [0]eth0:10.0.0.1<0> [1]docker0:172.17.0.1<0>"
EFA = "NET/OFI Selected provider is efa, fabric is efa-direct (found 32 nics)"
OLD_EFA = "NET/OFI Selected Provider is efa (found 4 nics)"


def facts(folder: Path, *hosts: Sequence[str]) -> FabricFacts:
    """The facts of hosts, each with the lines of one process."""
    (folder / "logs").mkdir()
    for at, lines in enumerate(hosts):
        text = "".join(f"node-{at}:70{at}:71{at} [0] NCCL INFO {line}\n" for line in lines)
        (folder / f"logs/nccl.node-{at}.70{at}.log").write_text(text)
    return fabric_facts(read_fabric_logs(folder))


@pytest.mark.parametrize(
    ("lines", "within", "between"),
    [
        ([IB, NVLINK, PEER, network("IB")], ("nvlink",), ("infiniband",)),
        ([IB, NVLINK, PEER, network("IBext_v8")], ("nvlink",), ("infiniband",)),
        ([ROCE, NVLINK, PEER, network("IB")], ("nvlink",), ("roce",)),
        ([EFA, NVLINK, PEER, network("Libfabric")], ("nvlink",), ("efa",)),
        ([OLD_EFA, NVLINK, PEER, network("AWS Libfabric")], ("nvlink",), ("efa",)),
        ([EFA.replace("efa", "cxi"), network("AWS Libfabric")], (), ("slingshot",)),
        ([EFA.replace("efa", "tcp"), network("AWS Libfabric")], (), ("sockets",)),
        ([NVLINK, PEER, network("gIB")], ("nvlink",), ("gib",)),
        ([NVLINK, PEER, network("FasTrak")], ("nvlink",), ("tcpx",)),
        ([NVLINK, PEER, network("GPUDirectTCPX_v7")], ("nvlink",), ("tcpx",)),
        ([SOCKET, PCIE, PEER, "Channel 00/0 : 0[0] -> 2[0] [send] via NET/Socket/0"],
         ("pcie",), ("sockets",)),
        ([PCIE, MEMORY], ("shm",), ()),
        ([PEER], ("p2p",), ()),  # without GRAPH lines the path is not known
        ([PEER, "Connected NVLS tree"], ("nvlink",), ()),
        ([PEER, "24 coll channels, 24 collnet channels, 0 nvls channels, 32 p2p channels"],
         ("p2p",), ()),
        ([PEER, "24 coll channels, 0 collnet channels, 16 nvls channels, 32 p2p channels"],
         ("nvlink",), ()),
        ([ALONE, "Channel 00 : 0[0] -> 1[0] via P2P/MNNVL"], (), ("nvlink",)),
        ([network("Nextgen")], (), ("Nextgen",)),  # unknown: NCCL's own name
        ([], (), ()),
    ],
)  # fmt: skip
def test_transports(
    tmp_path: Path, lines: list[str], within: tuple[str, ...], between: tuple[str, ...]
) -> None:
    found = facts(tmp_path, lines)
    assert (found.within, found.between) == (within, between)


def test_the_host_with_the_fewest_ports_counts(tmp_path: Path) -> None:
    whole = [IB, network("IB", "0"), network("IB", "1")]
    found = facts(tmp_path, whole, [IB, network("IB", "1(1)")])
    assert found.ports == (1, 2) and found.gpu_direct == 1.0
    assert found.interfaces == ()


def test_a_host_that_fell_back_is_not_hidden_by_the_others(tmp_path: Path) -> None:
    slow = [SOCKET, "Channel 00/0 : 1[1] -> 2[0] [send] via NET/Socket/0"]
    found = facts(tmp_path, [IB, network("IB")], slow)
    assert found.between == ("infiniband", "sockets")
    assert found.interfaces == ("eth0", "docker0") and found.gpu_direct == 0.5


def test_the_output_of_ranks_counts_only_for_a_user_who_made_nccl_log_there(
    tmp_path: Path,
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank-00000.log").write_text(f"a:1:2 [0] NCCL INFO {PEER}\n")
    assert read_fabric_logs(tmp_path) == {}
    assert fabric_facts(read_fabric_logs(tmp_path, reads_output=True)).within == ("p2p",)
