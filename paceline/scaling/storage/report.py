"""Report of a storage measurement: rates by host and folder, slow disks, a training's demand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from paceline.core.hosts import compress
from paceline.core.node_groups import GroupThroughput
from paceline.core.run import RunSpec
from paceline.core.shape import DecoderShape, trainable_parameters
from paceline.core.units import binary, percent, seconds, si
from paceline.core.value import Value
from paceline.scaling.analysis.node_speeds import node_speeds
from paceline.scaling.analysis.slow_nodes import MIN_COMPARED_NODES, judge_nodes
from paceline.scaling.network.readings import relative_spread
from paceline.staging.conversions.indexed import token_dtype

TOKEN_BYTES = {"uint16": 2, "uint32": 4, "int32": 4, "int64": 8}
WEIGHT_BYTES, MOMENTS_BYTES = 4, 8
"""Bytes per parameter in the native trainer's checkpoints: fp32, and Adam's two moments if
trained."""


class StorageDemand(Value):
    """Storage demand of one training run; None where it is unknown."""

    recipe: str
    source: str
    """Source of samples/s: an estimate for some devices, or a measured run."""
    hosts: int
    samples_per_s: float | None
    """Samples/s of the whole training run."""
    low_samples_per_s: float | None = None
    """Lower end of the 80% interval of an estimate."""
    high_samples_per_s: float | None = None
    """Upper end of the 80% interval of an estimate."""
    host_samples_per_s: float | None
    """Samples/s that a host's replicas read, each sample once: S x min(1, replicas per host /
    dp)."""
    sample_bytes: int | None
    """Bytes of seq_len + 1 tokens; None for samples of another kind."""
    checkpoint_bytes: float
    """Bytes over all hosts: 4 per parameter and 8 more for each trained one."""
    notes: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """The demand in words."""
        checkpoint = f"a checkpoint has {binary(self.checkpoint_bytes)}"
        if self.samples_per_s is None or self.host_samples_per_s is None:
            return f"{self.recipe}: {'; '.join(self.notes)}; {checkpoint}."
        size = "" if self.sample_bytes is None else f" of {self.sample_bytes:,} bytes"
        rate = f"{self.samples_per_s:,.1f} samples/s"
        bytes_per_s = (
            ""
            if self.sample_bytes is None
            else f" ({si(self.host_samples_per_s * self.sample_bytes, 'B/s')})"
        )
        return (
            f"{self.recipe} needs {rate} ({self.source}), each host "
            f"{self.host_samples_per_s:,.1f}{size}{bytes_per_s}; {checkpoint}."
        )


def demand_of(
    spec: RunSpec,
    source: str,
    samples_per_s: float | None,
    interval: tuple[float | None, float | None] = (None, None),
    notes: tuple[str, ...] = (),
) -> StorageDemand:
    """Return the demand of a resolved run with this speed."""
    on_host = max(1, spec.cluster.devices_per_node // spec.layout.model_devices)
    share = min(1.0, on_host / spec.dp)
    parameters = WEIGHT_BYTES * spec.num_parameters
    moments = MOMENTS_BYTES * trainable_parameters(spec.model, spec.lora)
    return StorageDemand(
        recipe=spec.recipe,
        source=source,
        hosts=spec.cluster.nodes,
        samples_per_s=samples_per_s,
        low_samples_per_s=interval[0],
        high_samples_per_s=interval[1],
        host_samples_per_s=None if samples_per_s is None else samples_per_s * share,
        sample_bytes=sample_bytes(spec),
        checkpoint_bytes=parameters + moments,
        notes=notes,
    )


def sample_bytes(spec: RunSpec) -> int | None:
    """Return the bytes of seq_len + 1 tokens in data files; None for samples that are not tokens.

    Text counts as the indexed data set that it is converted to.
    """
    if not isinstance(spec.model, DecoderShape):
        return None
    if spec.data.source == "tokens":
        width = TOKEN_BYTES[spec.data.token_dtype]
    else:
        width = token_dtype(spec.model.vocab_size).itemsize
    return (spec.training.seq_len + 1) * width


OPERATIONS = {
    "write": "sequential write",
    "read": "sequential read",
    "sample": "random sample read",
    "checkpoint": "checkpoint with fsync",
    "small_file": "small files",
}
"""Titles by the trainer's operation names, in the order of the table."""
CACHED_SHARE = 0.01
"""Share of a file in the page cache above which its reads may come from there."""


