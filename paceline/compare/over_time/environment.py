"""Recorded environment of runs as named items, and the items that changed between two runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from paceline.core.fabric import FabricProof
from paceline.core.units import GIB
from paceline.core.value import Value

Items = Mapping[str, str]
"""Value of each item as text. Items that were not recorded are missing."""

ABSENT = "absent"
"""Value of an item that was looked for and not found, such as a package or a variable."""

NAMES: dict[str, str] = {
    "fabric": "transport of collectives",
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
"""Names of items by their path in the inventory, the likeliest causes of a speed change first."""

_LAST_NAMED = "distribution"
"""Packages, variables and other unnamed items are ranked together with this item."""

_RECORDED = {"packages": "", "environment": "$", "cpu.mitigations": "CPU mitigation "}
"""Paths with items of any name, and the prefix of these names in reports. The path itself is also
an item, which marks that the inventory looked there."""

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
"""Items that differ in every run, or that another item reports as well."""


class EnvironmentChange(Value):
    """One recorded item that changed between two runs."""

    item: str
    before: str
    after: str
    only_here: bool
    """True if the item has one value in all runs before, and one in all runs after."""


def environment_items(
    inventory: Mapping[str, Any],
    versions: Mapping[str, str],
    trainer: str | None = None,
    fabric: FabricProof | None = None,
) -> dict[str, str]:
    """Return the recorded items of one run, without empty values.

    The sources are an inventory, the versions that the run's ranks reported, a digest of the
    trainer's files, and what carries collectives.
    """
    items = dict(_flat(inventory, ""))
    items |= {f"versions.{name}": version for name, version in versions.items()}
    items |= {"fabric": fabric.label} if fabric and fabric.label else {}
    items |= {"trainer": trainer} if trainer else {}
    return {name: value for name, value in items.items() if name not in _VOLATILE}


def environment_changes(
    before: Sequence[Items], after: Sequence[Items]
) -> tuple[EnvironmentChange, ...]:
    """Return the changes from the last run `before` to the first `after`, likeliest cause first.

    An item that only one of the two runs recorded is not a change, unless the other looked for it
    and did not find it.
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
    # Both the ranks and the package list may report torch, so duplicates are removed.
    return tuple(dict.fromkeys(change for _, change in sorted(changes, key=lambda pair: pair[0])))


def item_name(path: str) -> str:
    """Return an item's name for people: `NVIDIA driver`, `$NCCL_ALGO`, `triton`."""
    for root, prefix in _RECORDED.items():
        if path.startswith(f"{root}."):
            return prefix + path.removeprefix(f"{root}.")
    return NAMES.get(path, path)


def _steady(side: Sequence[Items], name: str, nearest: Items) -> bool:
    """Return whether all runs that recorded the item agree; other runs are ignored."""
    schema = nearest.get(SCHEMA)
    values = {_value(items, name, items.get(SCHEMA) == schema) for items in side}
    return len(values - {None}) == 1


def _value(items: Items, name: str, alike: bool) -> str | None:
    """Return the item's value, ABSENT if it was not found, or None if it was not looked for.

    Packages, variables and mitigations are recorded only if present. Which ones are looked for
    depends on the inventory's schema, so the schemas of both runs must be `alike`.
    """
    if name in items:
        return items[name]
    was_searched = alike and any(
        name.startswith(f"{root}.") and root in items for root in _RECORDED
    )
    return ABSENT if was_searched else None


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
    """Yield each property once if all devices agree, else every distinct value."""
    yield "gpus.count", str(len(gpus))
    for name in dict.fromkeys(name for gpu in gpus for name in gpu):
        path = f"gpus.{name}"
        texts = [_text(path, gpu[name]) for gpu in gpus if gpu.get(name) is not None]
        if texts:
            yield path, ", ".join(dict.fromkeys(texts))


def _text(path: str, value: Any) -> str:
    if path.endswith("_bytes") and isinstance(value, int | float):
        # The kernel's own share differs by a few MiB between versions; that is not a memory change.
        return f"{float(f'{value / GIB:.2g}'):g} GiB"
    return f"{value:g}" if isinstance(value, float) else str(value)
