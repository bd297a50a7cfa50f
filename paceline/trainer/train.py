"""Set up, run and shut down one training.

A timed run (MLPerf) starts with warm-up steps on random samples, which cover one-time costs:
library workspaces, compilation and the connections of the communicators. They use a learning rate
of 0, so no weight changes. The optimizer's state and the random number generators are restored.
"""

from __future__ import annotations

import os
import platform
import time
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import distributed as dist

from paceline.trainer.config import (
    MESH_AXES,
    ConfigError,
    ModelConfig,
    ProfileConfig,
    TrainerConfig,
)
from paceline.trainer.config_checks import config_problems
from paceline.trainer.data.batches import Loader, Sampler, sampler_of
from paceline.trainer.data.corpus import Corpus, data_record, load_corpus, load_validation
from paceline.trainer.data.latents import LatentCorpus
from paceline.trainer.evaluation import Evaluator
from paceline.trainer.measure.clock import StepClock, clock_of, watch_waits
from paceline.trainer.measure.event_log import SCHEMA, EventLog
from paceline.trainer.measure.fabric import probe_fabric
from paceline.trainer.measure.heartbeat import Heartbeat
from paceline.trainer.measure.machine import device_name, keep_freed_memory, placement
from paceline.trainer.measure.memory import MemoryWatch
from paceline.trainer.measure.mllog import MlperfRun
from paceline.trainer.measure.outcome import CheckpointError, NotFiniteError, limit_memory
from paceline.trainer.measure.profiler import PauseWatchdog, Profiler, UnprofiledRank, closing
from paceline.trainer.measure.traffic import watch_traffic
from paceline.trainer.model.attention import AttentionShape, attention_kernel, returns_lse
from paceline.trainer.model.document_attention import document_kernel
from paceline.trainer.model.dropout import preserve_rng
from paceline.trainer.optim import LossScaler
from paceline.trainer.parallel.mesh import Mesh, World, join_world, make_mesh
from paceline.trainer.parallel.token_exchange import record_exchanges
from paceline.trainer.replica.assembly import DTYPES, make_replica
from paceline.trainer.replica.replica import Replica
from paceline.trainer.schedule import BatchSizes, set_learning_rate
from paceline.trainer.trainer import Trainer


def make_profiler(
    config: ProfileConfig | None,
    world: World,
    mesh: Mesh,
    pause_watchdog: PauseWatchdog = nullcontext,
) -> Profiler:
    """Return this rank's profiler; ranks that are not profiled only wait for the others.

    Writing a profile may take long, so the watchdog does not count time inside `pause_watchdog`.
    """
    if config is None or config.tool == "nccl":
        return Profiler()
    if config.tool == "nsys" and world.device.type == "cpu":
        return Profiler()
    if world.rank not in config.ranks:
        return UnprofiledRank(config, world, pause_watchdog)
    if config.tool == "torch":
        from paceline.trainer.measure.torch_profiler import TorchProfiler  # takes 0.1 s

        return TorchProfiler(config, world, group_axes(mesh), pause_watchdog)
    if config.tool == "nsys":
        from paceline.trainer.measure.torch_profiler import NsysProfiler

        return NsysProfiler(config, world, group_axes(mesh), pause_watchdog)
    from paceline.trainer.measure.memory_profiler import MemoryProfiler

    return MemoryProfiler(config, world, pause_watchdog)


def group_axes(mesh: Mesh) -> dict[str, str]:
    """Return the mesh axis of every process group by the group's name.

    Groups that shard optimizer states count as `dp`.
    """
    axes = {name: getattr(mesh, name) for name in reversed(MESH_AXES)}
    states = [mesh.data, mesh.replicate, mesh.shard, mesh.expert_data]
    groups: dict[str, str] = {}
    for name, axis in [*axes.items(), ("ep", mesh.ep), *(("dp", axis) for axis in states)]:
        if axis.group is not None:
            groups.setdefault(axis.group.group_name, name)
    return groups


