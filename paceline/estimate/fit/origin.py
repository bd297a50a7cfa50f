"""Software and year of a published row."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypedDict

from paceline.core.hardware import Dtype
from paceline.estimate.model.case import CudaGraphs, EpOverlap, Generation, Implementation
from paceline.estimate.model.experts import EXPERTS_REFERENCE_DATE
from paceline.estimate.model.machine import NARROW
from paceline.estimate.model.step import JITTER_NODE_DEVICES

ANY = "any"
"""Name of unknown software."""
_SOFTWARE: tuple[tuple[str, str], ...] = (
    ("hai-llm", r"hai-?llm|2412\.19437"),
    ("maxtext", r"maxtext|tpu-recipes"),
    ("levanter", r"levanter|\bmarin\b"),
    ("automodel", r"automodel"),
    ("primus", r"primus"),
    ("native", r"paceline"),
    ("torchtitan", r"torchtitan"),
    ("composer", r"llm-foundry|mosaicml|composer"),
    ("megatron-deepspeed", r"bigscience|megatron[-_ ]deepspeed|mt-nlg|2201\.11990"),
    ("nemo", r"megatron[-_ ]bridge|\bnemo\b|nemo[-_ ]|dgxc|dgx cloud|exemplar"),
    ("megatron", r"megatron|vtrain|2104\.04473|2205\.05198|megascale|2402\.15627"),
    ("deepspeed", r"deepspeed|1910\.02054"),
    ("hf", r"hugging ?face|transformers|accelerate"),
)
"""Names of software, and the pattern that identifies each in a row's stack, source, model or notes;
the first match counts. vTrain measured Megatron-DeepSpeed with its own fork and Megatron's kernels.
"""
JAX = ("maxtext", "levanter")
"""Software that XLA compiles; without a stated micro-batch it passes a replica's batch at once."""
IMPLEMENTATION_OF: Mapping[str, Implementation] = {
    **dict.fromkeys((ANY, "hai-llm", "nemo", "megatron", "primus", *JAX), "fused"),
    **dict.fromkeys(("automodel", "composer", "torchtitan", "deepspeed", "hf", "native"), "torch"),
    "megatron-deepspeed": "softmax",
}
"""Implementation of a block by software."""
SOFTWARE = tuple(name for name, _ in _SOFTWARE)
_PATTERNS = tuple((name, re.compile(text, re.IGNORECASE)) for name, text in _SOFTWARE)
_ARXIV = re.compile(r"arxiv[ :]*(\d\d)\d\d\.\d+", re.IGNORECASE)
_RELEASE = re.compile(r"(?<![\d.])v?(2\d)\.(0\d|1[0-2])(?![\d])")
_DATED = re.compile(r"\b(20\d\d)-(0\d|1[0-2])-\d\d\b")
_YEARS: tuple[tuple[str, int], ...] = (
    (r"chronicles\.md|reshaping-log", 2022), (r"bigscience", 2021),
    (r"llm[- ]foundry|neox|llama-1", 2023),
    (r"nemo-framework-launcher|nemo@|vtrain|megascale|torchtitan|deepspeed-chat", 2024),
    (r"nemo docs|functional_tests|simumax", 2025),
    (r"verification card|awsome-distributed|tpu-recipes|primus", 2026),
)  # fmt: skip
"""Year of sources that state neither a release nor a paper's number."""


WHOLE_EXPERTS = ("nemo",)
"""Software whose recipes give each tensor rank different experts (NeMo's performance scripts)."""
CAPTURED_SINCE = 2026.4
"""Date from which NeMo captures steps with experts as one CUDA graph on Blackwell, in 8 and 4 bit
(release notes of Megatron-Bridge 0.5, container 26.06)."""
BLOCKS_SINCE = 2025.8
"""Date from which NeMo captures blocks without their experts in racks, whose CPUs are slow
(performance recipes of Megatron-Bridge, container 25.11: attention, router, and the computation of
the exchange's sizes)."""

_MODULES_OF_HF = ("deepspeed", "hf")
"""Software that trains the modules of Hugging Face transformers."""
FLASH_MODULES_DATE = 2024.8
"""Date from which all of these have attention that does not store scores: transformers 4.46 (its
pull request 33298), which added it to OPT, the last of the models with recipes here."""


