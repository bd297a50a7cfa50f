"""Share of right answers to noise, with a cell for each kind of noise and setting."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from _noise_answers import (
    analyze_table,
    by_day,
    compare_samples,
    parse_series,
    run_campaign,
    until_decided,
)
from _noise_clusters import CLUSTER_NOISES, Cluster, ClusterNoise
from _noise_runs import (
    NORMAL_08,
    NORMAL_3,
    NORMAL_15,
    RUN_NOISES,
    RunNoise,
    in_a_row,
    in_turns,
)
from _noise_steps import STEP_NOISES
from _simulated_cluster import Fault, FaultKind, SimulatedCluster, simulate

from paceline.compare.over_time.step_changes import fit_series
from paceline.compare.significance import MARGIN, rank_options
from paceline.scaling.analysis.analysis import Analysis

LayoutScales = Callable[[np.random.Generator, int], npt.NDArray[np.float64]]
"""Factors on the noise of each layout's runs, (layouts,)."""
SEED = 20_261_123
LARGEST_ERROR = 0.003
"""Tolerance of a reported step time."""
CHANGES = {"identical": 0.0, "slower by 1%": 0.01, "slower by 2%": 0.02}
REPORTED, COVERED = "step time", "interval"
FALSE_ALARM, FALSE_SAME, POWER = "false alarm", "false same", "power"
SINGLE_ALARM, SAME = "single runs", "same"
FLAGGED, NAMED, FAULT, FACTOR, CLAIMED = "flagged", "named", "fault", "factor", "claimed"
STEP_ALARM, STEP_POWER = "history alarm", "history power"
PAIRS_ALARM, PAIRS_SAME, PAIRS_POWER = "pairs alarm", "pairs same", "pairs power"
PAIRS_COVERED, PAIRS_MANY = "pairs interval", "many pairs"
BEST = "best layout"
PLACED, SEEN, MISPLACED = "placed", "seen", "misplaced"

ASKED_OF_PAIRS = {
    "identical": (PAIRS_ALARM, ("higher", "lower")),
    "slower by 1%": (PAIRS_SAME, ("same",)),
    "slower by 2%": (PAIRS_POWER, ("higher",)),
}
MAX_PAIRS = 16
CLOSE_PAIRS = ((NORMAL_08, 0.0), (NORMAL_15, MARGIN), (NORMAL_3, MARGIN))
"""Kinds of noise and margins with which the sequential test is closest to its promise."""
NOISIER_LAYOUTS = 5.0
LAYOUT_SPREADS = (0.005, 0.05)
"""Smallest and largest standard deviation of the runs of a layout, drawn by its logarithm."""
LINK_FAULTS: dict[str, FaultKind] = {
    "a slow link of two nodes": "pair",
    "a slow cable of one node": "cable",
    "a slow uplink": "link",
}
INTERMITTENT = ((0.1, 0.05), (0.3, 0.05), (0.1, 0.1), (0.3, 0.1))
"""Share of the runs in which a node is slow, and its loss then."""


@dataclass(frozen=True)
class Cell:
    """Number of hits among n trials of one kind of noise in one setting."""

    promise: str
    kind: str
    setting: str
    hits: int
    n: int
    num_warned: int | None = None
    """Trials in which the answer carried a warning or low confidence, where that matters."""

    @property
    def rate(self) -> float:
        """Share of the trials."""
        return self.hits / self.n


@dataclass(frozen=True)
class Size:
    """Number of trials per cell, and the settings."""

    lengths: tuple[int, ...]
    series: int
    repeats: tuple[int, ...]
    comparisons: int
    nodes: tuple[int, ...]
    clusters: int
    histories: int
    pairs: int
    close_pairs: int
    """Number of series of each of CLOSE_PAIRS."""
    layouts: int
    faults: int


QUICK = Size((100,), 4, (5,), 10, (16,), 6, 15, 15, 15, 10, 8)
WHOLE = Size((30, 100, 300, 1000), 35, (3, 5, 8), 75, (8, 32, 64), 20, 150, 450, 6000, 40, 50)


def step_cells(size: Size) -> Iterator[Cell]:
    """Reported step times and their intervals."""
    with tempfile.TemporaryDirectory(prefix="paceline-noise-") as folder:
        path = Path(folder) / "train.log"
        for noise in STEP_NOISES:
            for steps in size.lengths:
                rng = _rng(noise.name, steps)
                answers = [parse_series(noise.series(rng, steps), path) for _ in range(size.series)]
                setting, num_warned = f"{steps} steps", sum(answer.warned for answer in answers)
                close = [abs(a.error) <= LARGEST_ERROR or a.covered or a.warned for a in answers]
                num_covered = [a.covered is not False or a.warned for a in answers]
                yield Cell(
                    REPORTED, noise.name, setting, sum(map(bool, close)), len(close), num_warned
                )
                yield Cell(
                    COVERED, noise.name, setting, sum(num_covered), len(num_covered), num_warned
                )


