"""The hardware catalog: devices, links, dtypes and clusters by name, every figure with its source.

Names are found in three steps: the same letters and digits as a name or an alias; else the words of
the description against the words that the catalog knows for a device of that family; else an error.
A description that leaves something open gives a match with `exact` False and a note.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import PositiveFloat

from paceline.core.errors import UserError, did_you_mean
from paceline.core.hardware import Cluster, Device, Dtype, Link
from paceline.core.site import Site
from paceline.core.value import PositiveInt, Value
from paceline.files.yaml_file import Document, line_of, read_model, read_shipped

# Words that describe a device without naming another product: sizes, watts, memory, form factor.
_DESCRIBES_DEVICE = re.compile(r"\d+(gb|gib|g|w)|hbm\d?e?|sxm\d?|pcie|nvl\d*")
# Words that say how much of a link there is, not which link it is.
_DESCRIBES_LINK = re.compile(r"\d+(x\d+)?x?(gb|gbps|gbit|tb)?|s|uni|per|node|gpu|nic|port|connectx")

LinkPlace = Literal["intra", "inter"]
OTHER_PLACE: dict[LinkPlace, LinkPlace] = {"intra": "inter", "inter": "intra"}
LINK_ALLOWED = "a link of that kind that `paceline devices --links` lists"
_RATE = re.compile(r"[1-9][\d.,]*\s*[GTM]i?[Bb]")
"""What states a rate of its own begins so; whether a link can be as fast is judged in its use."""
_PLACES = {"intra": "a link inside a node", "inter": "a network between nodes"}

FileT = TypeVar("FileT", bound=Value)
NamedT = TypeVar("NamedT", Device, Link)


@dataclass(frozen=True)
class DeviceMatch:
    """The device that a description names; `note` says what was left open or unknown."""

    device: Device
    exact: bool
    note: str | None = None


@dataclass(frozen=True)
class LinkMatch:
    """The link class that a description names; `link` is None where no network is crossed."""

    link: Link | None
    exact: bool
    note: str | None = None
    node_bytes_per_s: float | None = None
    """What the description states for a whole node in one direction, if it does."""


class _Unstated(Value):
    """Descriptions that leave something open, and the name that is taken instead."""

    names: tuple[str, ...]
    means: str | None
    by_family: dict[str, str] = {}
    memory_bytes_per_s: float | None = None
    """Of a device, where its source states it."""
    note: str


class _DeviceFile(Value):
    sources: dict[str, str]
    dtypes: dict[Dtype, tuple[str, ...]]
    devices: tuple[Device, ...]
    unstated: tuple[_Unstated, ...]


class DeviceFamily(Value):
    """A family of devices, as the time model tells it from others of its generation."""

    name: str
    link: str | None = None
    """What its devices have inside a node, where the generation does not tell it."""
    domain: PositiveInt | None = None
    """Devices of one fast domain where it is larger than a node."""
    mesh: bool = False
    """Devices are linked one by one inside a node, without a switch."""


class DeviceGeneration(Value):
    """What the time model needs of a generation; generations.yaml says what each field means."""

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


class _LinkFile(Value):
    sources: dict[str, str]
    links: tuple[Link, ...]
    unstated: tuple[_Unstated, ...]


class _ClusterFile(Value):
    clusters: tuple[Cluster, ...]


def devices() -> tuple[Device, ...]:
    """All devices of the catalog; the first of a family is what its bare name resolves to."""
    return _device_file().devices


def device(name: str) -> Device:
    """The device that `name` resolves to; raises UserError for one that is not in the catalog."""
    return find_device(name).device


def find_device(name: str) -> DeviceMatch:
    """The device that `name` describes, with what was left open; raises UserError without one."""
    same = _same_name(name, devices())
    if same:
        return DeviceMatch(same, exact=True)
    entry = _unstated(name, _device_file().unstated)
    if entry and entry.means:
        taken = device(entry.means)
        if entry.memory_bytes_per_s:
            taken = taken.model_copy(update={"memory_bytes_per_s": entry.memory_bytes_per_s})
        return DeviceMatch(taken, False, f"{name}: {entry.note}")
    words = _words(name) - {"memory", "size", "not", "stated"}
    family = [d for d in devices() if d.family.lower() in words]
    vocabulary = {word for d in family for word in _vocabulary(d)}
    fitting = [d for d in family if words & vocabulary <= _vocabulary(d)]
    extra = sorted(words - vocabulary)
    one_family = len({d.family for d in fitting}) == 1
    if not one_family or not all(map(_DESCRIBES_DEVICE.fullmatch, extra)):
        raise _unknown("device", name, [(d.name, d.family, *d.aliases) for d in devices()])
    open_points = [f"could be any of {', '.join(d.name for d in fitting)}"] if fitting[1:] else []
    open_points += [f"{' '.join(extra)} is not known of {fitting[0].family}"] if extra else []
    note = f"{name}: {'; '.join(open_points)}; taken as {fitting[0].name}" if open_points else None
    return DeviceMatch(fitting[0], exact=note is None, note=note)


def links() -> tuple[Link, ...]:
    """All link classes of the catalog."""
    return _link_file().links


def link(name: str, device: Device | None = None) -> Link:
    """The link class that `name` resolves to, of `device` where it states no generation.

    Raises UserError for an unknown one or for none.
    """
    match = find_link(name, device).link
    if match is None:
        raise UserError(f"link {name!r}", "means that no network is crossed")
    return match


def find_link(name: str, device: Device | None = None) -> LinkMatch:
    """The link class that `name` describes; `device` settles an unstated NVLink generation.

    Raises UserError for an unknown description.
    """
    plain = re.sub(r"\([^)]*\)", "", name)
    node_bytes_per_s = _node_bytes_per_s(plain)
    entry = _unstated(plain, _link_file().unstated)
    if entry:
        means = (entry.by_family.get(device.family) if device else None) or entry.means
        chosen = link(means) if means else None
        return LinkMatch(chosen, chosen is None, f"{name}: {entry.note}", node_bytes_per_s)
    match = _same_name(plain, links()) or _link_in(_words(plain))
    if match is None:
        raise _unknown("link", name, [(x.name, *x.aliases) for x in links()])
    return LinkMatch(match, exact=True, node_bytes_per_s=node_bytes_per_s)


def misplaced(name: str | None, place: LinkPlace) -> str | None:
    """What a link of the catalog is that does not belong in that place; None for one that does.

    What is in no catalog may state its rate.
    """
    try:
        found = find_link(name).link if name else None
    except UserError:
        return None
    return None if found is None or found.kind == place else _PLACES[found.kind]


def dtype(name: str) -> Dtype:
    """The dtype that `name` means; raises UserError for one that no peak is kept for."""
    names = _device_file().dtypes
    for canonical, aliases in names.items():
        if _squash(name) in map(_squash, (canonical, *aliases)):
            return canonical
    raise _unknown("dtype", name, [(canonical, *aliases) for canonical, aliases in names.items()])


def clusters() -> tuple[Cluster, ...]:
    """The clusters of the published procedures."""
    return _cluster_file().clusters


def cluster(name_or_path: str | Path) -> Cluster:
    """A cluster of the catalog, or the one described by a YAML file.

    Raises UserError for an unknown name, an unreadable file, or a device or link in it that is not
    in the catalog.
    """
    if _is_file(Path(name_or_path)):
        return site(name_or_path).as_cluster
    for entry in clusters():
        if _squash(entry.name) == _squash(str(name_or_path)):
            return entry
    names = [(entry.name,) for entry in clusters()]
    raise _unknown("cluster", str(name_or_path), [*names, ("a path that ends in .yaml",)])


def site(name_or_path: str | Path) -> Site:
    """The same cluster with what planning needs; raises UserError as `cluster` does."""
    path = Path(name_or_path)
    if not _is_file(path):
        entry = cluster(name_or_path)
        return Site.model_validate({name: getattr(entry, name) for name in entry.model_fields_set})
    entry, document = read_model(Site, path)
    return _checked(entry, document, str(path))


def _is_file(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml") or len(path.parts) > 1


def _checked(cluster: Site, document: Document, where: str) -> Site:
    """`cluster` with the catalog's own names; raises UserError with the line of an unknown one."""
    names = {"device": cluster.device, "intra_link": cluster.intra_link}
    names["inter_link"] = cluster.inter_link
    for field, written in names.items():
        try:
            if not written:
                continue
            if field == "device":
                names[field] = device(written).name
            else:
                names[field] = link(written, device(cluster.device)).name
                _check_place(field, written)
        except UserError as error:
            raise _at_line(error, where, document, (field,)) from error
    for level, stated in enumerate(cluster.fabric):
        try:
            _check_level(level, stated.link, cluster.device)
        except UserError as error:
            raise _at_line(error, where, document, ("fabric", level, "link")) from error
    return cluster.model_copy(update=names)


