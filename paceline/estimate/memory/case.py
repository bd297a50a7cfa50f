"""What memory depends on beside what step time does, from a resolved run."""

from __future__ import annotations

from dataclasses import replace

from paceline.core.run import RunSpec
from paceline.core.shape import linear_sizes, num_parameters, trainable_parameters, uses
from paceline.estimate.model.case import Case, cases_of
from paceline.estimate.model.weights import block_weights


def with_memory(case: Case, spec: RunSpec) -> Case:
    """The case with its schedule, embeddings, bytes of a number and adapters.

    Adapters that train beside embeddings and norms count as adapters alone, as the time model does.
    """
    shape, layout, lora = spec.model, spec.layout, spec.lora
    case = replace(
        case,
        schedule=layout.schedule,
        dp_shard=float(layout.dp_shard or 0),
        compute_bytes=4.0 if spec.training.dtype == "fp32" else 2.0,
        gathers_keys=layout.cp_exchange == "all-gather",
    )
    if lora is not None:
        trained = trainable_parameters(shape, lora) / num_parameters(shape)
        sizes = linear_sizes(shape)
        widths = sum(sum(sizes[name]) * uses(shape, name) for name in lora.targets if name in sizes)
        case = replace(
            case, frozen=True, trained_share=trained, adapter_rank=lora.rank, adapter_widths=widths
        )
    if shape.kind == "mmdit":
        # The time model's blocks of 12 h^2 stand for its products; what is left counts as theirs too.
        counted = float(block_weights(cases_of([case]))[0])
        more = num_parameters(shape) / shape.num_layers - counted
        return replace(case, more_weights=max(0.0, more))
    learned = shape.positions == "learned"
    return replace(
        case,
        vocab=float(shape.padded_vocab(layout.tp)),
        table_width=float(shape.embedding_size or 0),
        tied=shape.tied_embeddings,
        positions=float(shape.max_positions + shape.position_offset) if learned else 0.0,
    )
