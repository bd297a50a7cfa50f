"""The hardware catalog of devices, links, dtypes and clusters, with a source for every figure.

A name is resolved in three steps. It matches a name or an alias by its letters and digits.
Otherwise its words are compared with the words that the catalog knows for a device of that family.
Otherwise it is an error. An ambiguous description gives a match with `exact` False and a note.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import PositiveFloat

from paceline.core.bandwidth import parse_bandwidth
from paceline.core.errors import UserError, unknown_name
from paceline.core.hardware import Cluster, Device, Dtype, Link, Site
from paceline.core.value import PositiveInt, Value
from paceline.files.plugins import DEVICES, plugins
from paceline.files.yaml_file import Document, line_of, read_model, read_shipped

# Words that describe a device without naming another product: sizes, watts, memory, form factor.
_DESCRIBES_DEVICE = re.compile(r"\d+(gb|gib|g|w)|hbm\d?e?|sxm\d?|pcie|nvl\d*")
_OF_NODE = re.compile(r"\d\s*[x×]\s*\d|per node", re.IGNORECASE)
"""Text of a rate that all devices of a node share."""
# Words that state the number or rate of links, not the kind of link.
_DESCRIBES_LINK = re.compile(r"\d+(x\d+)?x?(gb|gbps|gbit|tb)?|s|uni|per|node|gpu|nic|port|connectx")

NOT_IN_CATALOG = "is not in the catalog"
LinkPlace = Literal["intra", "inter"]
OTHER_PLACE: dict[LinkPlace, LinkPlace] = {"intra": "inter", "inter": "intra"}
LINK_ALLOWED = "a link of the right kind from `paceline recipes devices --links`"
_RATE = re.compile(r"[1-9][\d.,]*\s*[GTM]i?[Bb]")
"""Start of a description that states its own rate; the caller checks the rate."""
_PLACES = {"intra": "a link inside a node", "inter": "a network between nodes"}

FileT = TypeVar("FileT", bound=Value)
NamedT = TypeVar("NamedT", Device, Link)


@dataclass(frozen=True)
class DeviceMatch:
    """A device that matches a description; `note` states what was ambiguous or unknown."""

    device: Device
    exact: bool
    note: str | None = None


@dataclass(frozen=True)
class LinkMatch:
    """A link class that matches a description; `link` is None if no network is used."""

    link: Link | None
    exact: bool
    note: str | None = None
    node_bytes_per_s: float | None = None
    """Bandwidth of a whole node in one direction, if the description states it."""


class _AmbiguousName(Value):
    """Ambiguous descriptions, and the catalog name that is assumed for them."""

    names: tuple[str, ...]
    means: str | None
    by_family: dict[str, str] = {}
    memory_bytes_per_s: float | None = None
    """Memory bandwidth of a device, if the source states it."""
    note: str


class _DeviceFile(Value):
    sources: dict[str, str]
    dtypes: dict[Dtype, tuple[str, ...]]
    devices: tuple[Device, ...]
    ambiguous: tuple[_AmbiguousName, ...]


class DeviceFamily(Value):
    """A family of devices within a generation, as the time model distinguishes them."""

    name: str
    link: str | None = None
    """Link inside a node, if it differs from the generation's."""
    domain: PositiveInt | None = None
    """Devices in one NVLink domain (or TPU pod), if it is larger than a node."""
    mesh: bool = False
    """True if the devices of a node are linked point to point, without a switch."""


class DeviceGeneration(Value):
    """Inputs of the time model for a generation; generations.yaml documents the fields."""

    name: str
    what: str
    gemm_efficiency: PositiveFloat
    gemm_sd: PositiveFloat
    release_year: float = 2000.0
    gemm_alignment: PositiveFloat = 64.0
    softmax_width: float = 0.0
    watts_per_tflops: PositiveFloat | None = None
    intra_bytes_per_s: PositiveFloat | None = None
    inter_bytes_per_s: PositiveFloat | None = None
    pcie: str | None = None
    families: tuple[DeviceFamily, ...] = ()


class _GenerationFile(Value):
    generations: tuple[DeviceGeneration, ...]


class PublishedPairs(Value):
    """Differences between the runs of published sets, each of one system."""

    source: str
    sets: PositiveInt
    runs: PositiveInt
    pairs: PositiveInt | None = None
    beyond: dict[float, float]
    """Share of the pairs of a set that differ by more than the key, a fraction."""


