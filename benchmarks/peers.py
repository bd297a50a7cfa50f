"""The native trainer against every library that trains the same model here, all in turn.

    python benchmarks/peers.py [--rounds 6] [--block 4] [--threads N] [--only WORD] [--quick]

Each side is a process of its own that stays in memory and trains a block of steps a round (A B C,
C B A), with equal shape, dtype, batch, threads, fp32 matrix-product setting, allocator and garbage
collection. Megatron-Core, torchtitan and transformers' Trainer run as engines of `paceline run`, in
the environments of `make frameworks`; a side that cannot train the shape is left out, with the
reason. One more side multiplies matrices: the share is the model's FLOPs (causal attention) over
that rate, of the same rounds. Another does the products of the native step and nothing else: how
far ahead of a peer a trainer would be that did nothing but the same GEMMs. The time that a side
needs to start and compile is listed separately. A call for some shapes or dtypes keeps the results
of the others in the file, marked as an earlier call's.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _products_in_turns import STEP_FLOPS
from _result import Surroundings, earlier, keep, spread_of, spread_text
from _turns import Cost, Training, in_turn

from paceline.core.flops import FlopsInput, model_flops_per_token
from paceline.core.hardware import Cluster
from paceline.core.run import RunSpec
from paceline.engines import engine as engine_named
from paceline.engines import native
from paceline.engines.launch.environments import installed
from paceline.files.recipe import load_recipe, resolve
from paceline.machines.probe.inventory import usable_cores

WARMUP_ROUNDS = 3
PLAIN = [
    "data.source=synthetic",
    "data.packing=packed",
    "layout.zero_stage=0",
    "layout.cp=1",
    "training.ramp_up=null",
    "training.evaluation=null",
]
SHAPES: dict[str, tuple[str, list[str]]] = {
    "Llama, 6 x 256, vocabulary 8192, 8 x 256 tokens": (
        "tiny-llama",
        [
            "model.num_layers=6",
            "model.ffn_size=688",
            "model.num_kv_heads=8",
            "model.vocab_size=8192",
            "model.tied_embeddings=false",
            "model.dropout=0",
        ],
    ),
    "GPT, 8 x 256 tokens": ("tiny-gpt", ["model.dropout=0"]),
    "OPT, 8 x 128 tokens": ("opt-350m-sft-tiny", ["model.dropout=0"]),
    "LoRA on Llama, 8 x 256 tokens": (
        "llama2-70b-lora-tiny",
        ["layout.micro_batch=8", "model.dropout=0"],
    ),
    "Mixtral, 2 of 8 experts, 8 x 256 tokens": (
        "mixtral-8x7b-tiny",
        [
            "model.hidden_size=256",
            "batch_per_device=8",
            "layout.micro_batch=8",
            "layout.recompute=none",
        ],
    ),
    "gpt-oss, 4 of 16 experts, 8 x 256 tokens": (
        "gpt-oss-20b-tiny",
        ["model.hidden_size=256", "batch_per_device=8", "layout.micro_batch=8"],
    ),
    "Flux, 8 x 96 tokens": ("flux1-schnell-tiny", []),
}
"""Recipe, and what makes its whole batch one micro-batch of one process."""
ENGINE_SIDES = {
    "Megatron-Core": ("megatron", []),
    "torchtitan": ("torchtitan", []),
    "torchtitan, compiled": ("torchtitan", ["training.compile=blocks"]),
    "transformers' Trainer": ("hf_trainer", []),
}
OURS = ("native, compiled", "native")
PRODUCTS = "the step's products alone"
Row = dict[str, Any]


class Case:
    """A shape in a dtype: the specs of its sides and the folder in which they train."""

    def __init__(self, recipe: str, changes: list[str], options: argparse.Namespace) -> None:
        self.recipe, self.changes = recipe, [*PLAIN, *changes, f"steps={options.steps}"]
        self.block, self.threads = options.block, options.threads

    def spec(self, *more: str) -> RunSpec:
        """The run of one process on this machine."""
        cluster = Cluster(
            name="here", device="cpu", devices_per_node=1, threads_per_device=self.threads
        )
        recipe = load_recipe(self.recipe, None, [*self.changes, *more])
        return resolve(recipe, cluster, True, None)

    def sides(self, root: Path) -> tuple[dict[str, Training], dict[str, str]]:
        """The sides by name, and why others are left out."""
        spec, left_out = self.spec(), dict[str, str]()
        sides = {
            "native, compiled": self._trainer(
                "_native_in_turns.py", root, "training.compile=blocks"
            ),
            "native": self._trainer("_native_in_turns.py", root, "training.compile=none"),
        }
        if spec.model.kind == "decoder":
            library = "transformers + peft" if spec.lora else "transformers"
            sides[library] = self._trainer("_peer_in_turns.py", root)
            sides[f"{library}, compiled"] = self._trainer(
                "_peer_in_turns.py", root, word="compiled"
            )
            if environment := installed("deepspeed_chat"):
                python = str(environment.python)
                program = "_deepspeed_in_turns.py"
                sides["DeepSpeed ZeRO-0"] = self._trainer(program, root, python=python)
            else:
                left_out["DeepSpeed ZeRO-0"] = "`make frameworks` has not been run"
        else:
            sides["diffusers"] = self._trainer("_diffusers_in_turns.py", root)
        for name, (engine, more) in ENGINE_SIDES.items():
            reason = self._engine_side(name, engine, more, root, sides)
            if reason:
                left_out[name] = reason
        sides[PRODUCTS] = self._trainer(
            "_step_products_in_turns.py", root, "training.compile=none", "steps=3"
        )
        sides["products"] = self._trainer("_products_in_turns.py", root)
        return sides, left_out

    def _trainer(
        self, program: str, root: Path, *more: str, word: str = "", python: str | None = None
    ) -> Training:
        """A side that reads the native trainer's settings."""
        folder = Path(tempfile.mkdtemp(dir=root))
        (folder / "steps").mkdir()
        (folder / "trainer.json").write_text(json.dumps(native.settings(self.spec(*more))))
        arguments = ["trainer.json", str(self.block), *([word] if word else [])]
        log = folder / "log"
        alone = _alone() if python else {}
        return Training(
            program, arguments, folder, self.threads, python=python, environment=alone, log=log
        )

    def _engine_side(
        self, name: str, engine: str, more: list[str], root: Path, sides: dict[str, Training]
    ) -> str | None:
        """Add an engine's own program to `sides`, or say why not."""
        spec = self.spec(*more, f"engine={engine}")
        framework = engine_named(engine)
        problems = framework.unsupported(spec)
        if problems:
            return problems[0]
        if installed(engine) is None:
            return f"`paceline recipes engines install {engine}` has not been run"
        folder = Path(tempfile.mkdtemp(dir=root))
        job = framework.job(spec, "peer")
        for path, text in job.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        # Behind the starter's own words: the interpreter, its flags, then the program.
        words = list(job.program[job.program.index("{python}") + 1 :])
        program = words[1:] if words[0] == "-u" else words
        sides[name] = Training(
            "_engine_in_turns.py",
            [str(self.block), spec.training.matmul_precision, *program],
            folder,
            self.threads,
            python=job.python,
            environment={**job.env, **_alone()},
            log=folder / "log",
        )
        return None


