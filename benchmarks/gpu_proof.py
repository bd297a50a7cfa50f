"""Proof on one GPU within a time budget: GEMMs, trainings, peers, tests.

    python benchmarks/gpu_proof.py [--budget 520] [--only WORD ...] [--no-tests]
    python benchmarks/gpu_proof.py --device cpu    # the same way with tiny shapes, about a minute

Parts run one after another, each in a process of its own: one that fails costs itself alone, one
that would not end within the budget is left out and named. The result is written after every part.
Trainings go through the native trainer as `paceline run` starts it, without its probes, and one
through `paceline run` itself; peers train the same shape, batch and dtype in a loop of their own
(benchmarks/_gpu_peer.py). A figure is the median step after the first ones, which pay for
compilation; shares of the GEMM rate refer to the best GEMM of the same call.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from _gpu_cases import CASES, WARMUP, Case, spec_of
from _low_precision import BASE, LARGE, ON_A_GPU, RECIPES, SHAPES, STEPS, Deviations, Variant
from _result import FOLDER, Surroundings, keep, spread_of

from paceline.core.flops import flops_input, hardware_flops_per_token, model_flops_per_token
from paceline.core.memory import memory_per_device
from paceline.core.run import RunSpec
from paceline.core.units import GIB
from paceline.engines import native
from paceline.files.trainer_program import write_program
from paceline.machines.placement import find_device
from paceline.machines.probe.gpus import gpus

HERE = Path(__file__).parent
CONVENTIONS = ("causal", "full-attention")
MIN_S = 25.0
"""Minimum budget in seconds for starting another part."""
LOG_END = 1500
"""Characters of a failed part's log."""


@dataclass(frozen=True)
class Call:
    """Options and results of the whole call."""

    device: str
    device_name: str
    deadline: float

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self.deadline - time.monotonic()


def native_training(spec: RunSpec, call: Call) -> dict[str, Any]:
    """Step times and memory of the native trainer; raises RuntimeError with its log's end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "trainer.json").write_text(json.dumps(native.settings(spec)))
        for part in ("steps", "logs"):
            (folder / part).mkdir()
        command = [sys.executable, str(write_program("main", folder)), "trainer.json"]
        result = run_command(command, folder, call, {**os.environ, **native.job(spec, "proof").env})
        if result.returncode:
            log = folder / "logs" / "rank-00000.log"
            text = log.read_text(errors="replace") if log.exists() else ""
            raise RuntimeError((result.stderr + text)[-LOG_END:])
        lines = (folder / "steps" / "rank-00000.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        steps = [event for event in events if event["event"] == "step"]
        start = next(event for event in events if event["event"] == "start")
        return {
            "times_s": [step["step_time_s"] for step in steps],
            "loss": [step["loss"] for step in steps],
            "num_parameters": start["num_parameters"],
            "allocated_bytes": steps[-1]["memory_bytes"]["allocated"],
            "reserved_bytes": steps[-1]["memory_bytes"]["reserved"],
            "watched": next((event for event in events if event["event"] == "memory"), None),
        }


def peer_training(case: Case, spec: RunSpec, call: Call) -> dict[str, Any]:
    """Step times and memory of the compiled peer; raises RuntimeError with its log's end."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "peer.json"
        path.write_text(json.dumps(native.settings(spec)))
        command = [sys.executable, str(HERE / "_gpu_peer.py"), case.peer, str(path)]
        compiled = {"PACELINE_PEER_COMPILE": "1"} if call.device == "cuda" else {}
        result = run_command(command, Path(name), call, {**os.environ, **compiled})
        if result.returncode:
            raise RuntimeError((result.stdout + result.stderr)[-LOG_END:])
        answer = json.loads(result.stdout.splitlines()[-1])
        return {**answer, "times_s": answer.pop("step_time_s")}