IN_MEMORY = ("tmpfs", "ramfs")
READ_AHEAD_RATIO = 64
"""Ratio of read-ahead to a sample's bytes from which it is reported."""


class StoragePlace(Value):
    """A folder on a host, and the file system it is on."""

    host: str
    path: str
    file_system: str | None
    source: str | None
    """Device or server; None where the kernel does not report it."""
    free_bytes: int
    read_ahead_bytes: int | None
    """Bytes that the kernel may read around each missing page of a mapped file; None if unknown."""


class StorageRow(Value):
    """One operation by a number of processes of a host at once, each with its own file."""

    host: str
    path: str
    operation: str
    processes: int
    unit_bytes: int
    """Bytes of one operation: a block, a sample, a checkpoint's part, or a small file."""
    bytes_per_s: float
    """Sum over the processes of each one's median block of operations."""
    units_per_s: float
    """The same rate in operations: samples/s, files/s."""
    sustained_bytes_per_s: float
    """All bytes over all seconds of each process, summed. Stalls count, as they do for loaders."""
    slowest_bytes_per_s: float
    """Rate of the slowest process."""
    unit_s: float
    """Median seconds of one operation, averaged over the processes."""
    slow_unit_s: float
    """99th percentile of the seconds of one operation, of the slowest process; with fewer than 100
    operations their maximum."""
    n: int
    """Number of operations of the process with the fewest."""
    spread: float | None
    """1.4826 x MAD / median of a process's blocks, averaged over all; None for a single block."""
    method: str
    """Method by which the measurement bypassed or used the page cache."""
    cached_share: float | None
    """Share of the data read that was in the page cache before; None for writes or if unknown."""
    may_be_cached: bool
    """True if the figure may be that of the page cache, not of the disk."""


class SlowDisk(Value):
    """A host whose disk is slower than those of the others, with all their processes at once."""

    host: str
    path: str
    operation: str
    bytes_per_s: float
    loss: float
    """1 - rate / median of all hosts."""
    z: float | None


class StorageSupply(Value):
    """Rates of a folder on a host relative to the demand of the training run."""

    host: str
    path: str
    samples_per_s: float | None
    """Sustained rate of the loaders of all its devices at once; None where it was not measured."""
    share: float | None
    """Supply of this host divided by its demand."""
    enough: bool | None
    may_be_cached: bool | None
    checkpoint_s: float | None
    """Seconds for this host's part of a checkpoint; None where it was not measured."""


class StorageReport(Value):
    """Every operation in every folder of every host."""

    schema_version: int = 1
    created: str
    identity: dict[str, Any]
    """Hosts, processes, bytes and seconds: properties that must be equal to compare two reports."""
    elapsed_s: float
    places: tuple[StoragePlace, ...]
    rows: tuple[StorageRow, ...]
    slow: tuple[SlowDisk, ...]
    demand: StorageDemand | None
    """Demand of the training run; None without one."""
    supply: tuple[StorageSupply, ...]
    faults: tuple[str, ...]
    """Folders that could not be measured, with their host."""
    sentences: tuple[str, ...]


def storage_rows(
    lines: Iterable[Mapping[str, Any]], names: Sequence[str]
) -> tuple[StorageRow, ...]:
    """Return one row per line of a host's program; `names` by node."""
    return tuple(_row(line, names) for line in lines if line["event"] == "storage")