class VariationClass(Value):
    """Run-to-run variation of a class of machines; run_variation.yaml documents the fields."""

    name: str
    within: PositiveFloat
    degrees: PositiveFloat
    between: PositiveFloat
    between_degrees: PositiveFloat
    devices: tuple[str, ...] = ()
    published: PublishedPairs
    sources: tuple[str, ...]


class _VariationFile(Value):
    classes: tuple[VariationClass, ...]


class _LinkFile(Value):
    sources: dict[str, str]
    links: tuple[Link, ...]
    ambiguous: tuple[_AmbiguousName, ...]


class _ClusterFile(Value):
    clusters: tuple[Cluster, ...]


@cache
def variation_classes() -> tuple[VariationClass, ...]:
    """Return the classes of run-to-run variation; the last one is that of all other machines."""
    return _load(_VariationFile, "run_variation.yaml").classes


def variation_class(device: str | None) -> VariationClass:
    """Return the class of a device of the catalog, or that of other machines."""
    *classes, others = variation_classes()
    return next((each for each in classes if device in each.devices), others)


def devices() -> tuple[Device, ...]:
    """Return all devices of the catalog, then those of plug-ins.

    The bare name of a family resolves to its first device.
    """
    return _all_devices()


def device(name: str) -> Device:
    """Return the device that `name` resolves to; raise UserError for an unknown one."""
    return find_device(name).device


def find_device(name: str) -> DeviceMatch:
    """Return the device that `name` describes, with a note if ambiguous; raise UserError without
    one."""
    same = _same_name(name, devices())
    if same:
        return DeviceMatch(same, exact=True)
    entry = _find_ambiguous(name, _device_file().ambiguous)
    if entry and entry.means:
        match = device(entry.means)
        if entry.memory_bytes_per_s:
            match = match.model_copy(update={"memory_bytes_per_s": entry.memory_bytes_per_s})
        return DeviceMatch(match, False, f"{name}: {entry.note}")
    words = _words(name) - {"memory", "size", "not", "stated"}
    family = [
        d for d in devices() if d.family.lower() in words or _name_key(d.family) == _name_key(name)
    ]
    vocabulary = {word for d in family for word in _vocabulary(d)}
    candidates = [d for d in family if words & vocabulary <= _vocabulary(d)]
    extra = sorted(words - vocabulary)
    one_family = len({d.family for d in candidates}) == 1
    if not one_family or not all(map(_DESCRIBES_DEVICE.fullmatch, extra)):
        raise _unknown_device(name)
    open_points = (
        [f"could be any of {', '.join(d.name for d in candidates)}"] if candidates[1:] else []
    )
    open_points += [f"{' '.join(extra)} is unknown for {candidates[0].family}"] if extra else []
    note = (
        f"{name}: {'; '.join(open_points)}; assuming {candidates[0].name}" if open_points else None
    )
    return DeviceMatch(candidates[0], exact=note is None, note=note)


def links() -> tuple[Link, ...]:
    """Return all link classes of the catalog."""
    return _link_file().links


def link(name: str, device: Device | None = None) -> Link:
    """Return the link class that `name` resolves to, for `device` if it states no generation.

    Raises UserError for an unknown link, or for a name that means no link.
    """
    match = find_link(name, device).link
    if match is None:
        raise UserError(f"link {name!r}", "means that no network is used")
    return match


def find_link(name: str, device: Device | None = None) -> LinkMatch:
    """Return the link class that `name` describes; `device` decides an unstated NVLink generation.

    Raises UserError for an unknown description.
    """
    plain = re.sub(r"\([^)]*\)", "", name)
    node_bytes_per_s = _node_bytes_per_s(plain)
    entry = _find_ambiguous(plain, _link_file().ambiguous)
    if entry:
        means = (entry.by_family.get(device.family) if device else None) or entry.means
        resolved_link = link(means) if means else None
        return LinkMatch(
            resolved_link, resolved_link is None, f"{name}: {entry.note}", node_bytes_per_s
        )
    match = _same_name(plain, links()) or _link_in(_words(plain))
    if match is None:
        raise unknown_name(
            f"link {name!r}",
            NOT_IN_CATALOG,
            name,
            [each.name for each in links()],
            aliases=[alias for each in links() for alias in each.aliases],
            listing="paceline recipes devices --links",
        )
    return LinkMatch(match, exact=True, node_bytes_per_s=node_bytes_per_s)


