"""Lines as NCCL writes them: the forms are those of logs in public issues, the numbers are made."""

from __future__ import annotations

HOSTS = ("node-001", "node-002")
PER_HOST = 4
FLOAT, BF16 = 7, 9


def who(rank: int) -> str:
    """The begin of a process's lines."""
    local = rank % PER_HOST
    return f"{HOSTS[rank // PER_HOST]}:{4000 + rank}:{4000 + rank} [{local}] NCCL INFO"


def begun(rank: int, pointer: str, place: int, size: int, shared: str | None) -> str:
    """A communicator is there; older versions do not print what its ranks share."""
    named = f"commId {shared} " if shared else ""
    return (
        f"{who(rank)} ncclCommInitRank comm {pointer} rank {place} nranks {size} cudaDev "
        f"{rank % PER_HOST} nvmlDev {rank % PER_HOST} busId 1b000 {named}- Init COMPLETE"
    )


def call(
    rank: int, name: str, count: int, pointer: str, size: int, number: int = 0, kind: int = FLOAT
) -> str:
    """A collective, or a message to or from rank 1."""
    root = 1 if name in ("Send", "Recv") else 0
    return (
        f"{who(rank)} {name}: opCount {number:x} sendbuff 0x7fb201e00400 recvbuff 0x7fb201e00400 "
        f"count {count} datatype {kind} op 0 root {root} comm {pointer} [nranks={size}] "
        "stream 0x558f83fe3ca0"
    )


def channel(rank: int, begin: int, end: int, via: str) -> str:
    """A connection of a ring or a tree."""
    return f"{who(rank)} Channel 00/0 : {begin}[{begin % 4}] -> {end}[{end % 4}] {via}"


def setup() -> list[str]:
    """Eight processes of tp 2 x dp 4 on two hosts, by InfiniBand."""
    lines = [
        f"{who(0)} Bootstrap : Using eth0:10.0.0.1<0>",
        "NCCL version 2.21.5+cuda12.4",
        f"{who(0)} NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>",
        f"{who(0)} Using network IB",
        f"{who(0)} NCCL_IB_HCA set by environment to mlx5",
        f"{who(0)} 24 coll channels, 0 collnet channels, 0 nvls channels, 32 p2p channels",
        channel(0, 0, 1, "via P2P/CUMEM/read"),
        channel(0, 3, 4, "[send] via NET/IB/0/GDRDMA"),
        channel(4, 3, 4, "[receive] via NET/IBext_v8/1/GDRDMA"),
    ]
    for rank in range(8):
        lines.append(begun(rank, f"0xa{rank}", rank, 8, "0xadcb40d61cc1bc4b"))
        lines.append(begun(rank, f"0xb{rank}", rank % 2, 2, f"0x1{rank // 2}"))
        lines.append(begun(rank, f"0xc{rank}", rank // 2, 4, f"0x2{rank % 2}"))
    return lines


def steps(num: int = 2) -> list[str]:
    """Calls of every process: sums over tp, gradients and weights over dp, a scalar over all."""
    lines: list[str] = []
    for step in range(num):
        for rank in range(8):
            lines += [call(rank, "AllReduce", 1024, f"0xb{rank}", 2, 17 + step, BF16)] * 3
            lines.append(call(rank, "ReduceScatter", 500, f"0xc{rank}", 4, step))
            lines.append(call(rank, "AllGather", 500, f"0xc{rank}", 4, step, BF16))
            lines.append(call(rank, "AllReduce", 1, f"0xa{rank}", 8, step))
    return lines