def _at_line(
    error: UserError, where: str, document: Document, field: tuple[int | str, ...]
) -> UserError:
    """The refusal of a field of a cluster's file, with its line."""
    place, what = f"{where}:{line_of(document, field)}", f"{error.where} {error.what}"
    return UserError(place, what, allowed=error.allowed, remedy=error.remedy)


def _check_level(level: int, name: str | None, device_name: str) -> None:
    """Raises UserError for a fabric's link that is unknown and no rate, or of the other kind."""
    if name is None:
        return
    try:
        find_link(name, device(device_name))
    except UserError as error:
        if _RATE.search(name):
            return
        allowed = f"{error.allowed}, or a rate above 0: 450 GB/s, 8x400 Gb/s"
        where = f"fabric.{level}.link {name!r}"
        raise UserError(where, error.what, allowed=allowed, remedy=error.remedy) from error
    if level and _RATE.search(name):
        return  # NVLink over racks, say
    if words := misplaced(name, "inter" if level else "intra"):
        raise UserError(
            f"fabric.{level}.link {name}",
            f"is {words}",
            allowed=LINK_ALLOWED,
            remedy="the first level is the fast domain, those behind it are networks",
        )


def _check_place(field: str, name: str) -> None:
    """Raises UserError for a network inside a node, or for a node's link between nodes."""
    place: LinkPlace = "intra" if field == "intra_link" else "inter"
    if words := misplaced(name, place):
        raise UserError(
            f"{field} {name}",
            f"is {words}",
            allowed=LINK_ALLOWED,
            remedy=f"{OTHER_PLACE[place]}_link: {name} says it",
        )