def link_place_problem(name: str | None, place: LinkPlace) -> str | None:
    """Return what a link of the catalog is if it does not belong in `place`, else None.

    A link that is not in the catalog may state its rate.
    """
    try:
        match = find_link(name).link if name else None
    except UserError:
        return None
    return None if match is None or match.kind == place else _PLACES[match.kind]


def dtype(name: str) -> Dtype:
    """Return the dtype that `name` means; raise UserError for one without a peak in the catalog."""
    names = _device_file().dtypes
    for canonical, aliases in names.items():
        if _name_key(name) in map(_name_key, (canonical, *aliases)):
            return canonical
    aliases = [alias for each in names.values() for alias in each]
    raise unknown_name(f"dtype {name!r}", NOT_IN_CATALOG, name, names, aliases=aliases)


def clusters() -> tuple[Cluster, ...]:
    """Return the clusters of the published benchmarks."""
    return _cluster_file().clusters


def cluster(name_or_path: str | Path) -> Cluster:
    """Return a cluster of the catalog, or the one that a YAML file describes.

    Raises UserError for an unknown name, an unreadable file, or an unknown device or link in it.
    """
    if _is_file(Path(name_or_path)):
        return site(name_or_path).as_cluster
    for entry in clusters():
        if _name_key(entry.name) == _name_key(str(name_or_path)):
            return entry
    names = [*(entry.name for entry in clusters()), "a path that ends in .yaml"]
    name = str(name_or_path)
    raise unknown_name(f"cluster {name!r}", NOT_IN_CATALOG, name, names)


def site(name_or_path: str | Path) -> Site:
    """Return the same cluster with the fields for planning; raise the errors of `cluster`."""
    path = Path(name_or_path)
    if not _is_file(path):
        entry = cluster(name_or_path)
        return Site.model_validate({name: getattr(entry, name) for name in entry.model_fields_set})
    entry, document = read_model(Site, path)
    return _with_catalog_names(entry, document, str(path))


