"""What the name of a published model says about it where a table's columns are silent.

Shapes are those of the models' public configurations.
"""

from __future__ import annotations

import re
from math import log
from typing import NamedTuple

GATED = re.compile(
    r"llama|qwen|mi[sx]tral|deepseek|gemma|grok|phi[-_ ]?[34]|gpt[-_ ]?oss|palm|\bglm|chatglm|kimi"
    r"|\byi\b|yi[-_ ]\d|olmo|internlm|baichuan|command|cohere|granite|exaone|smollm|minicpm"
    r"|stablelm|dbrx|hunyuan|ernie[-_ ]?4|falcon[-_ ]?3|vicuna|alpaca|aquila|jamba|arctic|solar"
    r"|zephyr",
    re.IGNORECASE,
)
"""Model families whose ffn has a gate."""
PLAIN = re.compile(
    r"\bgpt(?![-_ ]?oss)|\bopt\b|bloom|falcon|nemotron|\bmpt\b|neox|pythia|cerebras|gopher|turing"
    r"|chinchilla|mt[-_ ]?nlg|starcoder|codegen|megatron|bigscience|\bbert|phi[-_ ]?[12]|minitron",
    re.IGNORECASE,
)
"""Families whose ffn has two matrices, with GELU or squared ReLU, however wide it is."""
_BILLIONS = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)\s*([bt])(?![a-z])", re.IGNORECASE)
_CLEAR = 0.04
"""How much nearer (of the logarithm) one reading has to be to the stated number of parameters."""


class Experts(NamedTuple):
    """Experts of a block."""

    number: float
    per_token: float
    width: float
    shared: float = 0
    """Experts of the same width that all tokens pass."""


_EXPERTS: tuple[tuple[str, Experts], ...] = (
    (r"gpt[-_ ]?oss[-_ ]?120b", Experts(128, 4, 2880)),
    (r"gpt[-_ ]?oss[-_ ]?20b", Experts(32, 4, 2880)),
    (r"qwen[-_ ]?3[-_ ]30b[-_ ]a3b", Experts(128, 8, 768)),
    (r"qwen[-_ ]?3[-_ ]235b[-_ ]a22b", Experts(128, 8, 1536)),
    (r"deepseek[-_ ]?v3(?!\.)|deepseek[-_ ]?r1", Experts(256, 8, 2048, 1)),
    (r"kimi[-_ ]?k2", Experts(384, 8, 2048, 1)),
    (r"mixtral[-_ ]?8x7b", Experts(8, 2, 14336)),
    (r"mixtral[-_ ]?8x22b", Experts(8, 2, 16384)),
    (r"grok[-_ ]?1", Experts(8, 2, 32768)),
    (r"\bdbrx\b", Experts(16, 4, 10752)),
    (r"llama[-_ ]?4[-_ ]?scout", Experts(16, 1, 8192, 1)),
)
_HEAD_WIDTHS: tuple[tuple[str, float], ...] = (
    (r"qwen[-_ ]?3", 128), (r"gpt[-_ ]?oss", 64), (r"gemma(?!.*(27|31)b)", 256),
)  # fmt: skip
"""Width of a head where heads do not add up to the hidden size."""
_LATENT = re.compile(r"deepseek[-_ ]?(v[23]|r1)|kimi[-_ ]?k2", re.IGNORECASE)
LATENT_SCORES = 160.0
"""Multi-head latent attention: scores of 192 and values of 128 numbers a head, so 160 on average
(DeepSeek-V3, arXiv:2412.19437); its products have about as many weights as those of h / a."""


def is_gated(model: str, width: float = 4.0, stated: str = "", by_size: float = 0.0) -> bool:
    """Whether an ffn has a gate, by what a table states, the family, the parameters or the width.

    `width` is the ffn's over the hidden size, `by_size` what `gate_by_size` says. A width that is
    no multiple of the hidden size has one where nothing else tells.
    """
    if re.search(r"\b(non-?gated|plain|squared relu|gelu)\b", stated, re.IGNORECASE):
        return False
    if re.search(r"\b(gated|swiglu|geglu)\b", stated, re.IGNORECASE) or GATED.search(model):
        return True
    if PLAIN.search(model):
        return False
    return by_size > 0 if by_size else width != round(width)


def gate_by_size(model: str, without: float, gate: float) -> float:
    """1 where the parameters in a name fit an ffn with a gate, -1 without, 0 where it is not clear.

    `without` are the parameters of the model without a gate, `gate` those of a gate.
    """
    stated = _BILLIONS.search(model)
    if not stated:
        return 0.0
    number = float(stated[1]) * (1e12 if stated[2].lower() == "t" else 1e9)
    plain, gated = abs(log(without / number)), abs(log((without + gate) / number))
    return 0.0 if abs(plain - gated) < _CLEAR else (1.0 if gated < plain else -1.0)


def experts_of(model: str) -> Experts | None:
    """The experts of a family that is known, None for others."""
    return next((e for text, e in _EXPERTS if re.search(text, model, re.IGNORECASE)), None)


def head_width(model: str) -> float | None:
    """The width of a head, None where heads add up to the hidden size."""
    return next((w for text, w in _HEAD_WIDTHS if re.search(text, model, re.IGNORECASE)), None)


def score_width(model: str) -> float:
    """Numbers of a head in the products of attention, 0 where it is the head's width."""
    return LATENT_SCORES if _LATENT.search(model) else 0.0