def _alone() -> dict[str, str]:
    """The variables of a world of one rank, on a port of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    return {
        **{name: str(value) for name, value in world.items()},
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def compare(case: Case, rounds: int) -> Row:
    """Step times of all sides, their rates and ratios to ours compiled, of equal rounds."""
    with tempfile.TemporaryDirectory() as name:
        sides, left_out = case.sides(Path(name))
        startup = start_up(sides, left_out)
        try:
            costs = in_turn(list(sides.values()), rounds, WARMUP_ROUNDS - 1)
        finally:
            for side in sides.values():
                side.end()
    by_side = {side: [took[i] for took in costs] for i, side in enumerate(sides)}
    spec = case.spec()
    tokens = spec.training.global_batch * spec.training.seq_len
    flops = model_flops_per_token(
        "causal", FlopsInput(spec.model, spec.training.seq_len, lora=spec.lora)
    )
    rates = [STEP_FLOPS / wall for wall, _ in by_side.pop("products")]
    return {
        "tokens_per_step": tokens,
        "flops_per_token": flops,
        "product_flops_per_s": spread_of(rates),
        "left_out": left_out,
        "sides": {
            side: _figures(took, by_side[OURS[0]], tokens, flops, rates, startup[side])
            for side, took in by_side.items()
        },
    }


def start_up(sides: dict[str, Training], left_out: dict[str, str]) -> dict[str, float]:
    """Seconds of each side's first block, which starts and compiles; one that fails is left out."""
    seconds: dict[str, float] = {}
    for name, side in list(sides.items()):
        try:
            seconds[name] = side.work()[0]
        except RuntimeError as error:
            if name in (*OURS, PRODUCTS, "products"):
                raise
            left_out[name] = str(error).strip().splitlines()[-1][:200]
            del sides[name]
    return seconds