def _same_name(name: str, entries: Sequence[NamedT]) -> NamedT | None:
    squashed = _squash(name)
    return next((e for e in entries if squashed in map(_squash, (e.name, *e.aliases))), None)


def _unstated(name: str, entries: Sequence[_Unstated]) -> _Unstated | None:
    return next((e for e in entries if _squash(name) in map(_squash, e.names)), None)


def _link_in(words: frozenset[str]) -> Link | None:
    """The link whose longest alias stands in `words`, if the rest only says how much of it."""
    named = [(_words(alias), entry) for entry in links() for alias in (entry.name, *entry.aliases)]
    inside = [(alias, entry) for alias, entry in named if alias <= words]
    if not inside:
        return None
    alias, entry = max(inside, key=lambda pair: len(pair[0]))
    return entry if all(map(_DESCRIBES_LINK.fullmatch, words - alias)) else None


def _node_bytes_per_s(text: str) -> float | None:
    ports = re.search(r"(\d+)x\s?(\d+)\s?Gb/s", text)
    if ports:
        return int(ports[1]) * int(ports[2]) * 1e9 / 8
    total = re.search(r"(\d+)\s?Gb/s.*per node", text)
    return int(total[1]) * 1e9 / 8 if total else None


@cache
def _squash(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


@cache
def _words(text: str) -> frozenset[str]:
    joined = re.sub(r"(\d)\s+(gi?b|w)\b", r"\1\2", text.lower())
    return frozenset(re.findall(r"[a-z0-9]+", joined))


def _vocabulary(device: Device) -> set[str]:
    return {word for name in (device.name, *device.aliases) for word in _words(name)}


def _unknown(kind: str, name: str, groups: Sequence[tuple[str, ...]]) -> UserError:
    nearest = did_you_mean(name, (alias for group in groups for alias in group))
    allowed = ", ".join(group[0] for group in groups)
    return UserError(
        f"{kind} {name!r}", "is not in the catalog", allowed=allowed, remedy=nearest or None
    )


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
    """Return the generation and the entry of a family; one that is not listed is `other`."""
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
