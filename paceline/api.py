"""The command line's main questions as Python functions.

    import paceline

    log = paceline.parse("train.log", model="llama31-8b", device="H100", gpus=64)
    print(log)                                  # what `paceline parse` prints
    log.value.metrics["mfu"].value              # typed values, in base units
    log.to_dataframe()                          # one row per step, needs pandas

Every function returns a `Report`. Errors of the user are `paceline.core.errors.UserError`, broken
environments `SystemFaultError`; both are `PacelineError`. Nothing is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from paceline.compare.judge import Comparison
from paceline.core.errors import UserError
from paceline.core.hosts import Host
from paceline.core.run_report import RunReport
from paceline.estimate.calibrate.lookup import file_or_device_evidence, read_evidence
from paceline.estimate.costs import Prices
from paceline.estimate.report import EstimateOutput, estimate_document
from paceline.estimate.request import EstimateRequest
from paceline.estimate.single_estimate import Estimate
from paceline.estimate.single_estimate import estimate as estimate_request
from paceline.files.index import listing
from paceline.files.run_folder import find_run, runs_root
from paceline.logs.facts import UserSettings
from paceline.logs.parsed_log import ParsedLog
from paceline.logs.parser import parse_log
from paceline.machines.placement import HostPlacement
from paceline.report.document import Document, Row
from paceline.report.logs import log_lines, step_rows
from paceline.report.run_document import run_document
from paceline.report.terminal import plain_text
from paceline.runs.comparison import ComparisonOptions, compare_runs, compare_with_reference
from paceline.runs.comparison_report import comparison_document
from paceline.runs.outcome import evaluate
from paceline.scaling.check.fitness import CheckReport
from paceline.scaling.check.preflight import CheckRequest, check_document
from paceline.scaling.check.preflight import check as check_hosts

if TYPE_CHECKING:
    from pandas import DataFrame

T = TypeVar("T")
PathLike = str | Path


@dataclass(frozen=True, repr=False)
class Report(Generic[T]):
    """An answer: the typed value, and the forms in which the command line prints it."""

    value: T
    data: Any
    """Plain lists and dicts, the same as `--json` prints."""
    rows: Sequence[Row]
    """Rows in base units, the same as `--format csv` prints."""
    text: Callable[[], str]

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def to_dataframe(self) -> DataFrame:
        """Return the rows as a pandas DataFrame; raise UserError if pandas is not installed."""
        try:
            import pandas
        except ImportError as error:
            raise UserError(
                "to_dataframe", "needs pandas", remedy="pip install 'paceline[dataframe]'"
            ) from error
        return pandas.DataFrame([dict(row) for row in self.rows])


def parse(
    log: PathLike,
    *,
    engine: str | None = None,
    recipe: str | None = None,
    model: str | None = None,
    device: str | None = None,
    gpus: int | None = None,
    global_batch: int | None = None,
    seq_len: int | None = None,
    dtype: str | None = None,
    convention: str | None = None,
    tokens: float | None = None,
    window: str | None = None,
) -> Report[ParsedLog]:
    """Read a training log of any known framework, plain or gzipped.

    The keywords add what the log does not state, as the options of `paceline parse` do. The
    DataFrame has one row per step. An unreadable file gives a value with status `unreadable`.

    Raises UserError for a path that does not exist and for unknown settings.
    """
    path = Path(log)
    if not path.exists():
        raise UserError(str(path), "does not exist")
    settings = UserSettings(
        engine=engine,
        recipe=recipe,
        model=model,
        device=device,
        num_devices=gpus,
        global_batch=global_batch,
        seq_len=seq_len,
        dtype=dtype,
        convention=convention,
        total_tokens=tokens,
        window=window,
    )
    settings.check()
    parsing = parse_log(path, settings)
    document = parsing.document
    return Report(
        document,
        document.model_dump(mode="json"),
        step_rows(parsing.steps),
        lambda: "\n".join(log_lines(document)) + "\n",
    )


def estimate(
    recipe: str,
    *,
    device: str,
    gpus: int,
    layout: Mapping[str, int] | None = None,
    overrides: Mapping[str, object] | None = None,
    variant: str | None = None,
    per_node: int = 8,
    intra: str | None = None,
    inter: str | None = None,
    software: str | None = None,
    tokens: float | None = None,
    price: float | None = None,
    calibration: PathLike | None = None,
) -> Report[Estimate]:
    """Predict step time, throughput, memory and cost of a training, with 80% intervals.

    `layout` sets parallel axes ({"tp": 4, "pp": 2}), `overrides` recipe fields
    ({"training.seq_len": 4096}), `tokens` the length of the training, and `price` the price per
    device-hour. Nothing runs.

    Raises UserError for unknown names and for a layout that does not fit the devices.
    """
    fields = {f"layout.{axis}": size for axis, size in (layout or {}).items()}
    fields |= dict(overrides or {})
    file_evidence = read_evidence(Path(calibration)) if calibration else None
    request = EstimateRequest(
        recipe=recipe,
        device=device,
        devices=gpus,
        variant=variant,
        overrides=tuple(f"{name}={value}" for name, value in fields.items()),
        devices_per_node=per_node,
        intra_link=intra,
        inter_link=inter,
        software=software,
        tokens=tokens,
        prices=Prices(per_device_hour=price),
        calibration=file_evidence.calibration if file_evidence else None,
    )
    dtype = request.resolved_recipe.training.dtype
    evidence = file_or_device_evidence(file_evidence, device, dtype)
    value = estimate_request(request, evidence)
    return _report(value, estimate_document(EstimateOutput([value])))


def compare(
    baseline: PathLike | Sequence[PathLike],
    candidate: PathLike | Sequence[PathLike] | None = None,
    *,
    against: str | None = None,
    margin: float = 0.01,
    allow: Sequence[str] = (),
    metrics: Sequence[str] = (),
    runs_dir: PathLike | None = None,
) -> Report[Comparison]:
    """Test whether `candidate` is slower than `baseline`, faster, or the same.

    A side is what `paceline compare` takes: logs, folders, runs, groups, tags, or a list of them.
    `against` compares the baseline with a published row instead. `margin` is a fraction:
    differences below it do not count. The DataFrame has one row per metric.

    Raises UserError when a side matches no run, and for unknown settings and metrics.
    """
    if (candidate is None) == (against is None):
        raise UserError("compare", "needs either a second side or `against`")
    options = ComparisonOptions(margin, tuple(allow), tuple(metrics))
    root = _root(runs_dir)
    if against is not None:
        value = compare_with_reference(root, _side(baseline), against, options)
    else:
        value = compare_runs(root, _side(baseline), _side(candidate or ()), options)
    return _report(value, comparison_document(value))


def load_run(run: str = "last", *, runs_dir: PathLike | None = None) -> Report[RunReport]:
    """Load a stored run; its figures are recomputed from the raw files.

    The DataFrame has one row per step. Raises UserError when no run has this name or tag.
    """
    value = evaluate(find_run(_root(runs_dir), run))
    document = run_document(value)
    return Report(
        value, _plain(document.data), step_rows(value.steps), lambda: plain_text(document)
    )


def runs(*, runs_dir: PathLike | None = None) -> Report[Sequence[Row]]:
    """List the stored runs, oldest first, one row per run."""
    rows = listing(_root(runs_dir), lambda folder: evaluate(folder).result).rows
    return Report(rows, rows, rows, lambda: "\n".join(str(row["run"]) for row in rows) + "\n")


def check(
    hosts: Sequence[str] = (),
    *,
    device: str = "auto",
    devices: int | None = None,
    seconds: float = 0.5,
    time_limit_s: float = 60.0,
    runs_dir: PathLike | None = None,
) -> Report[CheckReport]:
    """Check this machine, or `hosts` over SSH, and report which of them to drain.

    `seconds` is the time of one measurement, `time_limit_s` that of all. The DataFrame has one
    row per host. Raises SystemFaultError when no host can be reached.
    """
    request = CheckRequest(
        where=HostPlacement(hosts=tuple(Host(name=name) for name in hosts)),
        device=device,
        devices=devices,
        seconds=seconds,
        num_rounds=2,
        limit_s=time_limit_s,
    )
    outcome = check_hosts(request, _root(runs_dir), lambda _: None)
    return _report(outcome.report, check_document(outcome))


def _report(value: T, document: Document) -> Report[T]:
    table = document.csv_table()
    return Report(
        value, _plain(document.data), table.rows if table else (), lambda: plain_text(document)
    )


def _plain(data: Any) -> Any:
    return data.model_dump(mode="json") if hasattr(data, "model_dump") else data


def _root(runs_dir: PathLike | None) -> Path:
    return runs_root(Path(runs_dir) if runs_dir is not None else None)


def _side(names: PathLike | Sequence[PathLike]) -> str:
    parts = [names] if isinstance(names, str | Path) else names
    return ",".join(str(part) for part in parts)