def _figures(
    took: list[Cost],
    ours: list[Cost],
    tokens: int,
    flops: float,
    rates: list[float],
    first_s: float,
) -> Row:
    walls = [wall for wall, _ in took]
    return {
        "first_block_s_a_step": first_s,
        "step_time_s": spread_of(walls),
        "processor_s": spread_of([cpu for _, cpu in took]),
        "tokens_per_s": spread_of([tokens / wall for wall in walls]),
        "ratio": spread_of([mine[0] / wall for mine, wall in zip(ours, walls, strict=True)]),
        "processor_ratio": spread_of(
            [mine[1] / cpu for mine, (_, cpu) in zip(ours, took, strict=True)]
        ),
        "share_of_products": spread_of(
            [flops * tokens / wall / rate for wall, rate in zip(walls, rates, strict=True)]
        ),
    }


def table(row: Row) -> Iterator[str]:
    """Lines of a shape and dtype, and the sides that are not in it."""
    for side, figures in row["sides"].items():
        rate = figures["tokens_per_s"]["median"]
        yield (
            f"| {row['shape']} | {row['dtype']} | {side} | {rate:,.0f} "
            f"| {spread_text(figures['ratio'])} | {spread_text(figures['processor_ratio'])} "
            f"| {figures['share_of_products']['median']:.0%} |"
        )
    for side, reason in row["left_out"].items():
        yield f"  {side} left out: {reason}"


def best_peer(row: Row) -> Row:
    """The fastest side that is not ours, how many times as fast ours is, and products alone are.

    By the ratios of equal rounds, which a machine that slows down for a while leaves as they are.
    """
    ratios = {side: figures["ratio"]["median"] for side, figures in row["sides"].items()}
    bound = ratios.pop(PRODUCTS)
    peer = max((side for side in ratios if side not in OURS), key=lambda side: ratios[side])
    return {
        "best_peer": peer,
        "times_the_best_peer": max(ratios[side] for side in OURS) / ratios[peer],
        "products_times_the_best_peer": bound / ratios[peer],
    }


def main() -> int:
    """Run every shape in fp32 and bf16, print a table, keep the result; 1 when a peer is faster."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--block", type=int, default=4, help="Steps per side and round.")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--only", default="", help="Run only shapes whose name contains this text.")
    parser.add_argument(
        "--dtype", nargs="+", help="Data types (default: fp32, and bf16 if the cores support it)."
    )
    parser.add_argument(
        "--quick", action="store_true", help="One round of one step; nothing is written."
    )
    options = parser.parse_args()
    if options.quick:
        options.rounds = options.block = 1
    options.steps = (WARMUP_ROUNDS + options.rounds + 1) * options.block + 1
    around, rows = Surroundings(), list[Row]()
    # Emulated, a bf16 product takes a hundred times as long and says nothing of any trainer.
    native_bf16 = around.before["cpu"]["native_bf16"]
    options.dtype = options.dtype or ["fp32", *(["bf16"] if native_bf16 else [])]
    print(
        "| shape | dtype | by | tokens/s | of native, compiled | of processor time | of products |"
    )
    print("|---|---|---|---:|---:|---:|---:|")
    for shape, (recipe, changes) in SHAPES.items():
        for dtype in options.dtype if options.only in shape else ():
            row = compare(Case(recipe, [*changes, f"dtype={dtype}"], options), options.rounds)
            row = {"shape": shape, "dtype": dtype, **row, **best_peer(row)}
            rows.append(row)
            print("\n".join(table(row)))
            print(
                f"  {row['times_the_best_peer']:.2f} x {row['best_peer']}, with nothing but "
                f"products {row['products_times_the_best_peer']:.2f}",
                flush=True,
            )
            if not options.quick:
                # After each, so that one that is interrupted leaves what it measured.
                unit = "s a step; ratio of native compiled to side"
                others = earlier("peers", "rows", rows, lambda row: (row["shape"], row["dtype"]))
                keep("peers", unit, around, rows=[*rows, *others])
    return int(any(row["times_the_best_peer"] < 1 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