def run_command(
    command: list[str], folder: Path, call: Call, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """A finished process; raises RuntimeError when the budget ends before it."""
    try:
        return subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=max(call.left_s, 1.0),
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError("the budget ended before it did") from error


def row(case: Case, spec: RunSpec, side: str, got: dict[str, Any], best: float) -> dict[str, Any]:
    """A training's figures; `best` is the fastest product of this call in FLOP/s, 0 unknown."""
    warmup = WARMUP["cpu" if spec.cluster.device == "cpu" else "cuda"]
    step_times = got["times_s"][warmup:]
    step_s = median(step_times)
    tokens = spec.training.global_batch * spec.training.seq_len
    x = flops_input(spec.model, spec.training.seq_len, spec.layout, spec.lora)
    entry = find_device(spec.cluster.device)
    peak = entry.peak_flops_per_s("bf16") if entry else None
    figures: dict[str, Any] = {
        "case": case.name,
        "side": side,
        "dtype": spec.training.dtype,
        "compile": spec.training.compile if side == "native" else "whole model",
        "seq_len": spec.training.seq_len,
        "micro_batch": spec.layout.micro_batch,
        "global_batch": spec.training.global_batch,
        "num_parameters": got["num_parameters"],
        "step_time_s": spread_of(step_times),
        "first_steps_s": sum(got["times_s"][:warmup]),
        "tokens_per_s": tokens / step_s,
        "allocated_bytes": got["allocated_bytes"],
        "reserved_bytes": got["reserved_bytes"],
    }
    for convention in CONVENTIONS:
        rates = {
            "mfu": model_flops_per_token(convention, x) * tokens / step_s,
            "hfu": hardware_flops_per_token(convention, x) * tokens / step_s,
        }
        figures[convention] = {
            "model_flops_per_s": rates["mfu"],
            **{name: rate / peak if peak else None for name, rate in rates.items()},
            "of_product_rate": rates["mfu"] / best if best else None,
        }
    if side == "native":
        figures["losses"] = [got["loss"][0], got["loss"][-1]]
        figures["memory_bound_bytes"] = bound(spec)
        figures["watched_memory"] = got["watched"]
    return figures


def bound(spec: RunSpec) -> float:
    """Return the static lower bound of the device memory in bytes."""
    return memory_per_device(spec.parallel).total_bytes


def products(call: Call, dtypes: list[str]) -> list[dict[str, Any]]:
    """Run the GEMMs of `paceline probe`, all shapes."""
    question = {
        "device": call.device,
        "dtypes": dtypes,
        "matmul_precision": "highest",
        "threads": os.cpu_count(),
        "seconds": 4 if call.device == "cuda" else 1,
    }
    command = [sys.executable, "-m", "paceline.trainer.programs.gemm", json.dumps(question)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path[1:]])}
    result = run_command(command, HERE.parent, call, environment)
    if result.returncode:
        raise RuntimeError(result.stderr[-LOG_END:])
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def gpu_tests(call: Call) -> dict[str, Any]:
    """`make test-gpu` in short: what is short, and one dtype of each recipe."""
    options = "(recipe_s_first_step and (bf16 or fp8)) or kernels or memory or compiled"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rs", "-p", "no:cacheprovider"]
    result = run_command(
        [*command, "-k", options, "--continue-on-collection-errors", "tests/trainer"],
        HERE.parent,
        call,
        dict(os.environ),
    )
    lines = result.stdout.splitlines()
    return {
        "returncode": result.returncode,
        "summary": lines[-1] if lines else "",
        "lines": lines[-20:],
    }


def package_run(call: Call) -> dict[str, Any]:
    """Return the answer of `paceline run`, including probes and report; raise RuntimeError."""
    changes = ["--set", "steps=30", "--set", "data.source=synthetic"]
    command = [sys.executable, "-m", "paceline", "run", "tiny-llama", "--device", call.device]
    with tempfile.TemporaryDirectory() as name:
        result = run_command(
            [*command, *changes, "--runs-dir", name, "--json"], HERE.parent, call, dict(os.environ)
        )
    if result.returncode:
        raise RuntimeError(result.stderr[-LOG_END:])
    return json.loads(result.stdout)


def machine_state() -> str | None:
    """Clocks, power and temperature as nvidia-smi gives them, None without it."""
    fields = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit"
    try:
        return subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields},temperature.gpu", "--format=csv"],
            capture_output=True,
            text=True,
            timeout=20,
        ).stdout
    except OSError:
        return None


