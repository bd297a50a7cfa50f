"""Kinds of kernels and CPU operations by name, and the self time of nested calls."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal

import numpy as np

Kind = Literal["gemm", "attention", "optimizer", "memory_bound", "other"]
KINDS: tuple[Kind, ...] = ("gemm", "attention", "optimizer", "memory_bound", "other")
"""Kinds in order of precedence for moments in which two kinds run."""

_COMMUNICATION = re.compile(r"nccl|rccl|mscclpp|nvshmem|deep_?ep|custom_all_?reduce", re.I)
_OF_KIND: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("attention", re.compile(r"flash|fmha|attention|sdpa|\bmha_|_attn_|attn_(?:fwd|bwd)", re.I)),
    (
        "optimizer",
        re.compile(r"adam|lamb_|_sgd|fused_?optimizer|muon|multi_tensor_apply", re.I),
    ),
    (
        "gemm",
        # cuBLAS 12.8 and later (nvjet), Tensile on AMD (Cijk), Inductor's templates (triton_mm).
        re.compile(
            r"gemm|gemv|nvjet|cutlass(?!.*elementwise)|wgmma|xmma|Cijk_|split_?k_?reduce"
            r"|triton_(?:tem_fused_)?\w*(?:mm|matmul|dot)(?![a-z])|triton_mm|dot_kernel|matmul|cublas"
            r"|conv(?!ert)",
            re.I,
        ),
    ),
    (
        "memory_bound",
        re.compile(
            r"elementwise|reduce|norm|softmax|copy|memcpy|memset|fill|cat_?array|index|gather"
            r"|scatter|embedding|dropout|triton_(?:poi|red|per)|transpose|rotary|rope|swiglu|silu"
            r"|gelu|relu|cross_?entropy|nll_loss|cast|quantize|amax|permute|arange|cpp_fused",
            re.I,
        ),
    ),
)


_NAMESPACES = re.compile(r"(?:\w+|\(anonymous namespace\))::")
_BRACKETS = re.compile(r"[<>]|\((?!anonymous namespace)")


@lru_cache(maxsize=65536)
def is_communication(name: str) -> bool:
    """Return whether a kernel moves data between devices."""
    return _COMMUNICATION.search(_without_parameters(name)) is not None


@lru_cache(maxsize=65536)
def kind_of(name: str) -> Kind:
    """Return the kind of a kernel that computes.

    The function's own name decides, else its template arguments: `cutlass::device_kernel<...Gemm>`.
    Namespaces and parameters do not count: every kernel of `fbgemm_gpu::` has "gemm" in its name.
    """
    function, _, arguments = _without_parameters(name).partition("<")
    for text in (_NAMESPACES.sub("", function), _NAMESPACES.sub("", arguments)):
        for kind, pattern in _OF_KIND:
            if pattern.search(text):
                return kind
    return "memory_bound" if "cub::" in function else "other"


def _without_parameters(name: str) -> str:
    """Return a demangled name up to its parameter list, the first one outside of `<...>`."""
    depth = 0
    for bracket in _BRACKETS.finditer(name):
        if bracket[0] == "(" and depth == 0:
            return name[: bracket.start()]
        depth += {"<": 1, ">": -1}.get(bracket[0], 0)
    return name


_AXES: tuple[tuple[str, re.Pattern[str]], ...] = (
    # Before the others: DATA_PARALLEL_GROUP_WITH_CP, EXPERT_DATA_PARALLEL_GROUP.
    ("dp", re.compile(r"data_parallel|shard|replicate|fsdp|(?:^|_)dp(?:_|$)", re.I)),
    ("ep", re.compile(r"expert|(?:^|_)ep(?:_|$)", re.I)),
    ("tp", re.compile(r"tensor|(?:^|_)tp(?:_|$)", re.I)),
    ("cp", re.compile(r"context|(?:^|_)cp(?:_|$)", re.I)),
    ("pp", re.compile(r"pipeline|(?:^|_)pp(?:_|$)|embedding_group", re.I)),
)


@lru_cache(maxsize=4096)
def axis_of(description: str) -> str:
    """Return the layout's axis of a process group by the framework's description, or `unknown`.

    Examples: TENSOR_MODEL_PARALLEL_GROUP (Megatron), mesh_tp (a PyTorch device mesh).
    """
    return next((axis for axis, pattern in _AXES if pattern.search(description)), "unknown")


DATA = "paceline:data"
"""Mark of the native trainer around waiting for the next batch."""
CLIP = "paceline:clip"
"""Mark of the native trainer around gradient clipping, a part of the optimizer step."""

_DATA = re.compile(rf"{DATA}|enumerate\(DataLoader\)")
_OPTIMIZER = re.compile(rf"Optimizer\.(?:step|zero_grad)|{CLIP}")
_ATTENTION = re.compile(r"attention|flash", re.I)
_GEMM = re.compile(
    r"aten::(?:mm|addmm|bmm|baddbmm|matmul|linear|einsum|_scaled_mm|dot|mv|addmv|_addmm_activation"
    r"|mkldnn_linear|_?convolution\w*|conv\d?d?)(?:_backward)?$"
    r"|(?:mkldnn|onednn)(?!_(?:reorder|to_dense))"
)
_BOOKKEEPING = re.compile(
    r"aten::(?:_?unsafe_view|view\w*|_?reshape\w*|t|numpy_T|transpose_?|permute|expand\w*|as_strided\w*"
    r"|slice|select|split\w*|chunk|narrow|unsqueeze_?|squeeze_?|detach_?|alias|empty\w*|resize_\w*"
    r"|set_|result_type|to|contiguous|flatten|unflatten|unbind|movedim|lift_fresh|item"
    r"|_local_scalar_dense|is_\w+|size|stride|requires_grad_|new_empty\w*|diagonal|T)$"
    r"|^detach_?$|^autograd::|^torch::autograd|^c10d::|^record_param_comms|^gloo:|Backward\d*$|^paceline:"
)


@lru_cache(maxsize=65536)
def operation_label(name: str) -> str | None:
    """Return the kind of an operation's self time; None for bookkeeping such as views."""
    if _BOOKKEEPING.search(name):
        return None
    if _ATTENTION.search(name):
        return "attention"
    if "::" not in name and "fused" not in name:
        return None  # an autograd function in Python; the operations that it calls are labelled
    if _GEMM.search(name):
        return "gemm"
    return "memory_bound" if name.startswith("aten::") else kind_of(name)


