"""Draw the pictures of the concept pages: `python docs/concepts/pictures.py`."""

from __future__ import annotations

import random
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "images"
INK, GREY, BLUE, ORANGE, GREEN, RED = (
    "#333333", "#9e9e9e", "#3f6fb5", "#d9822b", "#3a8f5a", "#c0392b",
)  # fmt: skip


def text(
    x: float, y: float, words: str, *, size: int = 13, anchor: str = "start", fill: str = INK
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {place} fill="{fill}">{words}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, *, opacity: float = 1.0) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}" '
        f'fill-opacity="{opacity}"/>'
    )


def line(
    x1: float,
    y1: float,
    x2: float,
    y2: float,
    stroke: str = INK,
    *,
    width: float = 1.5,
    dash: str = "",
) -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}" '
        f'stroke-width="{width}"{dashes}/>'
    )


def write(name: str, title: str, width: int, height: int, parts: list[str]) -> None:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'font-family="system-ui, sans-serif"><title>{title}</title>'
    )
    body = "\n".join([head, box(0, 0, width, height, "#ffffff"), *parts, "</svg>"])
    (FOLDER / f"{name}.svg").write_text(body + "\n", encoding="utf-8")


def steady_window() -> None:
    """Draw step times with warm-up, spikes and the steady window."""
    rng = random.Random(3)
    times = [3.2, 1.5, 1.32, 1.2, 1.12, 1.06, 1.04, 1.02] + [
        1.0 + rng.gauss(0, 0.008) for _ in range(52)
    ]
    for spike in (23, 41, 52):
        times[spike] = 1.0 + rng.uniform(0.18, 0.4)
    x0, width, bottom, top = 60, 620, 200, 40

    def x(step: float) -> float:
        return x0 + width * step / len(times)

    def y(value: float) -> float:
        return bottom - (min(value, 1.6) - 0.9) / 0.7 * (bottom - top)

    first = 7
    parts = [
        box(x(0), top, x(first) - x(0), bottom - top, GREY, opacity=0.25),
        box(x(first), y(1.024), x(60) - x(first), y(0.976) - y(1.024), BLUE, opacity=0.2),
        line(x0, bottom, x0 + width, bottom),
        line(x0, top, x0, bottom),
        *(
            f'<circle cx="{x(i + 0.5):.1f}" cy="{y(t):.1f}" r="3.2" '
            f'fill="{ORANGE if t > 1.1 else BLUE}"/>'
            for i, t in enumerate(times)
        ),
        text(x(0) + 6, 32, "warm-up, left out"),
        text(x(34), 32, "steady window: its median is the step time", anchor="middle"),
        text(x(42), y(1.45), "spikes count in the mean", fill=ORANGE, anchor="middle"),
        text(x0 + width / 2, 225, "step", anchor="middle"),
        text(52, top + 8, "1.6 s", anchor="end", size=11),
        text(52, y(1.0) + 4, "1.0 s", anchor="end", size=11),
    ]
    write("steady-window", "Step times of a run, with warm-up, band and spikes", 700, 235, parts)


def mfu_conventions() -> None:
    """Draw the MFU of one measurement in six conventions."""
    rows = [
        ("palm", 32.36), ("full-attention", 30.69), ("narayanan", 28.98),
        ("megatron-deepspeed", 28.56), ("causal", 27.27), ("six-n", 25.53),
    ]  # fmt: skip
    parts = [text(20, 26, "Llama 3.1 8B, 16 H100, 12.5 s per step: one run, six values of MFU")]
    for i, (name, value) in enumerate(rows):
        top = 42 + 26 * i
        parts += [
            text(150, top + 15, name, anchor="end"),
            box(160, top, value * 13, 19, BLUE if name in ("causal", "full-attention") else GREY),
            text(166 + value * 13, top + 15, f"{value:.1f}%"),
        ]
    write("mfu-conventions", "MFU of one run in six FLOPs conventions", 660, 206, parts)