def storage_places(
    lines: Iterable[Mapping[str, Any]], names: Sequence[str]
) -> tuple[StoragePlace, ...]:
    """Return every folder whose measurement started."""
    fields = StoragePlace.model_fields.keys() - {"host"}
    return tuple(
        StoragePlace(host=names[int(line["node"])], **{name: line[name] for name in fields})
        for line in lines
        if line["event"] == "place"
    )


def _row(line: Mapping[str, Any], names: Sequence[str]) -> StorageRow:
    medians = [median(rates) for rates in line["rates"]]
    spreads = [relative_spread(rates) for rates in line["rates"] if len(rates) > 1]
    reads, share = line["operation"] in ("read", "sample"), line["cached_share"]
    node: int = line["node"]
    return StorageRow(
        host=names[node],
        path=line["path"],
        operation=line["operation"],
        processes=line["processes"],
        unit_bytes=line["unit_bytes"],
        bytes_per_s=sum(medians),
        units_per_s=sum(medians) / line["unit_bytes"],
        sustained_bytes_per_s=sum(line["sustained"]),
        slowest_bytes_per_s=min(medians),
        unit_s=fmean(line["unit_s"]),
        slow_unit_s=max(line["slow_unit_s"]),
        n=min(line["units"]),
        spread=fmean(spreads) if len(spreads) == len(medians) else None,
        method=line["method"],
        cached_share=share,
        may_be_cached=line["operation"] == "small_file"
        or (reads and (share is None or share > CACHED_SHARE)),
    )


def slow_disks(rows: Sequence[StorageRow]) -> tuple[SlowDisk, ...]:
    """Return the disks that are slow compared with other hosts; at least eight hosts are needed."""
    groups: dict[tuple[str, str], list[StorageRow]] = {}
    for row in _all_at_once(rows):
        groups.setdefault((row.path, row.operation), []).append(row)
    return tuple(disk for group in groups.values() for disk in _slow_of(group))


def _slow_of(rows: Sequence[StorageRow]) -> Iterator[SlowDisk]:
    if len(rows) < MIN_COMPARED_NODES:
        return
    speeds = node_speeds([GroupThroughput((row.host,), row.bytes_per_s) for row in rows])
    assert speeds is not None
    slow = {node.host: node for node in judge_nodes(speeds).nodes if node.flagged}
    middle = median(row.bytes_per_s for row in rows)
    for row in rows:
        if row.host in slow:
            yield SlowDisk(
                host=row.host,
                path=row.path,
                operation=row.operation,
                bytes_per_s=row.bytes_per_s,
                loss=1 - row.bytes_per_s / middle,
                z=slow[row.host].z,
            )


def _all_at_once(rows: Sequence[StorageRow]) -> list[StorageRow]:
    """Return the rows with the largest number of processes."""
    most = max((row.processes for row in rows), default=0)
    return [row for row in rows if row.processes == most]


def supply_of(
    rows: Sequence[StorageRow], places: Sequence[StoragePlace], demand: StorageDemand
) -> tuple[StorageSupply, ...]:
    """Return the rates of each folder relative to the demand of each host."""
    at_once = {(row.host, row.path, row.operation): row for row in _all_at_once(rows)}
    return tuple(_supply(place, at_once, demand) for place in places)


def _supply(
    place: StoragePlace,
    rows: Mapping[tuple[str, str, str], StorageRow],
    demand: StorageDemand,
) -> StorageSupply:
    reads = rows.get((place.host, place.path, "sample"))
    saves = rows.get((place.host, place.path, "checkpoint"))
    demanded_rate = demand.host_samples_per_s
    supplied_rate = reads.sustained_bytes_per_s / reads.unit_bytes if reads else None
    supplied_rate = supplied_rate if reads and demand.sample_bytes == reads.unit_bytes else None
    share = supplied_rate / demanded_rate if supplied_rate is not None and demanded_rate else None
    part = demand.checkpoint_bytes / demand.hosts
    return StorageSupply(
        host=place.host,
        path=place.path,
        samples_per_s=supplied_rate,
        share=share,
        enough=None if share is None else share >= 1,
        may_be_cached=reads.may_be_cached if reads else None,
        checkpoint_s=part / saves.sustained_bytes_per_s if saves else None,
    )


