"""The recorded surroundings of runs as named items, and which of them changed between two runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from paceline.core.units import GIB
from paceline.core.value import Value

Items = Mapping[str, str]
"""Item -> value as text; items that nobody recorded are missing."""

ABSENT = "absent"
"""What an item is where it was looked for and is not there: a package, a variable."""

NAMES: dict[str, str] = {
    "container.digest": "container image digest",
    "container.image": "container image",
    "gpus.driver": "NVIDIA driver",
    "gpus.cuda_driver": "CUDA of the driver",
    "kernel": "kernel",
    "versions.cuda": "CUDA",
    "versions.torch": "torch",
    "versions.paceline": "Paceline",
    "trainer": "files of the trainer",
    "gpus.name": "GPU",
    "gpus.count": "visible GPUs",
    "gpus.power_limit_w": "GPU power limit, W",
    "gpus.max_sm_clock_mhz": "GPU clock limit, MHz",
    "gpus.application_sm_clock_mhz": "GPU application clock, MHz",
    "gpus.max_memory_clock_mhz": "GPU memory clock limit, MHz",
    "gpus.vbios": "GPU VBIOS",
    "gpus.ecc": "GPU ECC",
    "gpus.mig": "GPU MIG",
    "gpus.persistence": "GPU persistence mode",
    "gpus.memory_bytes": "GPU memory",
    "cpu.model": "CPU",
    "cpu.microcode": "CPU microcode",
    "cpu.governor": "CPU governor",
    "cpu.frequency_driver": "CPU frequency driver",
    "cpu.max_clock_khz": "CPU clock limit, kHz",
    "cpu.boost": "CPU boost",
    "cpu.hyperthreads": "CPU hyper-threads",
    "cpu.usable_cores": "usable cores",
    "cpu.numa_nodes": "NUMA nodes",
    "memory_bytes": "memory",
    "transparent_hugepages": "transparent huge pages",
    "distribution": "operating system",
    "container.kind": "container",
    "versions.python": "Python",
    "host": "host",
    "gpus.uuid": "GPU boards",
    "swap_bytes": "swap",
}
"""Items by their place in the inventory, the likeliest causes of another speed first."""

_LAST_NAMED = "distribution"
"""Packages, variables and whatever else has no name here come beside this item."""

_RECORDED = {"packages": "", "environment": "$", "cpu.mitigations": "CPU mitigation "}
"""Places with items of any name, and what stands before these in reports. The place itself is an
item too, which says that somebody looked there."""

SCHEMA = "schema"

_VOLATILE = frozenset(
    {
        "os",
        "python",
        "load_average_1min",
        "cpu_busy_fraction",
        "packages.python",
        "cpu.architecture",
        "cpu.logical_cores",
        "cpu.physical_cores",
        "cpu.native_bf16",
        "environment.SLURM_JOB_ID",
    }
)
"""What differs in every run, or is said by another item as well."""


class EnvironmentChange(Value):
    """One recorded item that is not the same before and after."""

    item: str
    before: str
    after: str
    only_here: bool
    """Whether it keeps one value in all runs before, and one in all runs after."""


def environment_items(
    inventory: Mapping[str, Any], versions: Mapping[str, str], trainer: str | None = None
) -> dict[str, str]:
    """The recorded items of one run: an inventory, the versions that its ranks told, and a digest
    of the trainer's files. Empty values are left out.
    """
    items = dict(_flat(inventory, ""))
    items |= {f"versions.{name}": version for name, version in versions.items()}
    items |= {"trainer": trainer} if trainer else {}
    return {name: value for name, value in items.items() if name not in _VOLATILE}


def environment_changes(
    before: Sequence[Items], after: Sequence[Items]
) -> tuple[EnvironmentChange, ...]:
    """What changed between the last run `before` and the first `after`, the likeliest cause first.

    What only one of the two recorded is no change, unless the other looked for it in vain.
    """
    last, first = before[-1], after[0]
    alike = last.get(SCHEMA) == first.get(SCHEMA)
    changes: list[tuple[tuple[bool, int, str], EnvironmentChange]] = []
    for name in {**last, **first}.keys() - {SCHEMA, *_RECORDED}:
        old, new = _value(last, name, alike), _value(first, name, alike)
        if old is None or new is None or old == new:
            continue
        only_here = _steady(before, name, last) and _steady(after, name, first)
        change = EnvironmentChange(item=item_name(name), before=old, after=new, only_here=only_here)
        changes.append(((not only_here, *_rank(name)), change))
    # torch may be told twice, by the ranks and by the packages beside Paceline.
    return tuple(dict.fromkeys(change for _, change in sorted(changes, key=lambda pair: pair[0])))


def item_name(path: str) -> str:
    """An item's name for people: `NVIDIA driver`, `$NCCL_ALGO`, `triton`."""
    for root, shown in _RECORDED.items():
        if path.startswith(f"{root}."):
            return shown + path.removeprefix(f"{root}.")
    return NAMES.get(path, path)


def _steady(side: Sequence[Items], name: str, nearest: Items) -> bool:
    """True when all that recorded the item agree; who did not look cannot differ."""
    schema = nearest.get(SCHEMA)
    values = {_value(items, name, items.get(SCHEMA) == schema) for items in side}
    return len(values - {None}) == 1


def _value(items: Items, name: str, alike: bool) -> str | None:
    """The item's value; ABSENT if it was looked for in vain, None if nobody looked.

    Packages, variables and mitigations are recorded if they are there. Which ones are looked for
    depends on the inventory's schema, so that of both runs must be `alike`.
    """
    if name in items:
        return items[name]
    looked = alike and any(name.startswith(f"{root}.") and root in items for root in _RECORDED)
    return ABSENT if looked else None


def _rank(name: str) -> tuple[int, str]:
    order = list(NAMES)
    return order.index(name if name in NAMES else _LAST_NAMED), name


def _flat(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        if path in _RECORDED:
            yield path, "recorded"
        for name, part in cast("Mapping[str, Any]", value).items():
            yield from _flat(part, f"{path}.{name}" if path else name)
    elif path == "gpus" and isinstance(value, list):
        devices = cast("list[Any]", value)
        yield from _gpus([cast("Mapping[str, Any]", d) for d in devices if isinstance(d, Mapping)])
    elif value is not None and path:
        yield path, _text(path, value)


def _gpus(gpus: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Each property once if all devices agree, else every distinct value."""
    yield "gpus.count", str(len(gpus))
    for name in dict.fromkeys(name for gpu in gpus for name in gpu):
        path = f"gpus.{name}"
        texts = [_text(path, gpu[name]) for gpu in gpus if gpu.get(name) is not None]
        if texts:
            yield path, ", ".join(dict.fromkeys(texts))


def _text(path: str, value: Any) -> str:
    if path.endswith("_bytes") and isinstance(value, int | float):
        # A new kernel keeps a few more MiB to itself, which is not another memory.
        return f"{float(f'{value / GIB:.2g}'):g} GiB"
    return f"{value:g}" if isinstance(value, float) else str(value)
