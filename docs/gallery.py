"""Make docs/gallery.md and its pictures: `make gallery`.

Runs small recipes and verbs in a temporary folder, opens the pages that they write in Chromium and
takes a picture of each. Needs what `make deps-browser` installs; takes some minutes. Names of
pictures as arguments make these alone.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from playwright.sync_api import sync_playwright

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
WIDTH, TALLEST = 1280, 1330
"""Pixels of a picture; what is longer is cut at the end."""
COLOURS = 128
"""Number of colours of a picture, which pages do not exceed visibly."""
HEAD = """# Gallery
One picture of each page, with the command that writes it. `make gallery` takes them.
"""


@dataclass(frozen=True)
class Picture:
    """One page: how it is made and what the gallery says of it."""

    name: str
    title: str
    words: str
    commands: tuple[str, ...]
    page: str
    """Its place in the folder, by a pattern."""
    chart: str = ""
    """Path of a chart to store as SVG, relative to the folder."""


SMALL = "--device cpu --set model.num_layers=2 --set model.hidden_size=64 --set training.seq_len=64"
"""Settings of a model that trains in seconds on two cores."""
BATCHES = (
    "--device cpu --set model.num_layers=2 --set model.hidden_size=128 --set model.num_heads=4 "
    "--set training.seq_len=64 --set batch_per_device=32"
)
PICTURES = (
    Picture(
        "run",
        "One run",
        "A training on two CPU cores.",
        (f"run tiny-llama {BATCHES} --devices 2 --set steps=60",),
        "runs/*tiny-llama-dp2*/report.html",
    ),
    Picture(
        "compare",
        "Two sides compared",
        "Five runs without activation checkpointing and five with it, in turns.",
        (
            f"run tiny-gpt {BATCHES} --devices 1 --set steps=40 --repeat 5 --group recompute "
            "--interleave layout.recompute=none layout.recompute=full",
            "compare recompute-a recompute-b --allow recompute --html compare.html",
        ),
        "compare.html",
    ),
    Picture(
        "history",
        "A recipe over time",
        "The same ten runs.",
        ("runs history tiny-gpt --html history.html",),
        "history.html",
    ),
    Picture(
        "profile",
        "Where a step's time goes",
        "PyTorch's profiler, with the MFU waterfall.",
        (f"probe profile tiny-llama {BATCHES} --devices 2 --charts charts --html profile.html",),
        "profile.html",
        "charts/waterfall.svg",
    ),
    Picture(
        "explain",
        "Why a run is slow",
        "The second run uses small micro-batches, recomputation and frequent checkpoints.",
        (
            f"run tiny-llama {BATCHES} --devices 2 --set steps=30 "
            "--set layout.micro_batch=32 --tag before",
            f"run tiny-llama {BATCHES} --devices 2 --set steps=30 --set layout.micro_batch=2 "
            "--set layout.recompute=full --set checkpoint.every=2 "
            "--set checkpoint.asynchronous=false --tag after",
            "explain after --against before --html explain.html",
        ),
        "explain.html",
    ),
    Picture(
        "goodput",
        "What a training's time went to",
        "Two attempts: the second resumes from the first one's checkpoint.",
        (
            f"run tiny-llama {BATCHES} --devices 2 --set steps=25 --set checkpoint.every=10 "
            "--tag first",
            f"run tiny-llama {BATCHES} --devices 2 --set steps=60 --set checkpoint.every=10 "
            "--set checkpoint.resume=first --tag second",
            "runs goodput first second --html goodput.html",
        ),
        "goodput.html",
    ),
    Picture(
        "watch",
        "One moment of a run",
        "The last of these runs.",
        ("runs watch second --once --html watch.html",),
        "watch.html",
    ),
    Picture(
        "sweep",
        "Layouts compared",
        "Each was predicted before it ran.",
        (f"sweep tiny-gpt {SMALL} --devices 2 --set steps=20 --tp 1,2 --mbs 2,4 --name layouts",),
        "runs/layouts/report.html",
    ),
    Picture(
        "estimate",
        "An estimate, compared with another scenario",
        "Nothing ran.",
        (
            "estimate llama31-70b --device H100 --gpus 1024 --price 2.5 "
            "--compare device=B200,gpus=512,price=4 --html estimate.html",
        ),
        "estimate.html",
    ),
    Picture(
        "scale",
        "Scaling and slow nodes",
        "A simulated cluster, so that the fault is known: node 17 is 5% slow, a switch 4%.",
        ("scale --from simulated-cluster.csv --html scale.html",),
        "scale.html",
    ),
    Picture(
        "mlperf",
        "Scores compared with published results",
        "Made-up logs; the dots are published results.",
        (
            "mlperf compare made-up-logs/eight made-up-logs/sixty-four --gpus 8 --gpus 64 "
            "--accelerator GB200 --plot mlperf.html",
        ),
        "mlperf.html",
    ),
)


def main(names: Sequence[str]) -> None:
    """Make every page, or those that are named, picture it, and write the gallery."""
    pictures = [picture for picture in PICTURES if not names or picture.name in names]
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_up_logs(folder / "made-up-logs")
        simulate_cluster(folder / "simulated-cluster.csv")
        for picture in pictures:
            for command in picture.commands:
                call(command, folder)
            if picture.chart:
                shutil.copy(folder / picture.chart, DOCS / "images")
        take(folder, pictures)
    (DOCS / "gallery.md").write_text(gallery(), encoding="utf-8")


def make_up_logs(folder: Path) -> None:
    """Logs of two sets of MLPerf runs, as the tests write them."""
    sys.path.insert(0, str(ROOT))
    from tests.mlperf.submissions import ten_runs

    ten_runs(folder / "eight")
    ten_runs(folder / "sixty-four", global_batch_size=16, samples=4224)


def simulate_cluster(path: Path) -> None:
    """Measurements of a simulated cluster with a slow node and a slow switch."""
    from benchmarks._simulated_cluster import Fault, SimulatedCluster, simulate, write_table

    cluster = SimulatedCluster(64, (Fault("slow", 17, 0.05), Fault("link", 3, 0.04)))
    write_table(path, simulate(cluster, [1, 2, 4, 8, 16, 32, 64]))


def call(command: str, folder: Path) -> None:
    """Run `paceline COMMAND` in the folder; exit codes 3 and 4 are verdicts, not failures."""
    print(f"paceline {command}", flush=True)
    environment = {**os.environ, "PACELINE_RUNS": "runs", "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "paceline", *shlex.split(command)]
    result = subprocess.run(argv, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    if result.returncode not in (0, 3, 4):
        sys.exit(f"paceline {command}: exit code {result.returncode}")


def take(folder: Path, pictures: Sequence[Picture]) -> None:
    """A picture of every page, the upper part of what is long."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        sys.exit("Chromium is not installed; `make deps-browser` installs it")
    images = DOCS / "images"
    images.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for picture in pictures:
            page = browser.new_page(viewport={"width": WIDTH, "height": 900})
            (place,) = sorted(folder.glob(picture.page))[:1]
            page.goto(place.as_uri())
            height = min(TALLEST, page.evaluate("document.documentElement.scrollHeight"))
            clip = {"x": 0, "y": 0, "width": WIDTH, "height": height}
            file = images / f"{picture.name}.png"
            page.screenshot(path=file, full_page=True, clip=clip)  # type: ignore[arg-type]
            with Image.open(file) as image:
                image.convert("RGB").quantize(COLOURS).save(file, optimize=True)
            print(f"{file.relative_to(ROOT)}: {file.stat().st_size // 1000} kB", flush=True)
        browser.close()


def gallery() -> str:
    """The text of docs/gallery.md."""
    parts = [HEAD]
    for picture in PICTURES:
        parts.append(
            f"## {picture.title}\n{picture.words}\n```sh\npaceline {picture.commands[-1]}\n```\n"
            f"![{picture.name}](images/{picture.name}.png)\n{chart(picture)}"
        )
    return "\n".join(parts)


def chart(picture: Picture) -> str:
    """Return the line of a chart that is stored as SVG; empty without one."""
    name = Path(picture.chart).name
    return f"![chart](images/{name})\n" if name else ""


if __name__ == "__main__":
    main(sys.argv[1:])