def memory_kinds() -> None:
    """Draw the kinds of memory as nested boxes."""
    parts = [
        box(20, 20, 640, 170, GREY, opacity=0.25),
        text(32, 42, "device memory, 79.6 GiB on an H100"),
        box(36, 52, 560, 126, ORANGE, opacity=0.3),
        text(48, 72, "device used: + CUDA context, NCCL buffers, other programs (nvidia-smi)"),
        box(52, 82, 480, 86, BLUE, opacity=0.3),
        text(64, 102, "reserved: + free blocks that the allocator keeps"),
        box(68, 112, 400, 46, BLUE, opacity=0.55),
        text(80, 140, "allocated: live tensors at the peak"),
    ]
    write("memory-kinds", "Allocated, reserved and used memory of a GPU", 680, 210, parts)


def verdicts() -> None:
    """Draw four intervals against the margin."""
    rows = [
        ("slower", 2.2, 1.3, 3.1, RED), ("same", 0.2, -0.5, 0.9, GREEN),
        ("undecided", 1.4, -0.6, 3.4, GREY), ("faster", -2.4, -3.3, -1.5, BLUE),
    ]  # fmt: skip
    zero, unit = 400, 75
    parts = [
        box(zero - unit, 34, 2 * unit, 150, GREEN, opacity=0.15),
        line(zero, 34, zero, 184, GREY, dash="4 3"),
        text(zero, 24, "margin: 1% either way does not matter", anchor="middle"),
    ]
    for i, (name, value, low, high, colour) in enumerate(rows):
        y = 56 + 34 * i
        parts += [
            text(24, y + 5, name, fill=colour),
            line(zero + unit * low, y, zero + unit * high, y, colour, width=4),
            f'<circle cx="{zero + unit * value:.1f}" cy="{y}" r="6" fill="{colour}"/>',
        ]
    for percent in (-3, -2, -1, 0, 1, 2, 3):
        parts.append(
            text(
                zero + unit * percent,
                204,
                f"{percent:+d}%" if percent else "0",
                anchor="middle",
                size=11,
            )
        )
    parts.append(text(zero, 224, "change of the step time, with its interval", anchor="middle"))
    write("verdicts", "Four comparisons: slower, same, undecided and faster", 680, 234, parts)


def stragglers() -> None:
    """Draw one step of four nodes: work, waiting and communication."""
    work = [("node-1", 300), ("node-2", 306), ("node-3", 360), ("node-4", 297)]
    x0, longest, comm = 80, 360, 60
    parts = []
    for i, (name, busy) in enumerate(work):
        y = 40 + 32 * i
        slow = busy == longest
        parts += [
            text(x0 - 10, y + 16, name, anchor="end"),
            box(x0, y, busy, 22, RED if slow else BLUE, opacity=0.85),
            box(x0 + busy, y, longest - busy, 22, GREY, opacity=0.35),
            box(x0 + longest, y, comm, 22, ORANGE, opacity=0.85),
        ]
    parts += [
        text(x0, 28, "compute"),
        text(x0 + 303, 28, "wait"),
        text(x0 + longest + 2, 28, "communication", fill=ORANGE),
        text(x0 + longest + comm + 14, 120, "the slow node waits least", fill=RED),
        text(
            x0,
            186,
            "straggler efficiency = median / slowest compute time = 303 / 360 = 84%",
            size=12,
        ),
    ]
    write("stragglers", "One training step on four nodes, with one straggler", 680, 200, parts)


def waterfall() -> None:
    """Draw the MFU waterfall of the worked example of the estimate page."""
    rows = [
        ("peak", 100.0, 0), ("GEMM efficiency", 72.6, 27.4), ("real sizes, attention", 62.1, 10.5),
        ("memory-bound work", 56.4, 5.7), ("CPU launch overhead", 55.7, 0.7),
        ("context parallelism", 54.9, 0.7), ("gradient exchange", 54.6, 0.4), ("jitter", 54.2, 0.3),
    ]  # fmt: skip
    parts = []
    for i, (name, remaining, loss) in enumerate(rows):
        y = 20 + 26 * i
        parts += [
            text(170, y + 14, name, anchor="end"),
            box(180, y, remaining * 3.6, 18, BLUE),
            box(180 + remaining * 3.6, y, loss * 3.6, 18, RED, opacity=0.6),
            text(590, y + 14, f"-{loss:.1f}" if loss else "", anchor="end", fill=RED),
            text(600, y + 14, f"{remaining:.1f}% left"),
        ]
    write("waterfall", "From the peak rate to the estimated MFU", 690, 240, parts)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for draw in (steady_window, mfu_conventions, memory_kinds, verdicts, stragglers, waterfall):
        draw()