@lru_cache(maxsize=65536)
def annotation_label(name: str) -> str | None:
    """Return the kind of all operations inside a profiler annotation, if it determines one."""
    return "optimizer" if _OPTIMIZER.search(name) else None


def is_data_wait(name: str) -> bool:
    """Return whether a profiler annotation waits for a batch."""
    return _DATA.search(name) is not None


class Calls:
    """Nested calls of one thread, in 20 bytes each."""

    def __init__(self) -> None:
        self._names, self._begins, self._ends = array("i"), array("d"), array("d")

    def __len__(self) -> int:
        return len(self._names)

    def add(self, name: int, begin_s: float, end_s: float) -> None:
        """Add one call by the index of its name."""
        self._names.append(name)
        self._begins.append(begin_s)
        self._ends.append(end_s)

    def self_times(
        self,
        names: Sequence[str],
        inherited_labels: Sequence[str | None],
        own_labels: Sequence[str | None],
    ) -> Iterator[tuple[str, str, float, float]]:
        """Yield (name, label, begin, end) of every interval in which a call itself runs.

        `own_labels` has the label of each name's self time. `inherited_labels` has the label that a
        name gives to all calls inside it, which takes precedence. Attention passes its own on.
        """
        begins, ends = np.array(self._begins), np.array(self._ends)
        stack: list[tuple[int, float, str | None, str | None]] = []
        """Name, end, label, and the label for the calls inside."""
        cursor_s = 0.0
        for row in np.lexsort((-ends, begins)):
            name, begin, end = self._names[row], float(begins[row]), float(ends[row])
            while stack and stack[-1][1] <= begin:
                call, until, label, _ = stack.pop()
                if label is not None and until > cursor_s:
                    yield names[call], label, cursor_s, until
                cursor_s = max(cursor_s, until)
            if stack:
                outer, until, label, outer_label = stack[-1]
                if label is not None and begin > cursor_s:
                    yield names[outer], label, cursor_s, begin
                end = min(end, until)
            else:
                outer_label = None
            label = outer_label or inherited_labels[name] or own_labels[name]
            outer_label = (
                outer_label
                or inherited_labels[name]
                or ("attention" if label == "attention" else None)
            )
            stack.append((name, end, label, outer_label))
            cursor_s = max(cursor_s, begin)
        while stack:
            call, until, label, _ = stack.pop()
            if label is not None and until > cursor_s:
                yield names[call], label, cursor_s, until
            cursor_s = max(cursor_s, until)
