"""Mixture of experts: a router, stacked experts with one grouped GEMM per matrix, a shared expert.

Shapes: S tokens of hidden size H, k experts per token out of E, M = S k rows after the router,
expert width F. Rows are sorted by expert, so each expert's rows are adjacent and `counts` (E,) says
how many there are:

router -> sort -> [dispatch] -> grouped GEMMs -> [combine] -> unsort and weighted sum

Dispatch and combine exchange rows between ranks. Without expert parallelism every rank has all
experts, and they do nothing. No row is ever dropped.

With tensor parallelism each rank holds a part of every expert's width, as in a dense MLP. The
router then runs on every rank, and its gradient is a sum over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.trainer.model.grouped_gemm import (
    GROUP_ROWS,
    GroupedGemm,
    add_group_bias,
    group_members,
    grouped_linear,
    pad_groups,
    pads_groups,
)
from paceline.trainer.model.layers import mlp_activation
from paceline.trainer.model.network import activation_checkpoint
from paceline.trainer.model.routing_replay import in_replay, record_choice, replayed_choice
from paceline.trainer.model_config import ModelConfig
from paceline.trainer.parallel.tensor import ParamPlan, TensorParallel, TpPlan, local

Combine = Callable[[Tensor], Tensor]
Dispatch = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Combine]]
"""Maps rows (M, H) sorted by expert and counts (E,) to this rank's rows, sorted by its own experts,
their counts, and the function that returns the experts' outputs (rows, H) to (M, H)."""


def keep_rows(rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Combine]:
    """Return the rows as they are: every rank has all experts (the `Dispatch` of ep 1)."""
    return rows, counts, lambda outputs: outputs


@dataclass(frozen=True)
class RoutingSetting:
    """Settings of the router that do not depend on the model."""

    forced: bool = False
    """True to give tokens to experts round robin, whatever their scores are."""
    weights: tuple[int, ...] = ()
    """Loads of the experts, in any unit, to which tokens are given whatever their scores are."""
    rank: int = 0
    """Position of this rank among the ranks with other tokens."""
    aux_loss: float = 0.0
    """Factor of the balancing loss."""
    z_loss: float = 0.0
    """Factor of the z-loss."""
    bias_update_rate: float = 0.0
    """Step of the choice bias after every optimizer step."""


LEARNED = RoutingSetting()
"""Routing by scores, without further losses."""


@dataclass(frozen=True)
class Routing:
    """Experts of each token and their weights, both (S, k)."""

    experts: Tensor
    weights: Tensor


