"""What each input of an estimate rests on, in the words of the documentation."""

from __future__ import annotations

from typing import Literal

from paceline.core.errors import UserError
from paceline.core.value import Value
from paceline.estimate.fit.evidence import Evidence, Provenance
from paceline.estimate.model.machine import Machine
from paceline.files import catalog

Kind = Literal[Provenance, "data sheet", "stated", "assumed"]


class Basis(Value):
    """Where an estimate's inputs are from."""

    title: str
    """Of the coefficients."""
    coefficients: Kind
    peak: Kind
    memory_rate: Kind
    links: Kind
    """Inside a node."""
    network: Kind
    memory: Kind
    """What a framework keeps in memory."""


def basis_of(evidence: Evidence, machine: Machine, links: str | None, network: str | None) -> Basis:
    """The basis of one estimate; `links` and `network` are the names that were given."""
    links_are: Kind = "assumed" if machine.assumed.intra else "data sheet"
    network_is: Kind = "assumed" if machine.assumed.inter else "data sheet"
    on_cpu = machine.generation == "cpu"
    rates: Kind = evidence.provenance if on_cpu else "data sheet"
    return Basis(
        title=evidence.title,
        coefficients=evidence.provenance,
        peak=rates,
        memory_rate=rates,
        links=evidence.provenance if on_cpu else _link(links_are, links, "intra"),
        network=evidence.provenance if on_cpu else _link(network_is, network, "inter"),
        memory="public prior",
    )


def _link(kind: Kind, name: str | None, where: Literal["intra", "inter"]) -> Kind:
    """A name counts where it says what link is there: no network inside a node, nor the reverse."""
    if not name or kind == "assumed":
        return kind
    try:
        link = catalog.find_link(name).link
    except UserError:
        return "stated"  # a rate, since the machine is known
    return "stated" if link is None or link.kind == where else kind
