"""Starter that becomes one process of another program, with any launcher and without Paceline.

    python starter_program.py rank|node NODES DEVICES STEPS PROGRAM [ARGUMENT ...]

`rank`: the program is one of NODES x DEVICES ranks, which find each other through the variables of
torch.distributed. `node`: it is the only process on its node and starts the ranks of its DEVICES
itself. STEPS is 1 if it may write event lines. Its output goes to logs/rank-NNNNN.log. Placeholders
in PROGRAM and its arguments ({rank}, {local_rank}, {world_size}, {nodes}, {node_rank},
{devices_per_node}, {master_addr}, {master_port}, {output}, {python}, {tmp}) are replaced; other
braces stay. {tmp} is the user's temporary folder on the node.

A program that {python} runs has the interpreter's folder first on its PATH, as in an
activated environment. Variables that name the user are set where a scheduler or container does not.
"""

from __future__ import annotations

import errno
import os
import pwd
import re
import sys
import tempfile
from collections.abc import Mapping

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")
"""Variables of this launch that would mislead the program's own launcher."""
WORKING_FOLDER = "PACELINE_WORKING_FOLDER"
NCCL_LOG = "NCCL_DEBUG_FILE"
SECRET_ARGUMENT = "PACELINE_SECRET_"
"""Prefix of variables whose values replace {their names} in PROGRAM, and nothing else."""
NOT_EXECUTABLE, NO_PROGRAM = 126, 127
"""Exit codes of shells."""
USER_VARIABLES = ("USER", "LOGNAME")
PLACEHOLDER = re.compile(r"\{(\w+)\}")


def main(arguments: list[str]) -> int:
    """Replace this process by the program; return only if it cannot start."""
    per, nodes, devices, steps, *program = arguments
    os_environment = dict(os.environ)
    rank = int(os_environment.get("RANK", "0"))
    folder = os.getcwd()  # noqa: PTH109
    secrets = {
        name: os_environment.pop(name)
        for name in list(os_environment)
        if name.startswith(SECRET_ARGUMENT)
    }
    values = placeholders(os_environment, per == "node", int(nodes), int(devices), folder)
    environment = variables(os_environment, per == "node", values, folder, steps == "1")
    if (log := environment.get(NCCL_LOG, "")).startswith("logs/"):
        environment[NCCL_LOG] = f"{folder}/{log}"  # the program may have another working folder
    redirect(rank)
    argv = [secrets.get(word[1:-1], fill_placeholders(word, values)) for word in program]
    if argv[0] == sys.executable:
        environment["PATH"] = path_with_interpreter(environment.get("PATH"))
    working_folder = os_environment.get(WORKING_FOLDER)
    try:
        if any("{tmp}" in word for word in program):
            make_private(values["tmp"])
        if working_folder:
            os.chdir(working_folder)
        os.execvpe(argv[0], argv, environment)
    except OSError as error:
        print(f"error: {error.filename or argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return NO_PROGRAM if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE


def placeholders(
    os_environment: Mapping[str, str], per_node: bool, nodes: int, devices: int, folder: str
) -> dict[str, str]:
    """Return the value of each placeholder in this process."""
    node = os_environment.get("GROUP_RANK", os_environment.get("RANK", "0"))
    port = int(os_environment.get("MASTER_PORT", "29500"))
    return {
        "rank": os_environment.get("RANK", "0"),
        "local_rank": "0" if per_node else os_environment.get("LOCAL_RANK", "0"),
        "world_size": str(nodes * devices),
        "nodes": str(nodes),
        "node_rank": node,
        "devices_per_node": str(devices),
        "master_addr": os_environment.get("MASTER_ADDR", "127.0.0.1"),
        # The launch's own port may be in use by the parent of this process.
        "master_port": str(port + 1 if per_node else port),
        "output": folder,
        "python": sys.executable,
        "tmp": os.path.join(tempfile.gettempdir(), f"paceline-{os.getuid()}"),  # noqa: PTH118
    }


def variables(
    os_environment: Mapping[str, str],
    per_node: bool,
    values: Mapping[str, str],
    folder: str,
    steps: bool,
) -> dict[str, str]:
    """Return the program's environment: for one rank, or for a node that starts its own ranks."""
    environment = dict(os_environment)
    if per_node:
        environment = {
            name: value for name, value in os_environment.items() if name not in RANK_VARIABLES
        }
        environment |= {
            "NNODES": values["nodes"],
            "NODE_RANK": values["node_rank"],
            "NPROC_PER_NODE": values["devices_per_node"],
            "MASTER_ADDR": values["master_addr"],
            "MASTER_PORT": values["master_port"],
        }
    elif values["devices_per_node"] != "1":
        environment.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does; ranks share the cores
    for name in (WORKING_FOLDER, "PACELINE_STEPS"):  # for this launch only, not for its children
        environment.pop(name, None)
    environment["PACELINE_OUTPUT"] = folder
    for name in USER_VARIABLES:
        if not environment.get(name):
            environment[name] = user_name()
    if steps:
        environment["PACELINE_STEPS"] = os.path.join(folder, "steps")  # noqa: PTH118
    return environment


def make_private(folder: str) -> None:
    """Create the user's temporary folder; raise PermissionError if another user made it.

    Programs unpickle files in it.
    """
    os.makedirs(folder, mode=0o700, exist_ok=True)  # noqa: PTH103
    if os.stat(folder).st_uid != os.getuid():  # noqa: PTH116
        raise PermissionError(errno.EPERM, "belongs to another user; set TMPDIR", folder)


def user_name() -> str:
    """Return the user's name, or the number of a user without one, as in some containers."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def path_with_interpreter(path: str | None) -> str:
    """Return PATH with the interpreter's folder first, which contains ninja and other tools."""
    folder = os.path.dirname(sys.executable)  # noqa: PTH120
    return os.pathsep.join([folder, *([path] if path else [])])


def redirect(rank: int) -> None:
    """Redirect stdout and stderr to the rank's own log."""
    log = os.open(f"logs/rank-{rank:05d}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)


def fill_placeholders(word: str, values: Mapping[str, str]) -> str:
    """Return `word` with its placeholders replaced; other braces stay."""
    return PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), word)


if __name__ == "__main__":
    if len(sys.argv) < 6:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
