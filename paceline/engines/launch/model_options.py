"""Options of a decoder that the native trainer has, and other engines are not asked for."""

from __future__ import annotations

from paceline.core.run import ESTIMATED_ALONE, NEWER_OPTIONS
from paceline.core.shape import DecoderShape


def option_problems(shape: DecoderShape) -> list[str]:
    """The options that the shape states, one sentence each, for an engine that has none of them."""
    problems = [
        f"model.{name} {getattr(shape, name)} is not in this engine: use engine native, or "
        f"model.{name}={'null' if usual is None else str(usual).lower()}"
        for name, usual in NEWER_OPTIONS.items()
        if getattr(shape, name) != usual
    ]
    if shape.norm_position == "both":
        problems.append(
            "model.norm_position both is not in this engine: use engine native, or "
            "model.norm_position=pre"
        )
    return problems + estimated_alone(shape)


def estimated_alone(shape: DecoderShape) -> list[str]:
    """What the shape has that no engine trains, one sentence each."""
    return [
        f"model.{name} is in no engine: models with it are estimated, and their logs parsed"
        for name, usual in ESTIMATED_ALONE.items()
        if getattr(shape, name) != usual
    ]