class Router(nn.Module):
    """Choose k experts per token; scores are computed in fp32 or wider.

    The experts are those with the largest scores, within the `groups_per_token` groups whose two
    largest scores have the largest sum (DeepSeek V3, arXiv:2412.19437, section 2.1.2). The choice
    bias takes part in the choice only, not in the weights. No gradient trains it; see
    `update_choice_bias`.
    """

    tp_plan: TpPlan = {
        "weight": ParamPlan(partial_grad=True),
        "bias": ParamPlan(partial_grad=True),
    }
    choice_bias: Tensor | None
    """Bias (E,) of the experts' scores in the choice, in fp32 or wider; None without one."""

    def __init__(
        self, model: ModelConfig, setting: RoutingSetting = LEARNED, tp_size: int = 1
    ) -> None:
        super().__init__()
        self.setting, self.tp_size = setting, tp_size
        self.loss_scale = 0.0
        """Factor of a target's loss in this step, which that of the router's own losses follows;
        0 in evaluations."""
        self.num_experts, self.per_token = model.num_experts, model.experts_per_token
        self.groups, self.groups_per_token = model.expert_groups, model.groups_per_token
        self.score, self.normalize = model.router_score, model.router_normalize
        self.scale = model.router_scale
        self.weight = nn.Parameter(torch.empty(model.num_experts, model.hidden_size))
        self.bias = nn.Parameter(torch.empty(model.num_experts)) if model.bias else None
        # A buffer, so that FSDP keeps it whole and in its own dtype.
        choice_bias = torch.zeros(model.num_experts) if model.router_choice_bias else None
        self.register_buffer("choice_bias", choice_bias)

    @torch.no_grad()
    def update_choice_bias(self, load: Tensor) -> None:
        """Raise the bias of experts below the mean load, lower that of others, by equal steps.

        `load` (E,) are the rows of all ranks in a step (Wang et al., arXiv:2408.15664,
        algorithm 1).
        """
        if self.choice_bias is not None and self.setting.bias_update_rate:
            wide = load.to(self.choice_bias.dtype)
            self.choice_bias += self.setting.bias_update_rate * (wide.mean() - wide).sign()

    def forward(self, x: Tensor) -> Routing:
        """Route (S, H)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        bias = None if self.bias is None else local(self.bias).to(wide)
        logits = functional.linear(x.to(wide), local(self.weight).to(wide), bias)  # (S, E)
        scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
        experts = replayed_choice()
        if experts is None:
            experts = self.choose(scores.detach())
            record_choice(experts)
        weights = scores.gather(1, experts)  # (S, k)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * self.scale
        if self.loss_scale and (self.setting.aux_loss or self.setting.z_loss):
            weights = AddLoss.apply(weights, self.own_loss(logits, scores, experts))
        return Routing(experts, weights)

    def own_loss(self, logits: Tensor, scores: Tensor, experts: Tensor) -> Tensor:
        """Return balancing loss and z-loss, scaled like the loss of this rank's tokens.

        The balancing loss is E / (S k) sum_e n_e p_e with n_e rows and mean score share p_e of
        expert e; 1 is balance. The z-loss is the mean of logsumexp(logits)^2. Tensor ranks sum the
        router's gradients, so each adds an equal part.
        """
        setting, tokens = self.setting, scores.shape[0]
        shares = scores / scores.sum(-1, keepdim=True)  # (S, E)
        rows = count_rows(experts, self.num_experts).to(shares.dtype)  # (E,)
        balance = self.num_experts / rows.sum() * (rows * shares.mean(0)).sum()
        loss = setting.aux_loss * balance
        if setting.z_loss:
            loss = loss + setting.z_loss * logits.logsumexp(-1).square().mean()
        return loss * (self.loss_scale * tokens / self.tp_size)

    def choose(self, scores: Tensor) -> Tensor:
        """Return the experts (S, k) of the largest scores (S, E), or the forced ones."""
        if self.setting.forced:
            return self.round_robin(scores)
        if self.setting.weights:
            return self.in_ratio(scores)
        if self.choice_bias is not None:
            scores = scores + self.choice_bias
        if self.groups > self.groups_per_token:
            by_group = scores.unflatten(1, (self.groups, -1))  # (S, G, E / G)
            best = by_group.topk(min(2, by_group.shape[2]), -1).values.sum(-1)  # (S, G)
            allowed = best.topk(self.groups_per_token, -1).indices
            mask = torch.zeros_like(best, dtype=torch.bool).scatter_(1, allowed, True)
            scores = by_group.masked_fill(~mask.unsqueeze(-1), float("-inf")).flatten(1)
        return scores.topk(self.per_token, -1).indices

    def round_robin(self, scores: Tensor) -> Tensor:
        """Return each expert in turn (S, k). A rank continues where the one before it ends.

        If all ranks began with the same expert, few tokens per rank would leave experts idle.
        """
        rows = scores.shape[0] * self.per_token
        turn = torch.arange(rows, device=scores.device) + self.setting.rank * rows
        return (turn % self.num_experts).view(-1, self.per_token)

    def in_ratio(self, scores: Tensor) -> Tensor:
        """Return experts (S, k) whose loads are in the ratio of the weights w.

        In a row of experts, each stands in k w_e / gcd(k, sum w) places. Of all P places, token t
        takes t, t + P / k, t + 2 P / k, ..., which are different experts if no w_e is above
        sum w / k. So P / k tokens in sequence give every expert exactly its load. A rank continues
        where the one before it ends.
        """
        weights, k, tokens = self.setting.weights, self.per_token, scores.shape[0]
        ends = [end * k // gcd(k, sum(weights)) for end in accumulate(weights)]
        stride = ends[-1] // k
        first = torch.arange(tokens, device=scores.device) + self.setting.rank * tokens  # (S,)
        offsets = stride * torch.arange(k, device=scores.device)
        places = (first % stride).unsqueeze(1) + offsets  # (S, k)
        return torch.bucketize(places, torch.tensor(ends, device=scores.device), right=True)


class AddLoss(torch.autograd.Function):
    """Weights as they are, and a loss that gets a gradient of 1 with them.

    So a router's own losses need no way to the end of the model, which may be on another rank.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor) -> Tensor:
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:  # type: ignore[override]
        return grad_output, torch.ones((), dtype=grad_output.dtype, device=grad_output.device)


