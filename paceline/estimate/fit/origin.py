"""Which software a published row was measured with, and in which year."""

from __future__ import annotations

import re
from collections.abc import Mapping

from paceline.core.hardware import Dtype
from paceline.estimate.model.case import CudaGraphs, Generation, Implementation
from paceline.estimate.model.machine import NARROW
from paceline.estimate.model.step import NODE

ANY = "any"
"""Software that nobody names."""
_SOFTWARE: tuple[tuple[str, str], ...] = (
    ("maxtext", r"maxtext|tpu-recipes"),
    ("primus", r"primus"),
    ("native", r"paceline"),
    ("torchtitan", r"torchtitan"),
    ("composer", r"llm-foundry|mosaicml|composer"),
    ("megatron-deepspeed", r"bigscience|megatron[-_ ]deepspeed|mt-nlg|2201\.11990"),
    ("nemo", r"megatron[-_ ]bridge|\bnemo\b|nemo[-_ ]|dgxc|exemplar"),
    ("megatron", r"megatron|vtrain|2104\.04473|2205\.05198|megascale|2402\.15627"),
    ("deepspeed", r"deepspeed|1910\.02054"),
    ("hf", r"hugging ?face|transformers|accelerate"),
)
"""Names, and what stands for them in a row's stack, source, model or notes; the first one counts.
vTrain measured Megatron-DeepSpeed by a fork of its own and Megatron's kernels."""
IMPLEMENTATION_OF: Mapping[str, Implementation] = {
    **dict.fromkeys((ANY, "nemo", "megatron", "maxtext", "primus"), "fused"),
    **dict.fromkeys(("composer", "torchtitan", "deepspeed", "hf", "native"), "torch"),
    "megatron-deepspeed": "softmax",
}
"""How software computes a block."""
SOFTWARE = tuple(name for name, _ in _SOFTWARE)
_PATTERNS = tuple((name, re.compile(text, re.IGNORECASE)) for name, text in _SOFTWARE)
_ARXIV = re.compile(r"arxiv[ :]*(\d\d)\d\d\.\d+", re.IGNORECASE)
_RELEASE = re.compile(r"(?<![\d.])v?(2\d)\.(0\d|1[0-2])(?![\d])")
_DATED = re.compile(r"\b(20\d\d)-(0\d|1[0-2])-\d\d\b")
_YEARS: tuple[tuple[str, int], ...] = (
    (r"chronicles\.md|reshaping-log", 2022), (r"bigscience", 2021),
    (r"llm-foundry|neox|llama-1", 2023),
    (r"nemo-framework-launcher|nemo@|vtrain|megascale|torchtitan|deepspeed-chat", 2024),
    (r"nemo docs|functional_tests|simumax", 2025),
    (r"verification card|awsome-distributed|tpu-recipes|primus", 2026),
)  # fmt: skip
"""Of sources that state neither a release nor a paper's number."""


WHOLE_EXPERTS = ("nemo",)
"""Software whose recipes give each tensor rank experts of its own (NeMo's performance scripts)."""
CAPTURED_SINCE = 2026.4
"""Since when NeMo captures steps with experts as one CUDA graph on Blackwell, in 8 and 4 bit
(release notes of Megatron-Bridge 0.5, container 26.06)."""
BLOCKS_SINCE = 2025.8
"""Since when it captures blocks but for their experts in racks, whose hosts are slow (performance
recipes of Megatron-Bridge, container 25.11: attention, router and what sizes the exchange)."""

_MODULES_OF_HF = ("deepspeed", "hf")
"""Software that trains the modules of Hugging Face's transformers."""
FUSED_EXPERTS_DATE = 2024.8
"""Since when all of these have attention that stores no scores: transformers 4.46 (its pull
request 33298), which gave it to OPT, the last one of the models with recipes here."""


def stores_scores(software: str, software_date: float) -> bool:
    """Return True if attention stores its scores in this software of that date."""
    return software in _MODULES_OF_HF and software_date < FUSED_EXPERTS_DATE


def visits_tensors(software: str, dtype: Dtype) -> bool:
    """Whether, without ZeRO, the optimizer visits each tensor by itself: DeepSpeed's for fp16
    (deepspeed/runtime/fp16/fused_optimizer.py).
    """
    return software == "deepspeed" and dtype == "fp16"


def captured_experts(
    software: str, software_date: float, generation: Generation, domain: float, dtype: Dtype
) -> CudaGraphs:
    """What of a step with experts is a CUDA graph."""
    able = software == "nemo" and generation == "blackwell"
    if able and dtype in NARROW and software_date >= CAPTURED_SINCE:
        return "iteration"
    return "blocks" if able and domain > NODE and software_date >= BLOCKS_SINCE else "none"


def year_of_release(text: str) -> float | None:
    """Years with months of a release such as 26.02; None for what is none."""
    stated = _RELEASE.search(text)
    return 2000 + int(stated[1]) + (int(stated[2]) - 1) / 12 if stated else None


def software_of(row: Mapping[str, str]) -> str:
    """The software of SOFTWARE that a row names, by its column `stack` before its source."""
    for text in (row.get("stack", ""), row.get("model", ""), row.get("source", "")):
        for name, pattern in _PATTERNS:
            if pattern.search(text):
                return name
    return ANY


def release_of(row: Mapping[str, str]) -> float | None:
    """When a row's software came out, in years with months; its year's middle where that is all."""
    stated = year_of_release(row.get("release") or row.get("source", ""))
    if stated:
        return stated
    dated = _DATED.search(row.get("notes", ""))
    if dated:
        return int(dated[1]) + (int(dated[2]) - 1) / 12
    year = year_of(row)
    return year + 0.5 if year else None


def year_of(row: Mapping[str, str]) -> int | None:
    """The year in which a row was published; None where its source does not tell."""
    source = row.get("source", "")
    stated = _ARXIV.search(source) or _RELEASE.search(source)
    if stated:
        return 2000 + int(stated[1])
    return next((year for text, year in _YEARS if re.search(text, source, re.IGNORECASE)), None)
