"""Options of a decoder that the native trainer has, and other engines are not asked for."""

from __future__ import annotations

from paceline.core.run import DEEPSEEK_SIZES, NEWER_OPTIONS
from paceline.core.shape import DecoderShape


def option_problems(shape: DecoderShape) -> list[str]:
    """The options that the shape states, one sentence each, for an engine that has none of them."""
    return native_problems(shape) + deepseek_problems(shape)


def native_problems(shape: DecoderShape) -> list[str]:
    """The same of the options that the native trainer has."""
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
    return problems


def deepseek_problems(shape: DecoderShape) -> list[str]:
    """What the shape has that Megatron alone trains, in one sentence."""
    stated = [
        f"model.{name}" for name, usual in DEEPSEEK_SIZES.items() if getattr(shape, name) != usual
    ]
    if not stated:
        return []
    return [
        f"{', '.join(stated)}: only engine megatron with engine_settings.checkout, Megatron-LM's "
        "folder, and engine megatron_bridge train such a model"
    ]
