"""Starting the trainer as a program, and reading what it leaves behind."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from paceline.core.shape import DecoderShape, num_parameters
from paceline.engines import native
from paceline.files.trainer_program import write_program
from paceline.machines import node
from paceline.machines.node.script import agent_command
from tests import forks
from tests.example import make_spec
from tests.ports import free_port

LIMIT_S = 240
_COPIES = TemporaryDirectory(prefix="paceline-tests-")


@cache
def program(name: str = "main") -> Path:
    """What Python is given to start a program of the trainer: a copy that all tests share."""
    return write_program(name, Path(_COPIES.name) / name)


def settings(ranks: int = 1, steps: int = 6, **changes: Any) -> dict[str, Any]:
    """trainer.json as the engine writes it, for a tiny Llama; `changes` go where their key is.

    Counts that follow from others (num_microbatches, expected_parameters) are made to fit.
    """
    raw = native.settings(make_spec(ranks=ranks, steps=steps))
    raw["threads"] = 1
    for key, value in changes.items():
        parts = (raw["model"], raw["training"], raw["data"], raw["layout"], raw)
        next(part for part in parts if key in part)[key] = value
    shape = {key: value for key, value in raw["model"].items() if key != "padded_vocab"}
    raw["model"]["padded_vocab"] = DecoderShape(**shape).padded_vocab()
    if "num_microbatches" not in changes:
        batch = ranks * raw["layout"]["micro_batch"]
        raw["num_microbatches"] = raw["training"]["global_batch"] // batch
    for name in ("expected_parameters", "expected_trainable"):
        if name not in changes:
            raw[name] = num_parameters(DecoderShape(**shape))
    return raw


def command(ranks: int, file: str, *arguments: str) -> list[str]:
    """What starts a program: the node agent for several ranks, the interpreter itself for one."""
    if ranks == 1:
        return [sys.executable, file, *arguments]
    agent, *place = agent_command(ranks)
    return [sys.executable, str(Path(node.__file__).with_name(agent)), *place, file, *arguments]


def world_size(raw: dict[str, Any]) -> int:
    """Ranks that a training needs."""
    layout = raw["layout"]
    return raw["dp"] * layout["tp"] * layout["pp"] * layout["cp"]


def start(
    folder: Path, raw: dict[str, Any], instead: Path | None = None, **env: str
) -> subprocess.Popen[str]:
    """The trainer at work in `folder`, or another program `instead` of it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trainer.json").write_text(json.dumps(raw))
    return subprocess.Popen(
        command(world_size(raw), str(instead or program()), "trainer.json"),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    )


def train(folder: Path, raw: dict[str, Any]) -> int:
    """Exit code of a training in `folder`: torch is imported once for all, and ranks are forked."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trainer.json").write_text(json.dumps(raw))
    ranks = world_size(raw)
    envs = [{**os.environ, **place} for place in places(ranks)]
    words = ["paceline.trainer.main", "trainer.json"]
    return forks.run(__name__, words, envs, folder, [os.devnull] * 3, LIMIT_S)


def run_ranks(
    ranks: int,
    driver: Path,
    *arguments: str,
    folder: Path,
    limit_s: int = LIMIT_S,
    prepared: str = __name__,
) -> tuple[int, str]:
    """Run a driver in `folder`, once a rank; the exit code and what all ranks printed.

    Ranks are forks of a process that has imported what `prepared` says. When one fails the others
    are terminated.
    """
    log = folder / f"{driver.stem}-{ranks}.log"
    log.unlink(missing_ok=True)
    envs = [{**os.environ, **place} for place in places(ranks)]
    words, streams = [str(driver), *arguments], [os.devnull, str(log), str(log)]
    code = forks.run(prepared, words, envs, folder, streams, limit_s)
    return code, log.read_text()


def places(ranks: int) -> list[dict[str, str]]:
    """What a launcher tells each rank; nothing where there is one."""
    if ranks == 1:
        return [{}]
    port = free_port()
    return [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "OMP_NUM_THREADS": "1",
            "PACELINE_STORE": "rank0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        for rank in range(ranks)
    ]


def prepare() -> None:
    """Import what takes the trainer longest, in the process that is forked."""
    from tests.trainer import cpu_low_precision

    cpu_low_precision.install()
    for name in ("checkpoint", "device_mesh", "fsdp", "optim", "pipelining", "tensor"):
        importlib.import_module(f"torch.distributed.{name}")


def train_alone(folder: Path, raw: dict[str, Any], instead: Path | None = None, **env: str) -> int:
    """The same in interpreters of their own, by the node agent where there are several."""
    with start(folder, raw, instead, **env) as process:
        try:
            process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    return process.returncode


def lines(folder: Path, rank: int = 0, events: str = "steps") -> list[dict[str, Any]]:
    """One rank's events."""
    text = (folder / events / f"rank-{rank:05d}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def steps(folder: Path, rank: int = 0, events: str = "steps") -> list[dict[str, Any]]:
    """One rank's step lines."""
    return [line for line in lines(folder, rank, events) if line["event"] == "step"]


def end(folder: Path, rank: int = 0) -> dict[str, Any]:
    """One rank's end line."""
    last = lines(folder, rank)[-1]
    assert last["event"] == "end"
    return last


def log(folder: Path, rank: int = 0) -> str:
    """What one rank printed."""
    return (folder / "logs" / f"rank-{rank:05d}.log").read_text()