class OwnKernels(TypedDict, total=False):
    """Fields of a case that software with its own kernels for experts sets."""

    ep_overlap: EpOverlap
    dispatch_bytes: float
    narrow_experts: bool
    software_date: float
    dual_pipe: bool
    norm_recompute: float
    latent_recompute: float
    gate_recompute: bool
    saved_bytes: float
    moment_bytes: float


def own_kernels(software: str, software_date: float, dtype: Dtype) -> OwnKernels:
    """Return the fields that HAI-LLM, DeepSeek's software, sets for experts; nothing for others.

    Dispatch overlaps with another micro-batch (DualPipe) and sends 8-bit activations, and grouped
    GEMMs scale blocks of 8-bit operands (arXiv:2412.19437, sections 3.2 and 3.3). Public software
    took these kernels over (DeepEP and DeepGEMM of February 2025), so their date is at least that
    of the coefficients. Norms, latent attention's up-projections and SwiGLU are recomputed, GEMM
    inputs are saved in 8 bit, and Adam's moments are bf16 (sections 3.2.3 and 3.3.3).
    """
    if software != "hai-llm":
        return {}
    return OwnKernels(
        ep_overlap="on",
        dispatch_bytes=1.0 if dtype in NARROW else 2.0,
        narrow_experts=True,
        software_date=max(software_date, EXPERTS_REFERENCE_DATE),
        dual_pipe=True,
        norm_recompute=1.0,
        latent_recompute=1.0,
        gate_recompute=True,
        saved_bytes=1.0 if dtype in NARROW else 2.0,
        moment_bytes=2.0,
    )


def stores_scores(software: str, software_date: float) -> bool:
    """Return True if attention stores its scores in this software of that date."""
    return software in _MODULES_OF_HF and software_date < FLASH_MODULES_DATE


def visits_tensors(software: str, dtype: Dtype) -> bool:
    """Return True if the optimizer, without ZeRO, updates tensor by tensor: DeepSpeed's for fp16.

    Source: deepspeed/runtime/fp16/fused_optimizer.py.
    """
    return software == "deepspeed" and dtype == "fp16"


def expert_cuda_graphs(
    software: str, software_date: float, generation: Generation, domain: float, dtype: Dtype
) -> CudaGraphs:
    """Return the part of a step with experts that is captured in CUDA graphs."""
    supports_graphs = software == "nemo" and generation == "blackwell"
    if supports_graphs and dtype in NARROW and software_date >= CAPTURED_SINCE:
        return "iteration"
    return (
        "blocks"
        if supports_graphs and domain > JITTER_NODE_DEVICES and software_date >= BLOCKS_SINCE
        else "none"
    )


def year_of_release(text: str) -> float | None:
    """Return the date of a release such as 26.02 as a decimal year; None if it is not a release."""
    match = _RELEASE.search(text)
    return 2000 + int(match[1]) + (int(match[2]) - 1) / 12 if match else None


def software_of(row: Mapping[str, str]) -> str:
    """Return the name in SOFTWARE that a row states: stack first, then model, then source."""
    for text in (row.get("stack", ""), row.get("model", ""), row.get("source", "")):
        for name, pattern in _PATTERNS:
            if pattern.search(text):
                return name
    return ANY


def release_of(row: Mapping[str, str]) -> float | None:
    """Return the release date of a row's software as a decimal year.

    If only the year is known, the date is its middle.
    """
    release = year_of_release(row.get("release") or row.get("source", ""))
    if release:
        return release
    date = _DATED.search(row.get("notes", ""))
    if date:
        return int(date[1]) + (int(date[2]) - 1) / 12
    year = year_of(row)
    return year + 0.5 if year else None


def year_of(row: Mapping[str, str]) -> int | None:
    """Return the year in which a row was published; None if its source does not state it."""
    source = row.get("source", "")
    match = _ARXIV.search(source) or _RELEASE.search(source)
    if match:
        return 2000 + int(match[1])
    return next((year for text, year in _YEARS if re.search(text, source, re.IGNORECASE)), None)
