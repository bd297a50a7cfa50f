"""What a bed consists of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """What a bed consists of."""

    hosts: int = 4
    ssh: bool = True
    slurm: bool = False
    accounting: bool = True
    containers: bool = False
    """Slurm takes the options of Pyxis: tasks run in an image that is a folder with a root."""
    slurm_lines: str = ""
    """Further lines of slurm.conf."""
    cores: float | None = None
    """Processors that each host may use, None for all."""
    favoured: bool = False
    """Hosts come before all else that wants the processors, so that it blurs no figure."""
    slots: int = 1
    """Devices a host in the hostfile."""
    gpus: int = 8
    """Devices a node that Slurm counts; there are none behind them."""
