"""NCCL's log lines, as NCCL 2.4 to 2.28 and RCCL write them, found anywhere in a block of text.

Several processes write into one file, so a line may stand behind the begin of another, and lack its
own. `opCount` is hexadecimal. `count` is the argument of the call: what one rank puts into an
all-gather, what one gets from a reduce-scatter.
"""

from __future__ import annotations

import re

from paceline.core.traffic import Collective

COLLECTIVES: dict[bytes, Collective] = {
    b"AllReduce": "all_reduce",
    b"AllGather": "all_gather",
    b"ReduceScatter": "reduce_scatter",
    b"Broadcast": "broadcast",
    b"Reduce": "reduce",
    b"AllToAll": "all_to_all",
    b"AlltoAll": "all_to_all",
    b"Send": "send",
    b"Recv": "recv",
}
OF_ONE_RANK: frozenset[Collective] = frozenset({"all_gather", "reduce_scatter", "all_to_all"})
"""Their count is one rank's part of the whole."""
DATATYPE_BYTES = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)
"""By NCCL's number: int8 uint8 int32 uint32 int64 uint64 fp16 fp32 fp64 bf16 and two of fp8."""
ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
PROTOCOLS = ("LL", "LL128", "Simple")
CALL_MARK = b": opCount "

_WHO = rb"(?:([\w.-]{1,253}:\d{1,10}):\d{1,10} \[\d+\] (?:\d+ )?NCCL INFO )?"
CALL = re.compile(
    _WHO + rb"(" + b"|".join(COLLECTIVES) + rb"): opCount [0-9a-fx]{1,18} sendbuff \S{1,20} "
    rb"recvbuff \S{1,20} (?:acc \S{1,20} )?count (\d{1,18}) datatype (\d{1,2}) op \d+ root -?\d+ "
    rb"comm (0x[0-9a-f]{1,16}) \[nranks=(\d{1,7})\]"
)
"""(process, collective, count, datatype, communicator's pointer, ranks)."""
COMMUNICATOR = re.compile(
    rb"([\w.-]{1,253}:\d{1,10}):\d{1,10} \[\d+\] NCCL INFO (?:\w{4,30} )?comm (0x[0-9a-f]{1,16}) "
    rb"rank (\d{1,7}) n[Rr]anks (\d{1,7}) [^\r\n]{0,200}?"
    rb"(?:commId (0x[0-9a-f]{1,16}) )?- Init COMPLETE"
)
"""(process, pointer, rank, ranks, id that all its ranks share, in newer versions)."""
CHOICE = re.compile(
    rb"NCCL INFO (?:(\w{3,20}): )?(\d{1,18}) Bytes -> Algo (\w{1,16}) proto (\w{1,8})"
    rb"(?: channel\{Lo\.\.Hi\}=\{(\d{1,4})\.\.(\d{1,4})\})?"
)
"""(collective, bytes, algorithm, protocol, first channel, last channel)."""
CHANNEL = re.compile(
    rb"([\w.-]{1,253}:\d{1,10}):\d{1,10} \[\d+\] NCCL INFO Channel \d+(?:/\d+)? : "
    rb"(\d{1,7})\[\w+\] -> (\d{1,7})\[\w+\] (?:\[(?:send|receive)\] )?via ([^\r\n]{3,60})"
)
"""(process, from, to, transport)."""
CHANNELS = re.compile(rb"NCCL INFO (\d{1,4}) coll channels, ")
VERSION = re.compile(rb"(?:NCCL|RCCL) version (?:: )?(\d+\.\d+\.\d+[\w.+-]{0,40})")
NETWORK = re.compile(rb"NCCL INFO Using network ([^\r\n]{1,40})")
DEVICES = re.compile(rb"NCCL INFO NET/(IB\w*) ?: Using ((?: ?\[\d+\]\w+:\d+/\w+)+)")
DEVICE = re.compile(rb"\[\d+\](\w+:\d+/\w+)")
NO_DEVICE = re.compile(rb"NCCL INFO NET/IB ?: No device found")
SOCKET = re.compile(
    rb"NCCL INFO (?:NET/Socket ?: Using|Bootstrap ?: Using) ((?:\[?\d*\]?[\w.-]+:)\S+)"
)
INTERFACE = re.compile(rb"^(?:\[\d+\])?([\w.-]+):")
SETTING = re.compile(rb"NCCL INFO (N?R?CCL_\w{2,40}) set by environment to ([^\r\n]{1,80})")
COMPLAINT = re.compile(rb"NCCL WARN ([^\r\n]{1,300})")


def datatype_bytes(number: int) -> int | None:
    """Bytes of one element, None for a type that is not known."""
    return DATATYPE_BYTES[number] if number < len(DATATYPE_BYTES) else None


def transport(text: bytes) -> str:
    """`P2P/CUMEM/read` -> `P2P/CUMEM`, `NET/IB/3/GDRDMA` -> `NET/IB GDRDMA`."""
    words = text.decode("ascii", "replace").split(" comm ")[0].strip().split("/")
    kind = "/".join(words[:2])
    direct = words[0] == "NET" and any(word.startswith("GDRDMA") for word in words[2:])
    return f"{kind} GDRDMA" if direct else kind


def named(word: bytes, names: tuple[str, ...]) -> str:
    """An algorithm or a protocol, which older versions print as a number."""
    text = word.decode("ascii", "replace")
    if text.isdigit():
        return names[int(text)] if int(text) < len(names) else text
    return next((name for name in names if name.upper() == text.upper()), text)