def comparison_cells(size: Size) -> Iterator[Cell]:
    """Verdicts on repeats, taken in turns or one side after the other."""
    for noise in RUN_NOISES:
        for repeats in size.repeats:
            for name, change in CHANGES.items():
                yield from _comparison_cell(
                    noise, repeats, "in turns", name, change, size.comparisons
                )
            for name in ("identical", "slower by 1%"):
                change = CHANGES[name]
                yield from _comparison_cell(
                    noise, repeats, "in a row", name, change, size.comparisons
                )
        yield from _comparison_cell(noise, 1, "in turns", "identical", 0.0, size.comparisons)


def _comparison_cell(
    noise: RunNoise, repeats: int, order: str, name: str, change: float, trials: int
) -> Iterator[Cell]:
    rng = _rng(noise.name, f"{repeats} {order} {name}")
    candidate = in_turns(repeats) if order == "in turns" else in_a_row(repeats)
    verdicts = [
        compare_samples(noise.medians_s(rng, candidate, change), candidate) for _ in range(trials)
    ]
    words = [verdict.verdict for verdict in verdicts]
    setting = f"{repeats} + {repeats} {order}"

    def cell(promise: str, *answers: str) -> Cell:
        hits = [v for v in verdicts if v.verdict in answers]
        low = sum(v.confidence == "low" for v in hits)
        return Cell(promise, noise.name, setting, len(hits), len(words), low)

    match name:
        case "identical" if repeats == 1:
            yield cell(SINGLE_ALARM, "slower", "faster")
        case "identical":
            yield cell(FALSE_ALARM, "slower", "faster")
            if order == "in turns":
                yield cell(SAME, "same")
        case "slower by 1%":
            yield cell(FALSE_SAME, "same")
        case _:
            yield cell(POWER, "slower")


