"""The Job of a DeepSpeed-Chat run, and the files that travel with it."""

from __future__ import annotations

import base64
import json
from typing import Any

from paceline.core.job import Job
from paceline.core.run import RunSpec
from paceline.core.secrets import is_secret
from paceline.engines.deepspeed_chat.arguments import (
    OWN_MODEL,
    OWN_PROGRAM,
    arguments,
    model_name,
    own_program,
    program,
)
from paceline.engines.deepspeed_chat.checkpoint_shapes import opt_configuration
from paceline.engines.launch.environments import interpreter, not_installed
from paceline.engines.launch.programs import launch, program_file

REQUIREMENTS = ("deepspeed==0.19.8", "transformers==5.23.0")
IMPORTS = ("deepspeed", "transformers")
PROGRAMS = (OWN_PROGRAM, "sft_data_program.py", "sft_model_program.py")
HOSTFILE, ENVIRONMENT_FILE = "hostfile", ".deepspeed_env"


def missing(spec: RunSpec) -> str | None:
    """deepspeed or transformers, where no environment and no other interpreter has them."""
    return not_installed(spec, IMPORTS)


def job(spec: RunSpec, name: str) -> Job:
    """The program once a device, or DeepSpeed's launcher, which starts it, once a node."""
    alone = not _by_deepspeed(spec)
    return launch(
        spec,
        name,
        command(spec),
        python=interpreter(spec),
        env=_environment(spec),
        files={**_files(spec), **({} if alone else launcher_files(spec))},
        per="device" if alone else "node",
    )


def settings(spec: RunSpec) -> dict[str, Any]:
    """Program and arguments as they are started, with the rank's placeholder."""
    return {"command": command(spec), "environment": _environment(spec)}


def command(spec: RunSpec) -> list[str]:
    """What the starter runs, with its placeholders."""
    if _by_deepspeed(spec):
        return [
            *("{python}", "-u", "-m", "deepspeed.launcher.launch"),
            f"--world_info={world_info(spec)}",
            "--node_rank={node_rank}",
            "--master_addr={master_addr}",
            "--master_port={master_port}",
            program(spec),
            *arguments(spec),
        ]
    return ["{python}", "-u", program(spec), "--local_rank={local_rank}", *arguments(spec)]


def hosts(spec: RunSpec) -> list[str]:
    """Hosts in the order of their ranks; numbered ones where a scheduler has yet to choose them."""
    named = spec.cluster.hosts
    return [*named] if named else [f"node-{number}" for number in range(spec.cluster.nodes)]


def world_info(spec: RunSpec) -> str:
    """Hosts and their devices as DeepSpeed's launcher hands them on: JSON in base64."""
    devices = list(range(spec.cluster.devices_per_node))
    content = json.dumps(dict.fromkeys(hosts(spec), devices))
    return base64.urlsafe_b64encode(content.encode()).decode()


def launcher_files(spec: RunSpec) -> dict[str, str]:
    """A hostfile and an environment file, with which `deepspeed --hostfile` starts the same."""
    slots = spec.cluster.devices_per_node
    variables = {**_environment(spec), **spec.cluster.env}
    public = {name: value for name, value in variables.items() if not is_secret(name, value)}
    return {
        HOSTFILE: "".join(f"{host} slots={slots}\n" for host in hosts(spec)),
        ENVIRONMENT_FILE: "".join(f"{name}={value}\n" for name, value in public.items()),
    }


def _by_deepspeed(spec: RunSpec) -> bool:
    return spec.engine_settings.get("launcher") == "deepspeed"


def _environment(spec: RunSpec) -> dict[str, str]:
    return {"DS_ACCELERATOR": "cpu"} if spec.cluster.device == "cpu" else {}


def _files(spec: RunSpec) -> dict[str, str]:
    """Our program, and the configuration of the model where no other is named."""
    if not own_program(spec):
        return {}
    files: dict[str, str] = {}
    for name in PROGRAMS:
        files |= program_file(__package__ or "", name)
    if model_name(spec) == OWN_MODEL and spec.model.kind == "decoder":
        configuration = json.dumps(opt_configuration(spec.model), indent=2) + "\n"
        files[f"{OWN_MODEL}/config.json"] = configuration
    return files
