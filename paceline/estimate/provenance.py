"""What each input of an estimate rests on, in the words of the documentation."""

from __future__ import annotations

from typing import Literal

from paceline.core.errors import UserError
from paceline.core.value import Value
from paceline.estimate.fit.evidence import Evidence
from paceline.estimate.model.machine import Machine
from paceline.files import catalog

Kind = Literal["measured here", "stored profile", "public prior", "data sheet", "stated", "assumed"]
TITLED: tuple[Kind, ...] = ("measured here", "stored profile")
"""What the title of coefficients that a calibration moved begins with."""


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


def basis_of(evidence: Evidence, here: Machine, links: str | None, network: str | None) -> Basis:
    """The basis of one estimate; `links` and `network` are the names that were given."""
    kind: Kind | None = next((one for one in TITLED if evidence.title.startswith(one)), None)
    if kind is None:
        kind = "stored profile" if evidence.own_rows else "public prior"
    links_are: Kind = "assumed" if here.assumed.intra else "data sheet"
    network_is: Kind = "assumed" if here.assumed.inter else "data sheet"
    own = here.generation == "cpu"
    rates: Kind = kind if own else "data sheet"
    return Basis(
        title=evidence.title,
        coefficients=kind,
        peak=rates,
        memory_rate=rates,
        links=kind if own else _link(links_are, links, "intra"),
        network=kind if own else _link(network_is, network, "inter"),
        memory="public prior",
    )


def _link(kind: Kind, name: str | None, where: Literal["intra", "inter"]) -> Kind:
    """A name counts where it says what link is there: not a network inside a node, or the reverse."""
    if not name or kind == "assumed":
        return kind
    try:
        link = catalog.find_link(name).link
    except UserError:
        return "stated"  # a rate, since the machine is known
    return "stated" if link is None or link.kind == where else kind
