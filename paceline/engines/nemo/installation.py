"""An installation of NVIDIA's recipes: what cluster_config.yaml in LLMB_INSTALL says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from paceline.files.yaml_file import plain, read_document

CONFIG_FILE = "cluster_config.yaml"


@dataclass(frozen=True)
class Installation:
    """What llmb-run goes by, whoever calls it; None for what the file leaves open."""

    gpu_type: str | None
    workloads: tuple[str, ...]
    account: str | None
    partition: str | None
    variables: Mapping[str, str]
    """What it exports for a workload, over the caller's variables."""


def installation(folder: Path, workload: str) -> Installation:
    """What the installation in `folder` says; raises UserError for a file that cannot be read.

    Keys: NVIDIA/exemplar-performance, cli/llmb-run/README.md, of schema 2 and before.
    """
    content = plain(read_document(folder / CONFIG_FILE))
    slurm, workloads = _part(content, "slurm"), _part(content, "workloads")
    installed = cast(object, workloads.get("installed"))
    exported = {
        **_part(content, "environment"),
        **_part(workloads, "config", workload, "environment"),
    }
    gpu = content.get("gpu_type") or _part(content, "launcher").get("gpu_type")
    return Installation(
        gpu_type=str(gpu).lower() if gpu else None,
        workloads=tuple(map(str, cast(list[object], installed)))
        if isinstance(installed, list)
        else (),
        account=_option(slurm, "account"),
        partition=_option(slurm, "partition"),
        variables={name: str(value) for name, value in exported.items()},
    )


def _option(slurm: dict[str, Any], name: str) -> str | None:
    """An option of GPU jobs, by any of the names that llmb-run takes."""
    names = (name, f"SBATCH_{name.upper()}")
    sought = [(_part(slurm, "gpu"), names), (slurm, (*names, f"gpu_{name}"))]
    return next((str(part[key]) for part, keys in sought for key in keys if part.get(key)), None)


def _part(content: Any, *names: str) -> dict[str, Any]:
    """The mapping within `content` by that way; empty where there is none."""
    for name in names:
        content = cast(dict[str, Any], content).get(name) if isinstance(content, dict) else None
    return cast(dict[str, Any], content) if isinstance(content, dict) else {}