def _is_file(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml") or len(path.parts) > 1


def _with_catalog_names(cluster: Site, document: Document, where: str) -> Site:
    """Return `cluster` with the catalog's names; raise UserError with the line of an unknown
    one."""
    names = {"device": cluster.device, "intra_link": cluster.intra_link}
    names["inter_link"] = cluster.inter_link
    for field, name in names.items():
        try:
            if not name:
                continue
            if field == "device":
                names[field] = device(name).name
            else:
                names[field] = link(name, device(cluster.device)).name
                _check_place(field, name)
        except UserError as error:
            raise _at_line(error, where, document, (field,)) from error
    for level, fabric_level in enumerate(cluster.fabric):
        try:
            _check_level(level, fabric_level.link, cluster.device)
        except UserError as error:
            raise _at_line(error, where, document, ("fabric", level, "link")) from error
    return cluster.model_copy(update=names)


def _at_line(
    error: UserError, where: str, document: Document, field: tuple[int | str, ...]
) -> UserError:
    """Return the error about a field of a cluster's file, with its line."""
    place, what = f"{where}:{line_of(document, field)}", f"{error.where} {error.what}"
    return UserError(place, what, allowed=error.allowed, remedy=error.remedy)


def _check_level(level: int, name: str | None, device_name: str) -> None:
    """Raise UserError for a fabric link of the wrong kind, or an unknown one that states no
    rate."""
    if name is None:
        return
    try:
        find_link(name, device(device_name))
    except UserError as error:
        if _RATE.search(name):
            return
        allowed = "a link of the catalog, or a rate above 0: 450 GB/s, 8x400 Gb/s"
        where = f"fabric.{level}.link {name!r}"
        raise UserError(where, error.what, allowed=allowed, remedy=error.remedy) from error
    if level and _RATE.search(name):
        return  # for example NVLink over racks
    if words := link_place_problem(name, "inter" if level else "intra"):
        raise UserError(
            f"fabric.{level}.link {name}",
            f"is {words}",
            allowed=LINK_ALLOWED,
            remedy="use NVLink or PCIe for the first level, and networks for the others",
        )


def _check_place(field: str, name: str) -> None:
    """Raise UserError for a network inside a node, or for a node's link between nodes."""
    place: LinkPlace = "intra" if field == "intra_link" else "inter"
    if words := link_place_problem(name, place):
        raise UserError(
            f"{field} {name}",
            f"is {words}",
            allowed=LINK_ALLOWED,
            remedy=f"write `{OTHER_PLACE[place]}_link: {name}`",
        )


def _unknown_device(name: str) -> UserError:
    """Return the error for an unknown device; a suggested one is shown with its peak.

    A similar name may be hardware with another peak.
    """
    error = unknown_name(
        f"device {name!r}",
        NOT_IN_CATALOG,
        name,
        [each.name for each in devices()],
        aliases=[alias for each in devices() for alias in (each.family, *each.aliases)],
        listing="paceline recipes devices",
    )
    hint = re.match(r"did you mean '(.+?)'\?", error.remedy or "")
    entry = device(hint[1]) if hint else None
    dtype: Dtype = "fp16" if entry and entry.has_only_fp16 else "bf16"
    peak = entry.peak_flops_per_s(dtype) if entry else None
    if not (hint and error.remedy and peak):
        return error
    text = f"{hint[0]} Its peak is {peak / 1e12:,.4g} TFLOP/s in {dtype}."
    remedy = error.remedy.replace(hint[0], text)
    return UserError(error.where, error.what, allowed=error.allowed, remedy=remedy)


def _same_name(name: str, entries: Sequence[NamedT]) -> NamedT | None:
    key = _name_key(name)
    return next((e for e in entries if key in map(_name_key, (e.name, *e.aliases))), None)


def _find_ambiguous(name: str, entries: Sequence[_AmbiguousName]) -> _AmbiguousName | None:
    return next((e for e in entries if _name_key(name) in map(_name_key, e.names)), None)


def _link_in(words: frozenset[str]) -> Link | None:
    """Return the link with the longest alias among `words`, if the other words only state a number
    or a rate."""
    aliases = [
        (_words(alias), entry) for entry in links() for alias in (entry.name, *entry.aliases)
    ]
    inside = [(alias, entry) for alias, entry in aliases if alias <= words]
    if not inside:
        return None
    alias, entry = max(inside, key=lambda pair: len(pair[0]))
    return entry if all(map(_DESCRIBES_LINK.fullmatch, words - alias)) else None


def _node_bytes_per_s(text: str) -> float | None:
    return parse_bandwidth(text, 1) if _OF_NODE.search(text) else None


@cache
def _name_key(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


@cache
def _words(text: str) -> frozenset[str]:
    text_with_units = re.sub(r"(\d)\s+(gi?b|w)\b", r"\1\2", text.lower())
    return frozenset(re.findall(r"[a-z0-9]+", text_with_units))


def _vocabulary(device: Device) -> set[str]:
    return {word for name in (device.name, device.family, *device.aliases) for word in _words(name)}


@cache
def _all_devices() -> tuple[Device, ...]:
    groups = plugins(DEVICES, _problem_of_devices).values()
    return (*_device_file().devices, *(_as_device(each) for group in groups for each in group))


def _problem_of_devices(name: str, value: Any) -> str | None:
    """Return why the devices of a plug-in cannot be used: the catalog has one of that name."""
    catalog = _device_file().devices
    names = [_as_device(each).name for each in value]
    duplicates = [each for each in names if _same_name(each, catalog)]
    return f"the catalog has {', '.join(duplicates)}" if duplicates else None


def _as_device(fields: Any) -> Device:
    return Device.model_validate(fields)


@cache
def _device_file() -> _DeviceFile:
    return _load(_DeviceFile, "devices.yaml")


@cache
def generations() -> dict[str, DeviceGeneration]:
    """Return the generations of devices by name."""
    entries = _load(_GenerationFile, "generations.yaml").generations
    return {entry.name: entry for entry in entries}


@cache
def generation_of(family: str) -> tuple[DeviceGeneration, DeviceFamily]:
    """Return the generation and the entry of a family; an unlisted family belongs to `other`."""
    for generation in generations().values():
        for entry in generation.families:
            if entry.name == family:
                return generation, entry
    return generations()["other"], DeviceFamily(name=family)


@cache
def _link_file() -> _LinkFile:
    return _load(_LinkFile, "links.yaml")


@cache
def _cluster_file() -> _ClusterFile:
    return _load(_ClusterFile, "clusters.yaml")


def _load(model: type[FileT], name: str) -> FileT:
    return model.model_validate(read_shipped(files("paceline.files") / "catalog" / name))