class StackedExperts(nn.Module):
    """The routed experts of a block: three stacked weights, or two without a gate, and biases."""

    tp_plan: TpPlan = {
        "gate": ParamPlan(shard_dim=1, by_expert=True),
        "up": ParamPlan(shard_dim=1, by_expert=True),
        "down": ParamPlan(shard_dim=2, by_expert=True),
        "gate_bias": ParamPlan(shard_dim=1, by_expert=True),
        "up_bias": ParamPlan(shard_dim=1, by_expert=True),
        # Outputs are summed over tensor ranks, so each rank adds an equal part of this bias.
        "down_bias": ParamPlan(partial_grad=True, by_expert=True),
    }

    def __init__(
        self, model: ModelConfig, recompute_activation: bool = False, tp_size: int = 1
    ) -> None:
        super().__init__()
        experts, hidden, ffn = model.num_experts, model.hidden_size, model.ffn_size
        self.activation, self.recompute = mlp_activation(model), recompute_activation
        self.tp_size = tp_size
        self.low_precision: GroupedGemm | None = None
        """The low-precision GEMM of the experts, set by `use_low_precision`."""
        self.group_rows = GROUP_ROWS
        """Divisor of an expert's rows where they are padded."""
        has_gate, bias = model.gated_ffn, model.bias
        self.gate = nn.Parameter(torch.empty(experts, ffn, hidden)) if has_gate else None
        self.up = nn.Parameter(torch.empty(experts, ffn, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, ffn))
        self.gate_bias = nn.Parameter(torch.empty(experts, ffn)) if has_gate and bias else None
        self.up_bias = nn.Parameter(torch.empty(experts, ffn)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(experts, hidden)) if bias else None

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Map rows (M, H), sorted by expert, to (M, H); `counts` (E,) are the experts' rows."""
        if self.low_precision is None and not pads_groups(rows):
            return self.compute(rows, counts)
        rows, counts, place = pad_groups(rows, counts, self.group_rows)
        return self.compute(rows, counts).index_select(0, place)

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the outputs (M, H) of rows, which may be padded."""
        members = None if self.up_bias is None else group_members(rows, counts)  # (M, E)
        inner = [
            self._linear(rows, weight, bias, counts, members)  # (M, F)
            for weight, bias in ((self.gate, self.gate_bias), (self.up, self.up_bias))
            if weight is not None
        ]
        inputs = counts, members, *inner
        return activation_checkpoint(self._activate, *inputs, enabled=self.recompute)

    def _activate(self, counts: Tensor, members: Tensor | None, *inner: Tensor) -> Tensor:
        x = self.activation(*inner)  # (M, F)
        bias = None if self.down_bias is None else local(self.down_bias) / self.tp_size
        return self._linear(x, self.down, bias, counts, members)  # (M, H)

    def _linear(
        self,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        counts: Tensor,
        members: Tensor | None,
    ) -> Tensor:
        """Return rows_e W_e^T + b_e of every expert e, with `members` as in `group_members`."""
        out = grouped_linear(rows, local(weight).to(rows.dtype), counts, self.low_precision)
        if bias is None or members is None:
            return out
        return add_group_bias(out, local(bias).to(rows.dtype), members)


class MixtureOfExperts(nn.Module):
    """Routed experts in place of a block's MLP, and a shared expert that sees every token."""

    def __init__(
        self,
        model: ModelConfig,
        tp: TensorParallel,
        shared: nn.Module | None = None,
        routing: RoutingSetting = LEARNED,
        dispatch: Dispatch = keep_rows,
        recompute_activation: bool = False,
    ) -> None:
        super().__init__()
        self.tp, self.dispatch = tp, dispatch
        self.num_experts = model.num_experts
        self.router = Router(model, routing, tp.axis.size)
        self.experts = StackedExperts(model, recompute_activation, tp.axis.size)
        self.shared = shared
        self.load: Tensor | None = None
        """Rows (E,) of each expert since `take_load`, from this rank's tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, t, H) to (B, t, H)."""
        tokens = self.tp.gather_input(x)  # (B, T, H)
        out = self.apply_experts(tokens.flatten(0, 1)).view_as(tokens)
        out = self.tp.reduce_output(out)  # (B, t, H)
        return out if self.shared is None else out + self.shared(x)

    def apply_experts(self, tokens: Tensor) -> Tensor:
        """Return the weighted sum (S, H) of the outputs of each token's experts."""
        first_run = not in_replay()
        routing = self.router(tokens)
        rows, order, counts = sort_by_expert(tokens, routing.experts, self.num_experts)
        if first_run:
            self.count(counts)
        rows, local_counts, combine = self.dispatch(rows, counts)
        outputs = combine(self.experts(rows, local_counts))  # (M, H)
        return weighted_sum(outputs, order, routing.weights)

    def count(self, counts: Tensor) -> None:
        """Add one micro-batch's rows of each expert to the load."""
        if self.training:
            self.load = counts.clone() if self.load is None else self.load + counts

    def take_load(self) -> Tensor:
        """Return and reset the rows (E,) of each expert."""
        load, self.load = self.load, None
        assert load is not None, "a step counts rows before it takes them"
        return load


