"""What is kept of a campaign: campaign.json, in a folder of its own beside the runs."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Annotated

from pydantic import Field

from paceline.core.errors import SystemFaultError, UserError
from paceline.core.host_split import Split
from paceline.core.node_groups import Purpose, ScalingKind
from paceline.core.run import RunSpec
from paceline.core.units import counted
from paceline.core.value import NonNegativeInt, PositiveInt, Value
from paceline.files.documents import read_value, write_value
from paceline.runs.tasks.slot import on_hosts

CAMPAIGN_FILE = "campaign.json"
LOCK_FILE = "lock"

Group = tuple[str, ...]


class CampaignPoint(Value):
    """One size of a series, and what runs there on any hosts."""

    nodes: PositiveInt
    devices_per_node: PositiveInt
    spec: RunSpec


class PlannedRound(Value):
    """Sub-clusters of one size that run at the same time."""

    number: PositiveInt
    purpose: Purpose = "plan"
    nodes: PositiveInt
    devices_per_node: PositiveInt
    repeat: PositiveInt = 1
    groups: tuple[Group, ...]
    left_over: Group = ()
    """Hosts without a place in this round."""
    made_up: bool = False
    """A further round, for hosts that the others left over."""


class Campaign(Value):
    """campaign.json: what is measured where, decided before anything starts."""

    schema_version: int = 1
    name: str
    created: str
    command: tuple[str, ...]
    recipe: str
    variant: str | None = None
    scaling: ScalingKind
    hosts: tuple[str, ...]
    sizes: tuple[PositiveInt, ...]
    """Nodes of a sub-cluster, rising."""
    devices_per_node: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    """Devices used of a node, rising: the last is the whole node, with which all sizes run."""
    split: Split
    rounds: PositiveInt
    repeats: PositiveInt
    seed: NonNegativeInt
    points: Annotated[tuple[CampaignPoint, ...], Field(min_length=1)]
    plan: tuple[PlannedRound, ...]
    """In the order in which they run; rounds that follow a suspicion up are added at the end."""
    notices: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Eight hexadecimal digits of what is measured where."""
        fields = {
            "hosts",
            "sizes",
            "devices_per_node",
            "split",
            "rounds",
            "repeats",
            "seed",
            "scaling",
        }
        content = self.model_dump(mode="json", include=fields)
        content["points"] = [point.spec.key for point in self.points]
        content["plan"] = [round_.groups for round_ in self.plan if round_.purpose == "plan"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def whole_node(self) -> int:
        """Devices of a node."""
        return self.devices_per_node[-1]

    def spec(self, hosts: Group, devices: int) -> RunSpec:
        """What runs on these hosts; a size without a point has its batch from the kind of scaling.

        Raises UserError for a number of devices a node that no point has.
        """
        points = [p for p in self.points if p.devices_per_node == devices]
        if not points:
            raise UserError(
                f"campaign {self.name}",
                f"measures nothing on {counted(devices, 'device')} a node",
                allowed=", ".join(map(str, self.devices_per_node)),
            )
        point = next((p for p in points if p.nodes == len(hosts)), points[-1])
        spec, training = point.spec, point.spec.training
        if point.nodes != len(hosts) and self.scaling == "weak":
            share = Fraction(training.global_batch * len(hosts), point.nodes)
            training = training.model_copy(update={"global_batch": max(1, int(share))})
        return on_hosts(spec.model_copy(update={"training": training}), hosts)

    def group_name(self, nodes: int, devices: int) -> str:
        """The group of repeats that runs of this size belong to."""
        return f"{self.name}-{nodes}x{devices}"


def campaign_folders(root: Path) -> list[Path]:
    """Every campaign under `root`, by name."""
    return sorted(path.parent for path in root.glob(f"*/{CAMPAIGN_FILE}"))


def read_campaign(root: Path, name: str) -> Campaign:
    """The campaign of that name, unique prefix, or `last`; raises UserError when there is none."""
    folders = campaign_folders(root)
    if name == "last" and folders:
        return max((_read(folder) for folder in folders), key=lambda campaign: campaign.created)
    matches = [f for f in folders if f.name == name] or [
        f for f in folders if f.name.startswith(name)
    ]
    if len(matches) == 1:
        return _read(matches[0])
    names = ", ".join(folder.name for folder in folders[-5:])
    what = f"names {len(matches)} campaigns" if matches else f"is no campaign in {root}"
    raise UserError(
        f"campaign {name!r}",
        what,
        allowed=names or None,
        remedy="`paceline scale RECIPE` starts one",
    )


def write_campaign(root: Path, campaign: Campaign) -> None:
    """Write campaign.json."""
    write_value(root / campaign.name / CAMPAIGN_FILE, campaign)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Nobody else runs the campaign in `folder` meanwhile; raises UserError when somebody does.

    The kernel gives the lock back however this process ends.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK_FILE).open("a+")
    except OSError as error:
        raise SystemFaultError(str(folder), f"cannot be written: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            who = file.read().strip() or "another process"
            raise UserError(
                f"campaign {folder.name}",
                f"is being run by {who}",
                remedy="wait until it has ended",
            ) from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        file.flush()
        yield


def _read(folder: Path) -> Campaign:
    return read_value(folder / CAMPAIGN_FILE, Campaign)