def train(
    config: TrainerConfig, events: EventLog, heartbeat: Heartbeat, timed_run: MlperfRun
) -> bool | None:
    """Run all steps and write the start line and one line per step.

    Return whether an evaluation reached the target, which ends the training; None without a target.
    A timed run does not touch data before its clock starts. Raise ConfigError for an unsupported
    configuration, NotFiniteError when loss or gradient norm are not finite.
    """
    problems = config_problems(config, int(os.environ.get("WORLD_SIZE", "1")))
    if problems:
        raise ConfigError("; ".join(problems))
    heartbeat.beat("while the ranks join", waits=True)
    world, mesh = join_ranks(config)
    fabric = probe_fabric(world)
    memory = MemoryWatch(
        world.device,
        config.memory_parts and config.mlperf is None,
        untracked_reason(config),
        limited=config.memory_limit_bytes is not None,
    )
    corpus = None if config.mlperf else load_corpus(config)
    limit_memory(config.memory_limit_bytes, config.device)
    heartbeat.beat("while building the model")
    steps = StepClock(clock_of(world.device))
    stop_waits = watch_waits(steps) if world.size > 1 else None
    stop_spans = record_exchanges(steps) if mesh.ep.size > 1 else None
    stop_traffic = watch_traffic(steps, world, mesh) if world.size > 1 else None
    replica = make_replica(config, world, mesh, steps)
    load_initial_weights(config, replica, heartbeat)
    heartbeat.follow(steps, replica.parts, replica.stages)
    profiler = make_profiler(config.profile, world, mesh, heartbeat.pause)
    trainer = Trainer(
        config=config,
        replica=replica,
        world=world,
        steps=steps,
        events=events,
        memory=memory,
        profiler=profiler,
    )
    if config.mlperf is not None:
        start_clock(trainer, config, timed_run, heartbeat)
    corpus = corpus or load_corpus(config)
    trainer.masked = corpus.masked
    evaluator = evaluator_of(config, replica, world)
    if evaluator is not None:
        trainer.watch_quality(evaluator, timed_run)
        timed_run.data(train_samples(config, corpus), evaluator.num_samples)
    sampler = sampler_of(config, corpus.num_windows)
    first_step = trainer.restore(corpus.num_windows, heartbeat.pause)
    loader = Loader(
        corpus, sampler, config, mesh, pin=world.device.type == "cuda", first=first_step
    )
    with ExitStack() as cleanup:
        for end in (stop_traffic, stop_spans, stop_waits, loader.close):
            if end is not None:
                cleanup.callback(end)
        cleanup.enter_context(closing(profiler, heartbeat.pause))
        start = {**start_record(config, world, mesh, corpus), "fabric": fabric}
        target_reached = run_training(trainer, loader, start, first_step)
    if world.size > 1:
        # A rank that exits early would break the last collective of a slower one. The group itself
        # is never destroyed, because gloo's destructor can wait forever for one of its threads.
        heartbeat.beat("at the end", waits=True)
        dist.barrier()
    return target_reached


def run_training(
    trainer: Trainer, loader: Loader, start: dict[str, Any], first_step: int
) -> bool | None:
    """Run the training; if it becomes NaN, finish writing the previous checkpoint."""
    try:
        return trainer.run(loader, start, first_step)
    except NotFiniteError:
        with suppress(CheckpointError):
            trainer.finish_checkpoint()
        raise


def load_initial_weights(config: TrainerConfig, replica: Replica, heartbeat: Heartbeat) -> None:
    """Load the initial weights if the configuration has a source."""
    source = config.training.initial_weights
    if source is None or config.checkpoint.resume is not None:
        return
    from paceline.trainer.pretrained import load_weights  # takes 0.1 s

    with heartbeat.pause():
        load_weights(replica, source, config.model)


def start_clock(
    trainer: Trainer, config: TrainerConfig, timed_run: MlperfRun, heartbeat: Heartbeat
) -> None:
    """Warm up, wait for all ranks, and start the clock of a timed run."""
    assert config.mlperf is not None, "the run is timed"
    steps = config.mlperf.warmup_steps
    heartbeat.beat("while warming up")
    with heartbeat.pause():
        warmup_s = warm_up(trainer, config, steps) if steps else None
        if trainer.world.size > 1:
            dist.barrier()
    timed_run.start(warmup_s)


def evaluator_of(config: TrainerConfig, replica: Replica, world: World) -> Evaluator | None:
    """Return the evaluator; None without evaluations."""
    if config.training.evaluation is None:
        return None
    return Evaluator(config, replica, world, load_validation(config))


def train_samples(config: TrainerConfig, corpus: Corpus) -> int:
    """Return the number of distinct samples; for an endless source, those of the whole training."""
    num_samples = corpus.num_samples if isinstance(corpus, LatentCorpus) else corpus.num_windows
    if num_samples is not None:
        return num_samples
    training = config.training
    return BatchSizes(training.ramp_up, training.global_batch).samples_before(training.steps)


def join_ranks(config: TrainerConfig) -> tuple[World, Mesh]:
    """Set up PyTorch and join the process group; raise ConfigError without the device."""
    check_device(config.device)
    if config.device == "cpu":
        keep_freed_memory()
    set_threads(config.threads)
    torch.set_float32_matmul_precision(config.training.matmul_precision)
    world = join_world(config.device)
    return world, make_mesh(world, config.layout, config.dp)


def set_threads(count: int | None) -> None:
    """Set the number of threads of this thread's operators; None for PyTorch's default."""
    # Read the default first. Until then PyTorch gives this thread the number that any other thread
    # sets last, as the loader does.
    default = torch.get_num_threads()
    torch.set_num_threads(count or default)


