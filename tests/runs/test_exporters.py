"""Exports of a run, read back by the libraries of the trackers and of Prometheus."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from paceline.report.openmetrics import Gauge, openmetrics_text
from paceline.runs.watch.reader import WatchState
from paceline.runs.watch.report import watch_metrics
from paceline.scaling.check.fitness import MEASURES
from tests.command import paceline
from tests.explain.example import write_parts

ROOT = Path(__file__).parents[2]
NUM_STEPS = 40
STEP_TIME_S = 7.78945


def library(name: str) -> ModuleType:
    """Import a library; a missing one fails where exports are required (PACELINE_REQUIRE)."""
    if "exports" in os.environ.get("PACELINE_REQUIRE", "").split(","):
        __import__(name)
    return pytest.importorskip(name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run, imported from a log of 40 steps."""
    folder = tmp_path_factory.mktemp("runs")
    log = ROOT / "docs/examples/train.log"
    options = ("--recipe", "llama31-8b", "--device", "H100", "--tag", "exported")
    done = paceline("runs", "import", log, *options, runs=folder)
    assert done.returncode == 0, done.stderr
    return folder


def export(runs: Path, to: str, out: Path) -> None:
    environment = {"WANDB_DIR": str(out.parent), "HOME": str(out.parent)}
    done = paceline(
        "runs", "export", "exported", "--to", to, "--out", out, runs=runs, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{out}\n"


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return labels and value of each sample by name; both parsers of the client must agree."""
    library("prometheus_client")
    from prometheus_client import parser
    from prometheus_client.openmetrics import parser as openmetrics_parser

    strict: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in openmetrics_parser.text_string_to_metric_families(text):
        assert family.documentation and family.type == "gauge"
        for sample in family.samples:
            strict.setdefault(sample.name, []).append((sample.labels, sample.value))
    lenient = [s for f in parser.text_string_to_metric_families(text) for s in f.samples]
    assert len(lenient) == sum(map(len, strict.values()))
    return strict


def test_tensorboard_reads_the_steps_and_the_figures(runs: Path, tmp_path: Path) -> None:
    library("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    export(runs, "tensorboard", tmp_path / "tb")

    (folder,) = (tmp_path / "tb").iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    times = events.Scalars("step/step_time_s")
    assert [event.step for event in times] == list(range(1, NUM_STEPS + 1))
    assert times[-1].wall_time - times[0].wall_time == pytest.approx(39 * 7.8, rel=0.02)
    (median,) = events.Scalars("figure/step_time_s")
    assert median.value == pytest.approx(STEP_TIME_S, rel=1e-6)
    (settings,) = events.Tensors("settings/text_summary")
    assert json.loads(settings.tensor_proto.string_val[0])["device"] == "H100-SXM"


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a W&B file: chunks in blocks of 32 KiB, as in a log of LevelDB."""
    block, at, record = 1 << 15, 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
        size = int.from_bytes(data[at + 4 : at + 6], "little")
        record += data[at + 7 : at + 7 + size]
        if data[at + 6] in (1, 4):  # a full record, or the last chunk of one
            yield record
            record = b""
        at += 7 + size


def test_wandb_reads_the_offline_run(runs: Path, tmp_path: Path) -> None:
    library("wandb")
    from wandb.proto import wandb_internal_pb2

    export(runs, "wandb", tmp_path / "wb")

    (path,) = tmp_path.glob("wb/wandb/offline-run-*/run-*.wandb")
    rows: list[dict[str, Any]] = []
    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    for data in wandb_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        values = {
            "history": record.history.item,
            "run": record.run.config.update,
            "summary": record.summary.update,
        }.get(record.WhichOneof("record_type"), ())
        found = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in values}
        if record.WhichOneof("record_type") == "history":
            rows.append(found)
        config |= found if record.HasField("run") else {}
        summary |= found if record.HasField("summary") else {}
    assert [row["_step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    assert rows[10]["step/step_time_s"] == pytest.approx(7.8, rel=0.05)
    assert config["device"] == "H100-SXM"
    assert summary["step_time_s"] == pytest.approx(STEP_TIME_S)


def test_mlflow_reads_the_file_store(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow = library("mlflow")

    export(runs, "mlflow", tmp_path / "ml")
    export(runs, "mlflow", tmp_path / "ml")

    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "ml").as_uri())
    experiment = client.get_experiment_by_name("paceline")
    first, second = client.search_runs([experiment.experiment_id])
    assert first.info.run_name == second.info.run_name
    assert first.info.status == "FINISHED" and first.data.params["device"] == "H100-SXM"
    assert first.data.metrics["step_time_s"] == pytest.approx(STEP_TIME_S)
    history = client.get_metric_history(first.info.run_id, "step.step_time_s")
    assert [point.step for point in history] == list(range(1, NUM_STEPS + 1))


def test_prometheus_reads_the_figures_of_a_run(runs: Path, tmp_path: Path) -> None:
    export(runs, "openmetrics", tmp_path / "run.prom")

    read = samples((tmp_path / "run.prom").read_text())

    ((labels, value),) = read["paceline_run_step_time_s"]
    assert value == pytest.approx(STEP_TIME_S)
    assert labels["device"] == "H100-SXM" and labels["recipe"] == "llama31-8b"
    assert read["paceline_run_info"][0][0]["status"] == "ok"


def test_prometheus_reads_the_state_of_a_watched_run(tmp_path: Path) -> None:
    path = tmp_path / "watch.prom"
    write_parts(tmp_path / "runs", "recorded")

    done = paceline(
        "runs", "watch", "recorded", "--once", "--prometheus", path, runs=tmp_path / "runs"
    )

    assert done.returncode == 0, done.stderr
    read = samples(path.read_text())
    assert read["paceline_watch_running"][0][1] == 0


def test_labels_with_special_characters_survive_and_unknown_values_are_omitted() -> None:
    awkward = 'a"b\\c\nd'
    gauges = [
        Gauge("x", 1.5, "Text\nof two lines.", {"name": awkward, "empty": None}),
        Gauge("x", float("nan"), "", {"name": "unknown"}),
        Gauge("y", None, "Unknown.", {}),
    ]

    assert samples(openmetrics_text(gauges)) == {"paceline_x": [({"name": awkward}, 1.5)]}


def test_the_state_of_a_running_training_is_exported() -> None:
    values: dict[str, Any] = dict.fromkeys(WatchState.model_fields)
    values |= {"run": "r", "status": "running", "n": 0, "usual_n": 0, "ranks": ()}
    values |= {"schema_version": 1, "step": 7, "mfu": 0.5, "eta_s": 90.0}

    read = samples(watch_metrics(WatchState.model_validate(values)))

    assert read == {
        f"paceline_watch_{name}": [({"run": "r"}, value)]
        for name, value in {"running": 1, "step": 7, "mfu": 0.5, "eta_s": 90}.items()
    }


def test_the_dashboard_shows_only_exported_metrics(runs: Path, tmp_path: Path) -> None:
    dashboard = json.loads((ROOT / "docs/examples/grafana.json").read_text())
    export(runs, "openmetrics", tmp_path / "run.prom")
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]

    run_metrics = samples((tmp_path / "run.prom").read_text()).keys()
    check_metrics = {f"paceline_check_{what}" for what in (*MEASURES, "host_drain")}
    watch_metrics = {f"paceline_watch_{name}" for name in WatchState.model_fields}
    assert queries
    assert set(queries) <= run_metrics | check_metrics | watch_metrics


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--to", "tensorboard"), "--out: is missing"),
        (("--to", "./model", "--out", "x"), "--to ./model: is not a format; allowed: tensorboard"),
        (("--to", "tensorbord", "--out", "x"), "did you mean 'tensorboard'?"),
        (("--to", "wandb", "--out", "x", "--merged"), "which are for --to huggingface"),
    ],
)
def test_a_format_and_its_path_have_an_option_each(
    runs: Path, options: tuple[str, ...], message: str
) -> None:
    done = paceline("runs", "export", "exported", *options, runs=runs)

    assert done.returncode == 1
    assert message in done.stderr


def test_a_path_of_the_wrong_kind_is_refused(runs: Path, tmp_path: Path) -> None:
    done = paceline(
        "runs", "export", "exported", "--to", "openmetrics", "--out", tmp_path, runs=runs
    )

    assert done.returncode == 1
    assert "is not a file" in done.stderr