def cluster_cells(size: Size) -> Iterator[Cell]:
    """Healthy nodes that are flagged, slow ones that are named, factors that hold the truth."""
    for noise in CLUSTER_NOISES:
        for nodes in _sizes_of(noise, size):
            trials = max(8, size.clusters * 16 // (16 + nodes))
            for repeats in (1, 3):
                yield from _of_clusters(noise, nodes, repeats, trials)


def _sizes_of(noise: ClusterNoise, size: Size) -> tuple[int, ...]:
    return (4,) if "four nodes" in noise.name else size.nodes


def _of_clusters(noise: ClusterNoise, nodes: int, repeats: int, trials: int) -> Iterator[Cell]:
    setting = f"{nodes} nodes, {repeats} x"
    rng = _rng(noise.name, setting)
    healthy = [noise.cluster(rng, nodes) for _ in range(trials)]
    tables = [analyze_table(cluster, repeats) for cluster in healthy]
    copies, campaigns = list[Cluster](), list[Analysis]()
    for cluster in healthy:
        copies.append(deepcopy(cluster))
        campaigns.append(run_campaign(cluster, repeats))
    for how, analyses in (("table", tables), ("campaign", campaigns)):
        num_flagged = sum(map(_blames_healthy, healthy, analyses))
        yield Cell(FLAGGED, noise.name, f"{setting}, {how}", num_flagged, trials)
    factors = [
        (cluster, straggler)
        for cluster, analysis in zip(healthy, tables, strict=True)
        if (straggler := analysis.largest.straggler) is not None
    ]
    if "all alike" in noise.name:
        yield Cell(CLAIMED, noise.name, setting, len(factors), trials)
    elif len(factors) >= max(5, trials // 20):
        num_covered = sum((f.low or 0.0) <= _straggler(c) <= (f.high or 0.0) for c, f in factors)
        yield Cell(FACTOR, noise.name, setting, num_covered, len(factors))
    yield _slow_node_cell(NAMED, noise, setting, [noise.loss] * trials, rng, nodes, repeats)
    smallest = [analysis.verdicts.smallest_fault for analysis in campaigns]
    detectable = [(twin, s) for twin, s in zip(copies, smallest, strict=True) if s and s < 0.5]
    if detectable:
        hits = sum(_finds_stated(twin, loss, repeats) for twin, loss in detectable)
        yield Cell(FAULT, noise.name, setting, hits, len(detectable))


def _slow_node_cell(
    promise: str,
    noise: ClusterNoise,
    setting: str,
    losses: list[float],
    rng: np.random.Generator,
    nodes: int,
    repeats: int,
) -> Cell:
    """Return the cell of campaigns that flag the slowed node."""
    analyses = [run_campaign(noise.cluster(rng, nodes, loss), repeats) for loss in losses]
    hits = sum(any(n.host == "node-3" for n in analysis.flagged_nodes) for analysis in analyses)
    return Cell(promise, noise.name, setting, hits, len(losses))


def _finds_stated(twin: Cluster, loss: float, repeats: int) -> bool:
    """Return whether the measurements that stated this fault flag a node that has it."""
    twin.speeds[3] *= 1 - loss
    return any(node.host == "node-3" for node in run_campaign(twin, repeats).flagged_nodes)


def _blames_healthy(cluster: Cluster, analysis: Analysis) -> bool:
    """Return whether a node is flagged that is not really more than 1% slow."""
    slow = {f"node-{node}" for node in cluster.slow_nodes}
    return any(node.host not in slow for node in analysis.flagged_nodes)


def _straggler(cluster: Cluster) -> float:
    return float(cluster.speeds.min() / np.median(cluster.speeds))


def fault_cells(size: Size) -> Iterator[Cell]:
    """Faults of links, and nodes that are slow now and then, in shifted rounds of neighbors."""
    for nodes in (size.nodes[0], size.nodes[-1]):
        trials = max(8, size.faults * 16 // (8 + nodes))
        for name, kind in LINK_FAULTS.items():
            analyses = [_with_fault(kind, nodes, 3, seed) for seed in range(trials)]
            hits = sum(_places(analysis, hosts) for analysis, hosts in analyses)
            yield Cell(PLACED, name, f"{nodes} nodes, 3 x", hits, trials)
        for share, loss in INTERMITTENT:
            name = f"{loss:.0%} slow in {share:.0%} of the runs"
            for rounds in (1, 3):
                analyses = [
                    _with_fault("intermittent", nodes, rounds, seed, loss, share)
                    for seed in range(trials)
                ]
                setting = f"{nodes} nodes, {rounds} x"
                num_seen = sum(_reports(analysis, hosts) for analysis, hosts in analyses)
                num_links = sum(any(s.sides for s in a.searches) for a, _ in analyses)
                yield Cell(SEEN, name, setting, num_seen, trials)
                yield Cell(MISPLACED, name, setting, num_links, trials)


def _with_fault(
    kind: FaultKind, nodes: int, rounds: int, seed: int, loss: float = 0.05, share: float = 1.0
) -> tuple[Analysis, set[str]]:
    """Return the analysis of a cluster with a fault, and the hosts to which it belongs."""
    per_switch = nodes // 4
    number = 2 if kind == "link" else 2 + seed % (nodes - 3)
    cluster = SimulatedCluster(
        nodes, (Fault(kind, number, loss, share),), nodes_per_switch=per_switch, seed=seed
    )
    sizes = [2**k for k in range(nodes.bit_length()) if 2**k <= nodes]
    behind = cluster.hosts[per_switch : 2 * per_switch]
    at_fault = cluster.hosts[number - 1 : number + (kind == "pair")]
    hosts = behind if kind == "link" else at_fault
    return simulate(cluster, sizes, "contiguous", rounds), set(hosts)


def _places(analysis: Analysis, hosts: set[str]) -> bool:
    """Return whether some search ends at these hosts and nowhere else."""
    sides = [set[str]().union(*search.sides) for search in analysis.searches if search.sides]
    return bool(sides) and hosts in sides and all(side & hosts for side in sides)


def _reports(analysis: Analysis, hosts: set[str]) -> bool:
    """Return whether the report names one of the hosts, alone or in a slow group."""
    reported_hosts = {node.host for node in (*analysis.flagged_nodes, *analysis.suspect_nodes)}
    reported_hosts |= analysis.speeds.noisy_hosts if analysis.speeds else set[str]()
    return bool(reported_hosts.union(*(group.hosts for group in analysis.slow)) & hosts)


def history_cells(size: Size) -> Iterator[Cell]:
    """Steps that `paceline runs history` sees, where there is none and where there is one."""
    for noise in RUN_NOISES:
        if "drift" in noise.name:
            continue
        for runs in (10, 20, 50):
            rng = _rng(noise.name, f"history {runs}")
            fits = [
                fit_series(by_day(noise.medians_s(rng, np.zeros(runs, dtype=np.bool_), 0.0)))
                for _ in range(size.histories)
            ]
            num_alarms = sum(bool(fit.changes) or fit.drift is not None for fit in fits)
            yield Cell(STEP_ALARM, noise.name, f"{runs} runs", num_alarms, len(fits))
        rng = _rng(noise.name, "a step")
        after = np.arange(10) >= 5
        fits = [fit_series(noise.medians_s(rng, after, 0.02)) for _ in range(size.histories)]
        at_place = sum([c.at for c in fit.changes] in ([4], [5], [6]) for fit in fits)
        yield Cell(STEP_POWER, noise.name, "5 runs, then 5 slower by 2%", at_place, len(fits))


def pairs_cells(size: Size) -> Iterator[Cell]:
    """Yield the final verdicts of `compare --sequential`, and the coverage of their intervals."""
    for noise in RUN_NOISES:
        for name, change in CHANGES.items():
            rng = _rng(noise.name, f"pairs {name}")
            looks = [until_decided(noise, rng, change, MAX_PAIRS) for _ in range(size.pairs)]
            answers = [look.change for look in looks]
            setting = f"up to {MAX_PAIRS} pairs"
            promise, words = ASKED_OF_PAIRS[name]
            hits = sum(answer in words for answer in answers)
            yield Cell(promise, noise.name, setting, hits, len(looks))
            num_covered = sum(look.low <= 1 + change <= look.high for look in looks)
            yield Cell(PAIRS_COVERED, noise.name, f"{setting}, {name}", num_covered, len(looks))
    for noise, margin in CLOSE_PAIRS:
        rng = _rng(noise.name, f"many pairs {margin}")
        looks = [until_decided(noise, rng, 0.0, MAX_PAIRS, margin) for _ in range(size.close_pairs)]
        hits = sum(look.change in ("higher", "lower") for look in looks)
        yield Cell(PAIRS_MANY, noise.name, f"margin {margin:.0%}", hits, len(looks))


def best_cells(size: Size) -> Iterator[Cell]:
    """Yield cells of layouts that are the best one with a probability of at least 90%.

    A hit is the best layout, or one within 0.5% of it.
    """
    kinds = [noise for noise in RUN_NOISES if "drift" not in noise.name]
    scales: dict[str, tuple[RunNoise, LayoutScales]] = {
        kind.name: (kind, lambda rng, n: np.ones(n)) for kind in kinds
    }
    usual = kinds[0]
    scales[f"half of the layouts vary {NOISIER_LAYOUTS:g} times as much"] = (
        usual,
        lambda rng, n: np.where(np.arange(n) % 2, NOISIER_LAYOUTS, 1.0),
    )
    scales["layouts vary by 0.5 to 5%"] = (
        usual,
        lambda rng, n: np.exp(rng.uniform(*np.log(LAYOUT_SPREADS), n)) / 0.004,
    )
    for name, (noise, scale) in scales.items():
        for layouts, repeats, distance in ((5, 2, 0.03), (5, 3, 0.01), (20, 3, 0.05)):
            rng = _rng(name, f"{layouts} layouts")
            sure = [
                right
                for _ in range(size.layouts)
                if (right := _best_is_right(noise, rng, (layouts, repeats), distance, scale))
                is not None
            ]
            if len(sure) >= 10:
                yield Cell(BEST, name, f"{layouts} layouts, {repeats} x", sum(sure), len(sure))


def _best_is_right(
    noise: RunNoise,
    rng: np.random.Generator,
    shape: tuple[int, int],
    distance: float,
    scale: LayoutScales,
) -> bool | None:
    """None where no layout is called the best with 90% probability; shape (layouts, repeats)."""
    layouts, repeats = shape
    truths = rng.normal(0, distance, layouts)
    order = np.tile(np.arange(layouts), repeats)
    logs = scale(rng, layouts)[order] * noise.logs(rng, len(order)) + truths[order]
    runs = np.exp(logs).reshape(repeats, layouts).T
    best = int(np.argmin(np.median(runs, axis=1)))
    each = rank_options(runs.tolist(), best)
    if each is None or each[best].chance < 0.9:
        return None
    return bool(truths[best] - truths.min() <= 0.005)


def _rng(*names: object) -> np.random.Generator:
    """The same for the same cell, whatever else is measured."""
    return np.random.default_rng([SEED, *"/".join(map(str, names)).encode()])


MEASURES: tuple[Callable[[Size], Iterator[Cell]], ...] = (
    step_cells,
    comparison_cells,
    cluster_cells,
    fault_cells,
    history_cells,
    pairs_cells,
    best_cells,
)
