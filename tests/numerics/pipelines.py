"""Trains one step with every schedule and compares it with a single process.

Started as a program, once per rank: pipelines.py CASES.json FILE. Rank 0 writes what each case came
to, the worst of all ranks; `outcome` starts it once for each number of ranks.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from paceline.trainer.config import TrainerConfig, parse_config
from paceline.trainer.data.batches import LocalBatch
from paceline.trainer.measure.clock import HostClock, StepClock, watch_waits
from paceline.trainer.measure.event_log import EventLog
from paceline.trainer.measure.heartbeat import Heartbeat
from paceline.trainer.model.decoder import DecoderBlock
from paceline.trainer.model_config import ModelConfig
from paceline.trainer.parallel.mesh import Mesh, World, join_world, make_mesh
from paceline.trainer.parallel.stages import schedule_problems
from paceline.trainer.replica.assembly import make_replica
from paceline.trainer.replica.pipeline import PipelineRunner, make_schedule
from paceline.trainer.replica.replica import PipelineReplica, Replica
from tests.numerics.ranks import run_ranks
from tests.trainer.example import settings

LIMIT_S = 300
SCHEDULES = (
    ("gpipe", 1),
    ("1f1b", 1),
    ("zero-bubble", 1),
    ("gpipe", 2),
    ("interleaved", 2),
    ("zero-bubble", 2),
)
WORK_S = 0.03


def case(pp: int, dp: int = 1, num_microbatches: int = 4, **changes: Any) -> dict[str, Any]:
    """One case's trainer.json and its fault, in fp64 unless `changes` say otherwise."""
    fault = changes.pop("fault", "")
    raw = settings(
        **{"dtype": "fp64", "num_layers": 4, "seq_len": 16, "micro_batch": 2, **changes},
        pp=pp,
        dp=dp,
        num_microbatches=num_microbatches,
        global_batch=dp * num_microbatches * changes.get("micro_batch", 2),
    )
    return {"settings": raw, "fault": fault}


def cases(ranks: int) -> dict[str, dict[str, Any]]:
    """What is compared in a world, by name."""
    if ranks == 2:
        return {
            **{f"{s} vp{vp}": case(2, schedule=s, vp=vp) for s, vp in SCHEDULES},
            "uneven": case(2, schedule="1f1b", vp=2, num_layers=6),
            "only embedding and head": case(2, schedule="interleaved", vp=2, num_layers=2),
            "one micro-batch": case(2, num_microbatches=1, schedule="interleaved", vp=2),
            "odd micro-batches": case(2, num_microbatches=3, schedule="1f1b"),
            "fewer than stages": case(2, num_microbatches=1, schedule="1f1b"),
            **{f"full {s}": case(2, schedule=s, recompute="full") for s in ("1f1b", "gpipe")},
            "selective zero-bubble": case(2, schedule="zero-bubble", recompute="selective"),
            "tied": case(2, schedule="zero-bubble", vp=2, tied_embeddings=True),
            "fp32": case(2, schedule="1f1b", dtype="fp32"),
            "bf16": case(2, schedule="interleaved", vp=2, dtype="bf16", recompute="full"),
            "divided": case(2, schedule="1f1b", fault="divided"),
        }
    return {
        **{f"{s} vp{vp}": case(4, schedule=s, vp=vp, num_layers=4 * vp) for s, vp in SCHEDULES},
        "uneven": case(4, num_microbatches=8, schedule="zero-bubble", num_layers=6),
        **{f"{m} of 4 full": case(4, num_microbatches=m, recompute="full") for m in (1, 2, 3)},
        "1 of 2 zero3": case(2, 2, num_microbatches=1, zero_stage=3),
        **{f"{s} vp{vp} zero3": case(2, 2, schedule=s, vp=vp, zero_stage=3) for s, vp in SCHEDULES},
        **{f"1f1b zero{zero}": case(2, 2, schedule="1f1b", zero_stage=zero) for zero in (0, 1, 2)},
        "zero-bubble zero0": case(2, 2, schedule="zero-bubble", vp=2),
        "zero3 full": case(2, 2, schedule="1f1b", zero_stage=3, recompute="full"),
        "zero3 bf16": case(2, 2, schedule="zero-bubble", zero_stage=3, dtype="bf16"),
    }


