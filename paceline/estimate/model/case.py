"""The input of the formulas: one training run on one kind of machine in one layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from math import inf
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from paceline.core.layout import Schedule

Floats = NDArray[np.float64]
CudaGraphs = Literal["none", "blocks", "iteration"]
Dispatcher = Literal["any", "alltoall", "deepep", "hybridep"]
EpOverlap = Literal["any", "on", "off"]
CpExchange = Literal["any", "all-gather", "all-to-all", "ring"]
Generation = str
"""A name of generations.yaml; `amd` are MI300X and MI325X (CDNA 3)."""
Implementation = Literal["softmax", "fused", "torch"]
"""Kernels of a block: `softmax` (Megatron of 2020-22 with fused softmax), `fused` (Transformer
Engine and Megatron core), or `torch` (PyTorch modules)."""


@dataclass(frozen=True)
class Case:
    """One training run; sizes are those of the whole model, rates those of one device."""

    layers: float
    hidden: float
    ffn: float
    heads: float
    kv_heads: float
    head_dim: float
    vocab: float
    seq_len: float
    """Tokens of a sample."""
    peak_16bit: float
    """Dense FLOP/s of 16-bit GEMMs; of fp32 GEMMs if the run uses fp32."""
    memory_bytes_per_s: float
    intra_bytes_per_s: float
    """Bytes/s of one device to its NVLink domain, in one direction."""
    inter_bytes_per_s: float
    """Bytes/s of one device's share of its node's network ports, in one direction."""
    devices: float
    global_batch: float
    """Samples per step."""
    inter_measured: bool = False
    """True if `inter_bytes_per_s` is what collectives reach, so that `inter` does not apply."""
    gated: bool = False
    """True for a gated ffn of three matrices, False for two matrices."""
    causal: bool = True
    frozen: bool = False
    """True if block weights are not trained (LoRA) and have no weight gradient."""
    experts: float = 1
    experts_per_token: float = 1
    expert_groups: float = 1
    """Groups of experts, of which a token's experts come from `groups_per_token` (group-limited
    routing); 1 means that a token may go to any experts."""
    groups_per_token: float = 1
    shared_ffn: float = 0
    """Width of the shared expert, which all tokens pass."""
    dense_share: float = 0
    """Share of the blocks that have no experts; their ffn counts in `more_weights`, and takes the
    time of a token's experts."""
    mtp_layers: float = 0
    """Layers among `layers` that each predict one more token. Each has a GEMM that joins two
    residual streams, a pass through the shared head, and its own loss."""
    whole_experts: bool = False
    """True if tensor ranks hold different experts, unsharded (expert tensor parallelism of 1)."""
    dispatcher: Dispatcher = "any"
    """MoE token dispatcher; "any" if unknown."""
    ep_overlap: EpOverlap = "any"
    """Overlap of token dispatch with another micro-batch; "any" if unknown."""
    dispatch_bytes: float = 2
    """Bytes per element that is sent to experts; results return in 2."""
    narrow_experts: bool = False
    """True if grouped GEMMs of narrow dtypes gain as much as others, because their kernels scale
    blocks of operands themselves (DeepGEMM)."""
    drops_tokens: bool = False
    """True if experts take tokens up to a capacity, so that all sizes are known in advance."""
    proxied: bool = False
    """True if CPU threads drive the network ports because devices cannot (EFA)."""
    tp: float = 1
    pp: float = 1
    cp: float = 1
    vp: float = 1
    ep: float = 1
    micro_batch: float = 1
    zero_stage: float = 0
    sequence_parallel: bool = False
    full_recompute: float = 0
    """Share of the blocks that are fully recomputed from their input."""
    ffn_recompute: float = 0
    """Share of the blocks of which only the ffn and its norm are recomputed."""
    activation_recompute: float = 0
    """Share of the blocks of which only the ffn's activation is recomputed."""
    norm_recompute: float = 0
    """Share of the blocks of which the outputs of norms are recomputed."""
    latent_recompute: float = 0
    """Share of the blocks of which latent attention's queries, keys and values are recomputed from
    its narrow vectors."""
    gate_recompute: bool = False
    """True if the ffn's activation is recomputed in blocks that save its inputs."""
    saved_bytes: float = 0
    """Bytes per number of the saved inputs of narrow GEMMs; 0 if they are saved in the compute
    dtype."""
    selective_recompute: bool = False
    flash: bool = True
    """True for attention that does not store its scores."""
    compiled: bool = False
    param_tensors: float = 0
    """Trained tensors that the optimizer, without ZeRO, updates one after the other, after an
    exchange of 16-bit gradients without overlap: DeepSpeed's in fp16."""
    cuda_graphs: CudaGraphs = "none"
    """Part of a step captured in CUDA graphs: each block, or the whole iteration."""
    generation: Generation = "other"
    domain: float = 8
    """Devices per NVLink domain."""
    leaf: float = inf
    """Devices per leaf, which the network of `inter_bytes_per_s` connects."""
    leaf_bytes_per_s: float = inf
    """Bytes/s of one device's share of the traffic that leaves a leaf, in one direction."""
    pod: float = inf
    """Devices per pod, which connects leaves; the last level connects pods."""
    pod_bytes_per_s: float = inf
    intra_latency_s: float = 0.0
    """One-way latency in seconds beyond that in the coefficients; likewise for each level."""
    inter_latency_s: float = 0.0
    leaf_latency_s: float = 0.0
    pod_latency_s: float = 0.0
    scattered: bool = False
    """True if neighbouring domains may be anywhere in the network."""
    peak_narrow: float = 0.0
    """Dense FLOP/s of the GEMMs' dtype if narrower than 16 bit, else 0."""
    four_bit: bool = False
    block_scaled: bool = False
    """True for narrow formats with one scale per 16 or 32 numbers (MX, NV formats)."""
    power: float = 1.0
    """Power limit divided by the data sheet's power."""
    cpu_oversubscription: float = 1.0
    """Processes per CPU core; CPU work takes this factor longer."""
    implementation: Implementation = "fused"
    schedule: Schedule = "1f1b"
    """Pipeline schedule; it decides how many micro-batches are in flight."""
    dual_pipe: bool = False
    """True if micro-batches enter the pipeline at both ends (DualPipe, arXiv:2412.19437, table 2):
    each rank has two stages, and activations of p + 1 micro-batches."""
    dp_shard: float = 0
    """Ranks that shard one copy under ZeRO-2 and 3 (hybrid sharding); 0 for all."""
    gradients_once: bool = False
    """True if ZeRO-2 and 3 reduce gradients after the last micro-batch and hold them unsharded
    until then."""
    tied: bool = False
    """True if the head uses the embedding's weights."""
    more_weights: float = 0
    """Parameters of a block other than GEMMs, norms and biases, such as an MMDiT's modulation."""
    positions: float = 0
    """Rows of the table of learned positions."""
    table_width: float = 0
    """Width of the embedding if it differs from the model's; else 0."""
    software_date: float = 2026.6
    """Release date of the software as a decimal year; default the newest with measurements."""
    software: str = "any"
    """Name of the software (`fit/origin.py`); "any" if unknown."""
    family: str = "any"
    """Device family in the catalog."""
    drops_stream: bool = False
    """True if the run declares dropout in the residual stream; other frameworks' masks always
    count."""
    drops_scores: bool = False
    """True if the run declares dropout of attention's probabilities."""
    cp_exchange: CpExchange = "any"
    """Exchange of keys between context-parallel ranks; "any" if unknown."""
    compute_bytes: float = 2
    """Bytes per element of the compute dtype."""
    half: bool = False
    """True if the 2-byte compute dtype is fp16, not bf16."""
    moment_bytes: float = 4
    """Bytes per parameter of each of Adam's two moments."""
    more_logit_bytes: float = 0.0
    """Bytes per logit beyond the framework's usual loss."""
    blocking_launches: bool = False
    """True if the CPU waits for each kernel (CUDA_LAUNCH_BLOCKING)."""
    summed_gradient_bytes: float = 0
    """Bytes per parameter of a gradient that accumulates micro-batches, in addition to the
    framework's own gradient."""
    document: float = 0
    """Tokens per document if a sample packs several that do not attend to each other; 0 if it is
    one."""
    assumed_intra: bool = False
    """True if intra-node links (network, device variant) are assumed, which widens the interval."""
    assumed_inter: bool = False
    assumed_device: bool = False
    mesh: bool = False
    """True if each device of a domain has direct links to the others, without a switch."""
    adapter_widths: float = 0
    """Sum of inputs and outputs of all matrices of a block with an adapter."""
    adapter_rank: float = 0
    relu: bool = False
    """True if the ffn's activation is a ReLU, whose gradient needs only its output."""
    adapter_inputs: float = 0
    """Numbers per token of adapter inputs saved in a block on every tensor rank."""
    adapter_parts: float = 0
    """Numbers per token of saved adapter inputs that are sharded over tensor ranks."""
    adapter_inner: float = 0
    """Numbers per token between the two GEMMs of all adapters of a block."""
    adapter_drops: bool = False
    """True if a dropout mask is saved for each adapter input."""
    trains_head: bool = False
    """True if the head is trained in addition to adapters."""
    latents: float = 0
    """Numbers per token that a block saves in addition to those of a plain one: latent attention's
    narrow vectors, or what an MMDiT modulates, joins and normalizes by head."""
    score_width: float = 0
    """Width of a head in attention's GEMMs if it is not `head_dim` (latent attention)."""
    trained_share: float = 0.02
    """Parameters of adapters divided by those of all blocks; used only with `frozen`."""