class Proof:
    """Runs the parts, keeps what they gave, and writes it after each of them."""

    def __init__(self, name: str, call: Call, words: list[str]) -> None:
        self.name, self.call, self.words = name, call, words
        self.around = Surroundings()
        self.rows: list[dict[str, Any]] = []
        self.parts: list[dict[str, Any]] = []
        self.content: dict[str, Any] = {}
        self.best: dict[str, float] = {}
        on_gpu = call.device == "cuda"
        self.narrow = Deviations(
            ON_A_GPU[LARGE] if on_gpu else SHAPES["tiny-llama"],
            call.device_name,
            STEPS if on_gpu else WARMUP["cpu"] + 1,
            lambda spec: native_training(spec, call),
        )

    def part(self, name: str, work: Callable[[], None]) -> None:
        """Run a part unless it is not asked for or no time is left; a failure is only its own."""
        if self.words and not any(word.lower() in name.lower() for word in self.words):
            return
        entry: dict[str, Any] = {"part": name, "status": "ok"}
        begin = time.monotonic()
        if self.call.left_s < MIN_S:
            entry["status"] = "left out: the budget was used up"
        else:
            try:
                work()
            except Exception as error:  # whatever fails must not cost the other parts
                entry.update(status="failed", reason=f"{type(error).__name__}: {error}"[-LOG_END:])
        entry["seconds"] = round(time.monotonic() - begin, 1)
        self.parts.append(entry)
        print(
            f"{name}: {entry['status']}, {entry['seconds']} s {entry.get('reason', '')}", flush=True
        )
        self.write()

    def write(self) -> None:
        """The result so far; tiny shapes on a CPU prove the script alone and are not kept."""
        unit = "tokens/s; FLOP/s; shares 0-1"
        if self.call.device == "cuda":
            device = {"device": self.call.device_name, "state": machine_state()}
            keep(
                self.name,
                unit,
                self.around,
                **device,
                **self.content,
                parts=self.parts,
                rows=self.rows,
            )

    def measure_products(self) -> None:
        """Rates by dtype and shape."""
        dtypes = ["bf16", "fp8"] if self.call.device == "cuda" else ["fp32"]
        lines = products(self.call, dtypes)
        self.content["products"] = lines
        for line in lines:
            if line.get("event") == "gemm":
                dtype = line["dtype"]
                self.best[dtype] = max(self.best.get(dtype, 0.0), line["flops_per_s"])
        rates = ", ".join(f"{dtype} {rate / 1e12:.1f}" for dtype, rate in self.best.items())
        print(f"best GEMM, TFLOP/s: {rates}")

    def train(self, case: Case, dtype: str, compile_: str) -> None:
        """One native training."""
        spec = spec_of(case, self.call.device_name, dtype, compile_)
        self.add(row(case, spec, "native", native_training(spec, self.call), self.product_rate))

    def train_narrow(self, side: Variant) -> None:
        """Fifty steps in a low precision against bf16's, on a CPU a few of a tiny shape."""
        print(self.narrow.measure(side), flush=True)
        self.content["low_precision"] = self.narrow.rows

    def train_peer(self, case: Case) -> None:
        """The same training by the peer."""
        dtype = "bf16" if self.call.device == "cuda" else "fp32"
        spec = spec_of(case, self.call.device_name, dtype, "none")
        got = peer_training(case, spec, self.call)
        self.add(row(case, spec, case.peer, got, self.product_rate))

    @property
    def product_rate(self) -> float:
        """FLOP/s of the best bf16 GEMM; 0 if none was measured."""
        return self.best.get("bf16", 0.0)

    def add(self, figures: dict[str, Any]) -> None:
        """Keep a training's figures and print its line."""
        self.rows.append(figures)
        print(table_row(figures), flush=True)

    def run_package(self) -> None:
        """A run from plan to report."""
        self.content["paceline_run"] = package_run(self.call)

    def test(self) -> None:
        """The tests on the GPU; raises RuntimeError when one fails."""
        self.content["tests"] = answer = gpu_tests(self.call)
        print(answer["summary"])
        if answer["returncode"]:
            raise RuntimeError("\n".join(answer["lines"]))


def table_row(figures: dict[str, Any]) -> str:
    """A training in one line."""
    shares = [figures[convention] for convention in CONVENTIONS]
    cells = [
        f"{figures['case']} ({figures['side']})",
        f"{figures['dtype']}, compile {figures['compile']}",
        f"{figures['tokens_per_s']:,.0f} (n {figures['step_time_s']['n']}, "
        f"spread {figures['step_time_s']['spread']:.1%})",
        *(
            " / ".join("-" if s[name] is None else f"{s[name]:.1%}" for s in shares)
            for name in ("mfu", "of_product_rate")
        ),
        "-" if figures["allocated_bytes"] is None else f"{figures['allocated_bytes'] / GIB:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--budget", type=float, default=520.0, help="Seconds for all parts.")
    parser.add_argument(
        "--only", nargs="+", default=[], help="Run only parts with one of these words."
    )
    parser.add_argument("--result", default="gpu_proof", help="Name of the result file.")
    parser.add_argument("--no-tests", action="store_true", help="Skip `make test-gpu`.")
    return parser.parse_args()


def main() -> int:
    """Run all parts; 1 when one failed."""
    options, devices = parse(), gpus()
    if options.device == "cuda" and not devices:
        print(json.dumps({"benchmark": "gpu_proof", "skipped": "no NVIDIA GPU is visible here"}))
        return 0
    name = devices[0]["name"] if options.device == "cuda" else "cpu"
    call = Call(options.device, name, time.monotonic() + options.budget)
    proof = Proof(options.result, call, options.only)
    print(
        "| training | by | tokens/s | MFU, causal / full | of the product rate | allocated, GiB |"
    )
    print("|---|---|---:|---:|---:|---:|")
    proof.part("products", proof.measure_products)
    for case in CASES:
        for dtype, compile_ in case.variants if options.device == "cuda" else [("fp32", "none")]:
            label = f"{case.name}: {dtype}, compile {compile_}"
            proof.part(label, lambda c=case, d=dtype, k=compile_: proof.train(c, d, k))
        proof.part(f"{case.name}: {case.peer}", lambda c=case: proof.train_peer(c))
    for side in (BASE, *RECIPES):
        proof.part(f"low precision: {side.name}", lambda s=side: proof.train_narrow(s))
    proof.part("paceline run", proof.run_package)
    if not options.no_tests and options.device == "cuda":
        proof.part("tests", proof.test)
    if options.device == "cuda":
        print(f"result: {FOLDER / options.result}.json")
    return int(any(part["status"] != "ok" for part in proof.parts))


if __name__ == "__main__":
    sys.exit(main())