def exclude_token_exchange_from_compile(part: nn.Module) -> None:
    """Exclude experts that ranks share out from torch.compile: each block's graph breaks once.

    The CPU reads how many rows it sends and receives, which a graph cannot. Call it before
    compiling. A decorator would import the compiler, which takes seconds.
    """
    disable: Any = torch.compiler.disable
    for module in part.modules():
        if isinstance(module, MixtureOfExperts) and module.dispatch is not keep_rows:
            module.apply_experts = disable(module.apply_experts)  # type: ignore[method-assign]


def sort_by_expert(
    tokens: Tensor, experts: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return one row (M, H) per token and expert, sorted by expert, their order, and counts (E,).

    `order` (M,) holds each row's place in (S, k), flattened. Rows of one expert are in the order of
    their tokens.
    """
    flat = experts.flatten()  # (M,)
    order = flat.argsort(stable=True)
    counts = count_rows(experts, num_experts)
    return TakeRows.apply(tokens, order, experts.shape[1]), order, counts  # type: ignore[no-any-return]


def count_rows(experts: Tensor, num_experts: int) -> Tensor:
    """Return the number of rows (E,) of each expert."""
    flat = experts.flatten()
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    return counts.scatter_add(0, flat, torch.ones_like(flat))


def weighted_sum(outputs: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Return (S, H): each token's outputs (M, H), in the order of their experts, times weights."""
    rows = PutRows.apply(outputs, order)  # (M, H)
    parts = rows.view(*weights.shape, -1)  # (S, k, H)
    return torch.einsum("skh,sk->sh", parts, weights.to(parts.dtype))


class TakeRows(torch.autograd.Function):
    """Rows of tokens, each token k times, in a given order.

    The gradient gathers rows and sums each token's k rows in a fixed order. That of an index would
    add rows one by one, on GPUs in any order.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, per_token: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.per_token = per_token
        return tokens.index_select(0, order // per_token)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:  # type: ignore[override]
        (order,) = ctx.saved_tensors
        rows = grad_output.index_select(0, inverse(order))  # (M, H)
        return rows.unflatten(0, (-1, ctx.per_token)).sum(1), None, None


class PutRows(torch.autograd.Function):
    """Rows put back from a given order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows.index_select(0, inverse(order))

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:  # type: ignore[override]
        (order,) = ctx.saved_tensors
        return grad_output.index_select(0, order), None


def inverse(order: Tensor) -> Tensor:
    """Return the permutation (M,) that undoes another one."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