Bools = NDArray[np.bool_]
CATEGORIES = (
    "generation",
    "implementation",
    "schedule",
    "software",
    "family",
    "cp_exchange",
    "cuda_graphs",
    "dispatcher",
    "ep_overlap",
)


@dataclass(frozen=True)
class Cases:
    """Many cases as arrays of shape (size,), keyed by the fields of Case."""

    size: int
    numbers: dict[str, Floats]
    categories: dict[str, NDArray[np.str_]]
    masks: dict[tuple[str, str], Bools] = field(
        default_factory=dict[tuple[str, str], Bools], repr=False, compare=False
    )
    """Cache of `is_category`."""

    def __post_init__(self) -> None:
        # Formulas read a field about a hundred times per case; instance attributes avoid a call.
        vars(self).update(self.numbers)

    def __getattr__(self, name: str) -> Floats:
        raise AttributeError(name)

    def with_numbers(self, **numbers: float) -> Cases:
        """Return the cases with some numbers set to one value for all."""
        columns = {name: np.full(self.size, float(value)) for name, value in numbers.items()}
        return Cases(self.size, self.numbers | columns, self.categories)

    def is_category(self, category: str, value: str) -> Bools:
        """Return a mask of the cases whose `category` is `value`."""
        if (category, value) not in self.masks:
            self.masks[category, value] = self.categories[category] == value
        return self.masks[category, value]

    def pick(self, rows: Bools | NDArray[np.int64]) -> Cases:
        """Return some of the cases, selected by a mask or by row numbers."""
        numbers = {name: column[rows] for name, column in self.numbers.items()}
        categories = {name: column[rows] for name, column in self.categories.items()}
        return Cases(len(numbers["layers"]), numbers, categories)


def cases_of(cases: Sequence[Case]) -> Cases:
    """Return the cases as arrays: numbers and flags as float64, categories as text."""
    numbers = {
        f.name: np.array([getattr(case, f.name) for case in cases], dtype=float)
        for f in fields(Case)
        if f.name not in CATEGORIES
    }
    categories = {
        name: np.array([getattr(case, name) for case in cases], dtype=str) for name in CATEGORIES
    }
    return Cases(len(cases), numbers, categories)


def cases_with(
    case: Case, numbers: dict[str, Floats], categories: dict[str, NDArray[np.str_]] | None = None
) -> Cases:
    """Return one case with some fields varied by arrays of equal length."""
    size = len(next(iter(numbers.values())))
    columns = {
        f.name: np.full(size, float(getattr(case, f.name)))
        for f in fields(Case)
        if f.name not in CATEGORIES
    }
    same = {name: np.full(size, getattr(case, name)) for name in CATEGORIES}
    return Cases(size, columns | numbers, same | (categories or {}))
