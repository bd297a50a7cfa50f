"""Pipeline parallelism: stages of layers, and virtual stages (several per rank)."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.core.axes.axis import Axis, AxisTraffic, Rule, refuse
from paceline.core.axes.weights import decoder
from paceline.core.parallel_run import ParallelRun
from paceline.core.pipeline import layers_per_stage
from paceline.core.units import pluralize

RULES: tuple[Rule, ...] = (
    refuse(
        "gpipe",
        "no-pp",
        why="schedule gpipe needs pp > 1, because a schedule orders the micro-batches of pipeline "
        "stages: set layout.pp, or leave layout.schedule at 1f1b",
    ),
    refuse(
        "zero-bubble",
        "no-pp",
        why="schedule zero-bubble needs pp > 1, because without pipeline stages there is no "
        "bubble to fill: set layout.pp, or leave layout.schedule at 1f1b",
    ),
    refuse(
        "sync-every",
        "pp",
        native=True,
        why="gradient_sync every cannot run in a pipeline, because PyTorch's stages reduce "
        "gradients behind the last micro-batch: use layout.gradient_sync=last",
    ),
    refuse(
        "zero-bubble",
        "compile",
        native=True,
        why="schedule zero-bubble cannot run compiled blocks, because it splits a backward pass "
        "that torch.compile makes one piece: use training.compile=none or another schedule",
    ),
    refuse(
        "zero-bubble",
        "full",
        native=True,
        why="schedule zero-bubble cannot recompute whole blocks, because it takes weight "
        "gradients one by one and would recompute a block for each of them: use "
        "layout.recompute=selective or none, or another schedule",
    ),
    refuse(
        "zero-bubble",
        "budget",
        native=True,
        why="schedule zero-bubble cannot recompute by a budget, because it takes weight gradients "
        "one by one and would recompute parts of a block for each of them: use "
        "layout.recompute=selective or none, or another schedule",
    ),
    refuse(
        "mmdit",
        "pp",
        native=True,
        why="pp > 1 is not for an mmdit, because its two streams, its time and its text would all "
        "have to pass from stage to stage, and 12 billion parameters fit without: use "
        "layout.zero_stage=3 or layout.tp",
    ),
)
VIRTUAL_RULES: tuple[Rule, ...] = (
    refuse(
        "vp",
        "no-pp",
        why="vp > 1 needs pp > 1, because virtual stages are chunks of a pipeline rank's layers: "
        "set layout.pp, or leave layout.vp at 1",
    ),
    refuse(
        "interleaved",
        "no-vp",
        why="schedule interleaved needs vp > 1, because it alternates between several chunks of "
        "layers a rank: set layout.vp, or use layout.schedule=1f1b",
    ),
)


def whole_stages(x: ParallelRun) -> str | None:
    """pp x vp divides a decoder's layers, layers + 2, or layers + 2 + `mtp_layers`."""
    if x.shape.kind != "decoder":
        return None
    try:
        layers_per_stage(x.shape, x.layout)
    except ValueError:
        pass
    else:
        return None
    layers, further, stages = x.shape.num_layers, x.shape.mtp_layers, x.layout.pp * x.layout.vp
    whole = layers + further + 2
    mtp_note = f", or {whole} with multi-token prediction layers too" if further else ""
    reason = (
        "the last one is too small for the multi-token prediction layers: use fewer"
        if further and whole % stages == 0
        else "a pipeline is as slow as its longest one: use a pp x vp that divides one of these"
    )
    return (
        f"{pluralize(layers, 'layer')} (or {layers + 2} with embedding and head{mtp_note}) "
        f"cannot be split over pp {x.layout.pp} x vp {x.layout.vp} = {stages} stages, "
        f"because {reason}"
    )


def whole_rounds(x: ParallelRun) -> str | None:
    """With interleaved or zero-bubble, rounds (micro-batches // pp) divide the micro-batches."""
    schedule, num = x.layout.effective_schedule, x.num_microbatches
    rounds = max(1, num // x.layout.pp)
    if x.layout.pp == 1 or schedule not in ("interleaved", "zero-bubble") or num % rounds == 0:
        return None
    return (
        f"{pluralize(num, 'micro-batch')} a step cannot be split into {rounds} equal rounds, "
        f"because {schedule} repeats one round of at least pp {x.layout.pp}: use a multiple of "
        f"{x.layout.pp}"
    )


def traffic(x: ParallelRun) -> Iterator[AxisTraffic]:
    """Yield the traffic between stages, of tied embeddings and of the loss.

    Each boundary between stages exchanges b T h, forward and backward.
    """
    layout, shape, stages = x.layout, decoder(x), x.layout.pp * x.layout.vp
    if layout.pp == 1:
        return
    sequence_shards = layout.tp if layout.sequence_parallel else 1
    stream = x.tokens * shape.hidden_size // sequence_shards * x.compute_bytes
    inner = sum(stage > 0 for stage in x.stages) + sum(stage < stages - 1 for stage in x.stages)
    # A stage sends a gradient back to the stage from which it received its input.
    boundary_bytes = x.num_microbatches * stream * inner
    if shape.tied_embeddings and (x.has_first or x.has_last):
        table = shape.padded_vocab(layout.tp) // layout.tp * shape.embed_dim * x.wide_bytes
        yield AxisTraffic("pp", "send", table, "tied embedding")
        yield AxisTraffic("pp", "recv", table, "tied embedding")
    yield AxisTraffic("pp", "send", boundary_bytes, "activations")
    yield AxisTraffic("pp", "recv", boundary_bytes, "activations")
    yield AxisTraffic("pp", "all_reduce", 2 * x.wide_bytes, "norm and loss")


PIPELINE = Axis(
    name="pp",
    long_name="pipeline parallelism",
    size_name="pipeline stages",
    shards="the layers",
    sweep_help="Pipeline stages.",
    mesh_position=0,
    rules=RULES,
    size_rules=(whole_stages,),
    native_size_rules=(whole_rounds,),
    traffic=traffic,
)
VIRTUAL = Axis(
    name="vp",
    long_name="virtual pipeline stages",
    size_name="virtual pipeline stages of a rank",
    shards="the layers of a pipeline rank, in chunks",
    sweep_help="Chunks of layers a stage (interleaved).",
    rules=VIRTUAL_RULES,
)
