"""Measure the exchange of tokens between experts and their GEMMs, as one rank of the measurement.

Run as python -m paceline.trainer.programs.experts settings.json, once per device.

Writes JSON lines to experts/rank-NNNNN.jsonl: `facts`, `experts` (dispatcher, times_s of each
repeat by part, rows, wrong elements), `absent` (a dispatcher that cannot be measured, and why),
`fault` for a part that failed, and `end`.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.trainer.config import read_json
from paceline.trainer.measure.event_log import EventLog, redirect_output
from paceline.trainer.programs.host_program import HostProgram

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = 1
MIN_REPEATS, MAX_REPEATS = 5, 200
DISPATCHERS = {"all-to-all": None, "deepep": "deep_ep", "hybridep": "deep_ep"}
"""Module of every dispatcher; PyTorch's all-to-all needs none."""
PARTS = ("dispatch", "experts", "combine")


def main(path: str) -> int:
    """Measure every dispatcher; a failed one is reported, and the next one starts."""
    rank = int(os.environ.get("RANK", "0"))
    settings = read_json(path)
    redirect_output("logs", rank)
    ExpertsMeasurement(settings, rank, EventLog("experts", rank)).run()
    return 0


class ExpertsMeasurement(HostProgram):
    """Measurement of one rank.

    Settings are {device, seconds, tokens, hidden, ffn, experts, top_k, dtype}. Tokens are those of
    one rank.
    """

    def run(self) -> None:
        """Join, and measure every dispatcher."""
        self.write("facts", schema=SCHEMA, host=os.environ.get("PACELINE_HOST") or platform.node())
        self.part("join", self.join)
        if self.joined:
            self.facts()
            self.part("all-to-all", self.all_to_all)
            for name, module in DISPATCHERS.items():
                if module is not None:
                    self.write("absent", dispatcher=name, reason=self.absence(module))
        self.write("end")

    def facts(self) -> None:
        """Write the device and the library that exchanges tokens."""
        import torch
        from torch import distributed as dist

        from paceline.trainer.measure.machine import device_name

        name = device_name(self.device)
        self.write("torch", device_name=name, torch=torch.__version__, backend=dist.get_backend())

    def absence(self, module: str) -> str:
        """Return why a dispatcher of another library is not measured."""
        if importlib.util.find_spec(module) is None:
            return f"the Python module {module} is not installed"
        return f"{module} is installed, but Paceline measures only PyTorch's all-to-all so far"

    def all_to_all(self) -> None:
        """Measure PyTorch's all-to-all, as the trainer calls it."""
        import torch
        from torch import distributed as dist

        torch.manual_seed(self.rank)
        problem = ExpertLayer(self)
        wrong = problem.wrong()
        first_s = max(sum(problem.once(self.settle)) for _ in range(2))
        repeats = torch.tensor([self.settings["seconds"] / max(first_s, 1e-6)], device=self.device)
        dist.all_reduce(repeats, op=dist.ReduceOp.MIN)  # all ranks need the same number of repeats
        times_s: list[tuple[float, ...]] = []
        for _ in range(min(MAX_REPEATS, max(MIN_REPEATS, int(repeats.item())))):
            self.barrier()
            times_s.append(problem.once(self.settle))
        self.write(
            "experts",
            dispatcher="all-to-all",
            times_s=dict(zip(PARTS, zip(*times_s, strict=True), strict=True)),
            rows=problem.num_rows,
            wrong=wrong,
        )

    def settle(self) -> None:
        """Wait until the device has completed its work."""
        if self.kind == "cuda":
            import torch

            torch.cuda.synchronize(self.device)


class ExpertLayer:
    """Tokens, experts and a balanced choice of one rank.

    The choice is round robin over the experts, offset by the rank, so that all experts get equally
    many rows.
    """

    def __init__(self, rank: ExpertsMeasurement) -> None:
        import torch

        from paceline.trainer.parallel.mesh import MeshAxis

        settings, size = rank.settings, rank.size
        hidden, ffn, self.num_experts = (settings[n] for n in ("hidden", "ffn", "experts"))
        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
        make: dict[str, Any] = {"device": rank.device, "dtype": dtypes[settings["dtype"]]}
        self.axis = MeshAxis(size, rank.rank, torch.distributed.group.WORLD, tuple(range(size)))
        self.tokens = torch.randn(settings["tokens"], hidden, **make)
        self.num_rows = settings["tokens"] * settings["top_k"]
        first = rank.rank * self.num_experts // size
        self.choice = (torch.arange(self.num_rows, device=rank.device) + first) % self.num_experts
        num_local = self.num_experts // size
        self.weights = [
            torch.randn(num_local, outputs, inputs, **make) * inputs**-0.5
            for inputs, outputs in ((hidden, ffn), (hidden, ffn), (ffn, hidden))
        ]

    def once(self, settle: Callable[[], None]) -> tuple[float, ...]:
        """Return the seconds of dispatch, experts and combine."""
        times_s: list[float] = []
        result: Any = None
        for work in (self.dispatch, self.compute, self.combine):
            settle()
            start = time.perf_counter()
            result = work(result)
            settle()
            times_s.append(time.perf_counter() - start)
        return tuple(times_s)

    def dispatch(self, _: object = None) -> Any:
        """Return the exchange and the rows of this rank's experts, sorted by expert."""
        from paceline.trainer.parallel.token_exchange import plan_exchange

        self.order = self.choice.argsort(stable=True)
        counts = self.choice.bincount(minlength=self.num_experts)
        exchange = plan_exchange(counts, self.axis)
        top_k = self.num_rows // len(self.tokens)
        return exchange, exchange.dispatch(self.tokens[self.order // top_k])

    def compute(self, rows_of_experts: Any) -> Any:
        """Return the exchange and the outputs of the gated MLP of every expert."""
        from torch.nn.functional import silu

        from paceline.trainer.model.grouped_gemm import grouped_linear

        exchange, rows = rows_of_experts
        gate, up, down = self.weights
        hidden = silu(grouped_linear(rows, gate, exchange.counts))
        hidden = hidden * grouped_linear(rows, up, exchange.counts)
        return exchange, grouped_linear(hidden, down, exchange.counts)

    def combine(self, computed: Any) -> Tensor:
        """Return the sum of every token's experts (T, H)."""
        exchange, rows = computed
        top_k = self.num_rows // len(self.tokens)
        out = self.tokens.new_zeros(self.tokens.shape)
        return out.index_add_(0, self.order // top_k, exchange.combine(rows))

    def wrong(self) -> int:
        """Return the number of elements that experts without effect do not return unchanged."""
        exchange, rows = self.dispatch()
        top_k = self.num_rows // len(self.tokens)
        results = self.combine((exchange, rows))
        expected = self.tokens.new_zeros(self.tokens.shape)
        expected.index_add_(0, self.order // top_k, self.tokens[self.order // top_k])
        return int((results != expected).sum().item())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: experts settings.json")
    code = main(sys.argv[1])
    sys.stdout.flush()
    os._exit(code)  # a normal exit may wait for peers that never answer