def storage_report(
    lines: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    identity: dict[str, Any],
    created: str,
    elapsed_s: float,
    faults: Sequence[str],
    demand: StorageDemand | None,
) -> StorageReport:
    """Return the report of a host program's lines, with its sentences."""
    rows, places = storage_rows(lines, names), storage_places(lines, names)
    slow = slow_disks(rows)
    supply = supply_of(rows, places, demand) if demand else ()
    return StorageReport(
        created=created,
        identity=identity,
        elapsed_s=elapsed_s,
        places=places,
        rows=rows,
        slow=slow,
        demand=demand,
        supply=supply,
        faults=tuple(dict.fromkeys(faults)),
        sentences=tuple(_sentences(rows, places, slow, demand, supply)),
    )


def _sentences(
    rows: Sequence[StorageRow],
    places: Sequence[StoragePlace],
    slow: Sequence[SlowDisk],
    demand: StorageDemand | None,
    supply: Sequence[StorageSupply],
) -> Iterator[str]:
    """Yield sentences on slow disks first, then on the training's supply, then on uncertainty."""
    for disk in slow:
        z = "" if disk.z is None else f" (z = {disk.z:.1f})"
        yield (
            f"{disk.host} is slow: {disk.path}, {OPERATIONS[disk.operation]}: "
            f"{si(disk.bytes_per_s, 'B/s')}, {percent(disk.loss)} below the median of all{z}."
        )
    if demand:
        yield demand.sentence
        yield from (_supply_sentence(each, demand) for each in supply)
    for place in places:
        if place.file_system in IN_MEMORY:
            kind = place.file_system
            yield f"{place.host}:{place.path} is in memory ({kind}), so no disk was measured."
    yield from _read_ahead(rows, places)
    if 1 < len({row.host for row in rows}) < MIN_COMPARED_NODES:
        yield f"Hosts are compared with each other if there are at least {MIN_COMPARED_NODES}."
    cached = [row for row in rows if row.may_be_cached and row.operation != "small_file"]
    if cached:
        hosts_of = compress([*dict.fromkeys(row.host for row in cached)])
        titles = ", ".join(dict.fromkeys(OPERATIONS[row.operation] for row in cached))
        yield (
            f"May come from the page cache (marked *), on {hosts_of}: {titles}; "
            "use a larger --size to avoid this."
        )


def _read_ahead(rows: Sequence[StorageRow], places: Sequence[StoragePlace]) -> Iterator[str]:
    """Yield a warning where the kernel's read-ahead is far larger than a sample."""
    samples = {row.unit_bytes for row in rows if row.operation == "sample"}
    for place in places:
        ahead = place.read_ahead_bytes
        if ahead and samples and ahead >= READ_AHEAD_RATIO * max(samples):
            yield (
                f"{place.host}:{place.path}: the kernel may read {binary(ahead)} around each "
                f"page that a sample of {binary(max(samples))} lacks (read_ahead_kb of the device)."
            )


def _supply_sentence(supply: StorageSupply, demand: StorageDemand) -> str:
    where = f"{supply.host}:{supply.path}"
    if demand.sample_bytes is None:
        loads = "is not compared with the demand: the sample size is unknown (--sample-bytes)"
    elif supply.samples_per_s is None:
        loads = "was not measured with sample reads (--ops), so its loaders' rate is unknown"
    elif supply.share is None:
        loads = f"gives {supply.samples_per_s:,.0f} samples/s; the demand is unknown"
    else:
        loads = (
            f"gives {supply.samples_per_s:,.0f} samples/s, {supply.share:.3g} x the demand"
            f"{' (may be the page cache)' if supply.may_be_cached else ''}: "
            + ("steps do not wait for data" if supply.enough else "steps WAIT for data")
        )
    if supply.checkpoint_s is None:
        return f"{where} {loads}."
    return f"{where} {loads}; its part of a checkpoint takes {seconds(supply.checkpoint_s)}."