@functools.cache
def outcome(ranks: int) -> dict[str, Any]:
    """{case: {figure: the worst of all ranks}}, and "refused", "waits", "alive" and "beats"."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cases.json").write_text(json.dumps(cases(ranks)))
        code, output = run_ranks(
            ranks, Path(__file__), "cases.json", "outcome.json", folder=folder, limit_s=LIMIT_S
        )
        assert code == 0, output
        return json.loads((folder / "outcome.json").read_text())


def batch_unit(config: TrainerConfig, replicas: range) -> LocalBatch:
    """The micro-batches of some of the replicas, one after the other."""
    shape = (config.dp, config.num_microbatches, config.layout.micro_batch, config.training.seq_len)
    generator = torch.Generator().manual_seed(3)
    assert isinstance(config.model, ModelConfig)
    ids = torch.randint(0, config.model.vocab_size, (2, *shape), generator=generator)
    inputs, targets = ids[:, replicas.start : replicas.stop].flatten(1, 2)
    return LocalBatch(inputs, targets, targets.numel())


def alone(config: TrainerConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of every replica and their mean gradient, from a single process."""
    raw = {"pp": 1, "vp": 1, "zero_stage": 0, "recompute": "none"}
    layout = type(config.layout)(**{**vars(config.layout), **raw})
    single = type(config)(**{**vars(config), "layout": layout})
    replica = make_replica(
        single, World(0, 0, 1, torch.device("cpu"), None), Mesh(), StepClock(HostClock())
    )
    losses = [step(replica, batch_unit(config, range(i, i + 1)))[1] for i in range(config.dp)]
    return torch.stack(losses), {
        name: p.grad / config.dp for name, p in replica.named_parameters() if p.grad is not None
    }


def step(replica: Replica, batch: LocalBatch) -> tuple[Tensor, Tensor]:
    """(gradient norm, loss) of one step."""
    return replica.norm_and_loss(replica.train(batch, 1 / batch.num_valid_targets))


def pipeline(
    config: TrainerConfig, world: World, steps: StepClock | None = None
) -> tuple[PipelineReplica, PipelineRunner]:
    """This rank's stages, and what runs them."""
    layout = config.layout
    mesh = mesh_of(world, layout.pp, config.dp, layout.zero_stage)
    replica = make_replica(config, world, mesh, steps or StepClock(HostClock()))
    assert isinstance(replica, PipelineReplica)
    assert isinstance(replica.runner, PipelineRunner)
    return replica, replica.runner


@functools.cache
def mesh_of(world: World, pp: int, dp: int, zero_stage: int) -> Mesh:
    """A mesh, whose groups take a while to join."""
    layout = parse_config(case(pp, dp, zero_stage=zero_stage)["settings"]).layout
    return make_mesh(world, layout, dp)


def whole(tensor: Tensor) -> Tensor:
    """A tensor with all its shards."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def worst(values: list[float]) -> list[float]:
    """The largest of all ranks, element by element."""
    largest = torch.tensor(values, dtype=torch.float64).nan_to_num(torch.inf)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.tolist()


def compared(config: TrainerConfig, fault: str, world: World) -> dict[str, float]:
    """How far the second of two equal steps is from the single process's, relative."""
    losses, gradients = alone(config)
    replica, runner = pipeline(config, world)
    runner.schedule.scale_grads = fault == "divided"
    mine = replica.mesh.dp.index
    norm = loss = torch.zeros(())
    for _ in range(2):
        for part in replica.parts:
            part.zero_grad()
        norm, loss = step(replica, batch_unit(config, range(mine, mine + 1)))
    errors = [
        (whole(p.grad) - gradients[name]).abs().max() / gradients[name].abs().max()
        for name, p in replica.named_parameters()
        if p.grad is not None
    ]
    wanted = torch.nn.utils.get_total_norm(list(gradients.values()))
    buffers = [
        getattr(info, "buffer", None)
        for stage in runner.stages
        for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values())
        for info in infos
    ]
    found = worst(
        [
            (loss / losses[mine] - 1).abs().item(),
            torch.stack(errors).max().item(),
            (norm / wanted - 1).abs().item(),
            float(sum(buffer.numel() for buffer in buffers if buffer is not None)),
            float(len(errors) != len(list(replica.named_parameters()))),
        ]
    )
    return dict(zip(("loss", "gradient", "norm", "buffers", "missing"), found, strict=True))