def untracked_reason(config: TrainerConfig) -> str | None:
    """Return why the tensors of a CPU step cannot be tracked; None when they can."""
    if config.training.compile != "none":
        return "torch's memory tracker does not see the allocations of compiled blocks"
    return None


def check_device(kind: str) -> None:
    """Raise ConfigError when PyTorch cannot use this kind of device."""
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"device {kind}: use cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device cuda: PyTorch {torch.__version__} finds no usable GPU here")


def attention_name(config: TrainerConfig, device: torch.device) -> str:
    """Return the attention kernel of this rank's micro-batches; see `attention_kernel`."""
    model, layout = config.model, config.layout
    tokens, heads = config.training.seq_len, model.num_heads // layout.tp
    kv_heads = max(1, model.kv_heads // layout.tp) if isinstance(model, ModelConfig) else heads
    if layout.cp > 1 and layout.cp_exchange == "ring":
        return "flash_attention"
    latent = model.latent_attention if isinstance(model, ModelConfig) else None
    shape = AttentionShape(
        tokens,
        heads,
        kv_heads,
        model.head_dim,
        isinstance(model, ModelConfig),
        latent.v_head_dim if latent else None,
    )
    dtype = DTYPES[config.training.dtype]
    if isinstance(model, ModelConfig) and config.data.document_mask:
        how = document_kernel(device, dtype, model.attention_dropout_p, model.attention_sinks)
        return f"documents, {how}"
    if isinstance(model, ModelConfig) and model.attention_sinks:
        fused = returns_lse(device, dtype, model.attention_dropout_p)
        kernel = "flash_attention" if fused else "math"
    else:
        kernel = attention_kernel(shape, dtype, device)
    if not isinstance(model, ModelConfig):
        return kernel
    windows = [model.window(layer) or tokens for layer in range(model.num_layers)]
    if min(windows) >= tokens:
        return kernel
    return "windowed" if max(windows) < tokens else f"{kernel}, windowed"


def start_record(config: TrainerConfig, world: World, mesh: Mesh, corpus: Corpus) -> dict[str, Any]:
    """Return the start line: program, machine and model."""
    return {
        "schema": SCHEMA,
        "rank": world.rank,
        "world_size": world.size,
        "local_rank": world.local_rank,
        "host": os.environ.get("PACELINE_HOST") or platform.node(),
        "pid": os.getpid(),
        "time_unix": time.time(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "backend": world.backend,
        "device_name": device_name(world.device),
        "num_parameters": config.expected_parameters,
        "trainable_parameters": config.expected_trainable,
        "layout": {**config.layout_record(), "coordinates": mesh.coordinates},
        "dtype": config.training.dtype,
        "matmul_precision": config.training.matmul_precision,
        "attention": attention_name(config, world.device),
        "threads": torch.get_num_threads(),
        **placement(),
        "data": data_record(config.data, corpus),
    }


def warm_up(trainer: Trainer, config: TrainerConfig, steps: int) -> float:
    """Train and evaluate on random samples without effect; return the seconds.

    Call it before anything is trained or loaded, because it clears the optimizer's state.
    """
    start = time.perf_counter()
    replica, world = trainer.replica, trainer.world
    synthetic = replace(config, data=replace(config.data, source="synthetic", packing="packed"))
    corpus, mesh = load_corpus(synthetic), replica.mesh
    training = config.training
    sampler = Sampler(
        corpus.num_windows, training.global_batch, config.dp, training.seed, training.ramp_up
    )
    loader = Loader(corpus, sampler, synthetic, mesh, pin=world.device.type == "cuda")
    masked, scaler = trainer.masked, trainer.scaler
    with preserve_rng(world.device):
        try:
            trainer.masked = False
            trainer.scaler = LossScaler(training.loss_scale) if scaler is not None else None
            for _ in range(steps):
                batch, _ = loader.next()
                set_learning_rate(trainer.optimizer, 0.0)
                trainer.step(batch.to(world.device))
            samples = (
                min(steps * config.num_microbatches, 8) * config.layout.micro_batch * config.dp
            )
            if steps:
                Evaluator(
                    limit_evaluation(synthetic, samples), replica, world, load_validation(synthetic)
                ).loss()
        finally:
            loader.close()
            trainer.masked, trainer.scaler = masked, scaler
    trainer.optimizer.state.clear()
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    return time.perf_counter() - start


def limit_evaluation(config: TrainerConfig, samples: int) -> TrainerConfig:
    """Limit the evaluation to a number of samples."""
    evaluation = config.training.evaluation
    assert evaluation is not None, "timed runs have evaluations"
    smaller = replace(evaluation, samples=min(evaluation.samples, samples))
    return replace(config, training=replace(config.training, evaluation=smaller))
