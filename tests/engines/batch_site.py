"""A cluster of two nodes and a fake submission for engines that submit batch scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.core.hardware import Cluster, SlurmSettings
from paceline.core.run import RunSpec
from paceline.files.recipe import load_recipe, resolve

SYSTEM = Path(__file__).parent / "mlperf_system"
CONFIG = "config_BED_2x2x8xtp1pp1cp1_8b.sh"
MLPERF = {"config": str(SYSTEM / CONFIG), "container": "registry/image:1", "data": "/data"}
NEMO = {"stage_path": "/lustre/nemo"}
LLMB = {"form": "llmb", "llmb_install": "/lustre/llmb"}


def site(nodes: int = 2, devices: int = 2, device: str = "GB300", **slurm: Any) -> Cluster:
    """Nodes under Slurm."""
    return Cluster(
        name="site",
        device=device,
        nodes=nodes,
        devices_per_node=devices,
        launcher="slurm",
        slurm=SlurmSettings.model_validate(slurm),
    )


def spec_of(
    engine: str,
    recipe: str,
    cluster: Cluster,
    settings: dict[str, Any],
    variant: str | None = None,
    *overrides: str,
) -> RunSpec:
    """A recipe resolved for an engine with its own settings."""
    chosen = load_recipe(recipe, variant, (f"engine={engine}", *overrides))
    spec = resolve(chosen, cluster, True, variant)
    return spec.model_copy(update={"engine_settings": settings})