def alive(schedule: str, pp: int, num_microbatches: int, world: World) -> list[int]:
    """The most micro-batches that each pipeline rank holds at once."""
    config = parse_config(case(pp, 1, num_microbatches, schedule=schedule)["settings"])
    replica, runner = pipeline(config, world)
    (stage,) = runner.stages
    most = 0

    def look() -> None:
        nonlocal most
        most = max(most, len(stage.fwd_cache) + len(stage.backward_state))

    stage.on_progress = look
    step(replica, batch_unit(config, range(1)))
    counts: list[int | None] = [None] * world.size
    dist.all_gather_object(counts, most)
    return [count or 0 for count in counts]


def beats(schedule: str, world: World) -> list[int]:
    """The fewest and the most beats of a rank's watchdog in a step of four micro-batches."""
    config = parse_config(case(world.size, 1, 4, schedule=schedule)["settings"])
    replica, _ = pipeline(config, world)
    pulse = Heartbeat(EventLog("events", world.rank), f"rank-{world.rank}.stack")
    pulse.follow(StepClock(HostClock()), replica.parts, replica.stages)
    step(replica, batch_unit(config, range(1)))
    counts: list[int | None] = [None] * world.size
    dist.all_gather_object(counts, pulse._beats)
    found = [count or 0 for count in counts]
    return [min(found), max(found)]


def waits(steps: StepClock, world: World) -> dict[str, float]:
    """What the first rank does in a step in which only forward passes take time, in seconds."""
    config = parse_config(case(world.size, 1, 4, schedule="gpipe")["settings"])
    replica, _ = pipeline(config, world, steps)
    batch, layers = batch_unit(config, range(1)), DecoderBlock._layers
    step(replica, batch)
    pause_s = WORK_S * world.size / config.model.num_layers

    def slow(self: DecoderBlock, *inputs: Any) -> Tensor:
        time.sleep(pause_s)
        return layers(self, *inputs)

    DecoderBlock._layers = slow  # type: ignore[method-assign]
    dist.barrier()
    steps.start()
    step(replica, batch)
    step_time_s, wait_s = steps.read(steps.lap())
    DecoderBlock._layers = layers  # type: ignore[method-assign]
    bubble_s, work_s = (world.size - 1) * WORK_S, config.num_microbatches * WORK_S
    return {"step": step_time_s, "wait": wait_s, "bubble": bubble_s, "work": work_s}


def refusals(world: World) -> list[str]:
    """Where PyTorch and `schedule_problems` disagree about what a schedule can run."""
    config = parse_config(case(world.size)["settings"])
    (stage,) = pipeline(config, world)[1].stages
    disagreements: list[str] = []
    for schedule, vp in SCHEDULES:
        for count in range(1, 6 * world.size):
            stage.num_stages = vp * world.size
            try:
                make_schedule(schedule, [stage] * vp, count)
                refused = False
            except ValueError:
                refused = True
            if refused != bool(schedule_problems(schedule, world.size, vp, count)):
                disagreements.append(f"{schedule} vp {vp}, {count} micro-batches")
    return disagreements


def main(all_cases: dict[str, dict[str, Any]], file: Path) -> None:
    """Run all cases one after the other in one world."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    world = join_world("cpu")
    steps = StepClock(HostClock())
    watch_waits(steps)
    found: dict[str, Any] = {}
    for name, row in all_cases.items():
        config = parse_config(row["settings"])
        found[name] = compared(config, row["fault"], world)
    found["waits"] = waits(steps, world)
    found["alive"] = {s: alive(s, world.size, 8, world) for s in ("gpipe", "1f1b", "zero-bubble")}
    found["beats"] = {s: beats(s, world) for s in ("gpipe", "1f1b", "zero-bubble")}
    found["alive few"] = {str(m): alive("1f1b", world.size, m, world) for m in (1, world.size - 1)}
    found["refused"] = refusals(world)
    if world.rank == 0:
        file.write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
