"""`paceline reproduce`: the steps of each study, what is repeated, and the figures next to it."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from paceline.cli import app, reproduce, reproduce_report
from paceline.core.errors import UserError
from paceline.engines import engine_requirements
from paceline.files.recipe import load_recipe, recipe_names
from paceline.files.references import find_rows
from paceline.files.staged import staged_names
from paceline.files.studies import Study, StudyPart, StudyStep, load_study, study_names
from paceline.mlperf.compare.published_scores import RESULTS
from tests.command import paceline
from tests.mlperf.samples import submission
from tests.mlperf.submissions import ten_runs
from tests.waiting import wait_until

STUDIES = ("bigscience", "lambda", "mlperf", "nvidia")
STUDY_BENCHMARKS = [
    *((name, None) for name in STUDIES),
    *(("mlperf", name) for name in ("llama2-70b-lora", "flux1")),
]
PARTS = [(*study, size) for study in STUDY_BENCHMARKS for size in ("full", "tiny")]


def parsed(words: list[str]) -> Any:
    """Parse a command line as the program does; returns the context of its last command."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("paceline", list(words), resilient_parsing=False)
    while hasattr(command, "resolve_command"):
        name, command, words = command.resolve_command(
            context, context._protected_args + context.args
        )
        context = command.make_context(name, words, parent=context)
    return context


def test_the_four_benchmarks_have_a_study():
    assert tuple(study_names()) == STUDIES
    for name in STUDIES:
        study = load_study(name)
        assert Path(study.guide).is_file()
        assert all(reference == RESULTS or find_rows(reference) for reference in study.references)


@pytest.mark.parametrize(("name", "benchmark", "size"), PARTS)
def test_every_step_is_a_command_that_could_be_typed(name: str, benchmark: str | None, size: str):
    part: StudyPart = getattr(load_study(name, benchmark), size)
    for step in part.steps:
        for words in step.commands:
            extra = reproduce._options(
                words, part, reproduce.LaunchOptions(None, None, None, ()), f"{name}-1", name
            )
            parsed([*words, *extra])
            recipes = [word for word in words if word in recipe_names()]
            if words[:3] == ["recipes", "engines", "install"]:
                assert engine_requirements(words[3]).requirements
                continue
            assert recipes or "--tiny" in words
            if staged := [word for word in words if "staged:" in word]:
                overrides = [change for change in staged if "=" in change]
                recipe = load_recipe(recipes[0], None, overrides)
                assert set(staged_names(recipe)) <= {asset.name for asset in recipe.assets}


@pytest.mark.parametrize(("name", "benchmark", "size"), PARTS)
def test_a_dry_run_lists_steps_sizes_and_what_is_done_by_hand(
    name: str, benchmark: str | None, size: str, tmp_path: Path
):
    words = ["--tiny"] if size == "tiny" else []
    words += ["--benchmark", benchmark] if benchmark else []
    environment = {"PACELINE_STAGE": str(tmp_path / "stage")}
    done = paceline(
        "reproduce", name, *words, "--dry-run", "--json", runs=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert not told["complete"] and told["figures"] == []
    assert [step["number"] for step in told["steps"]] == list(range(1, len(told["steps"]) + 1))
    assert all(step["command"].startswith("paceline ") for step in told["steps"])
    staging = [step for step in told["steps"] if " stage " in step["command"]]
    assert all("B" in step["size"] or "unknown size" in step["size"] for step in staging)
    assert bool(told["by_hand"]) == (size == "full")
    assert not (tmp_path / "stage").exists() and not (tmp_path / "reproduce").exists()


def test_licences_and_logins_are_listed(tmp_path: Path):
    done = paceline("reproduce", "nvidia", "--dry-run", env={"PACELINE_STAGE": str(tmp_path)})
    assert "https://huggingface.co/meta-llama/Meta-Llama-3-8B, and set HF_TOKEN." in done.stdout
    done = paceline("reproduce", "mlperf", "--dry-run", env={"PACELINE_STAGE": str(tmp_path)})
    assert "https://ngc.nvidia.com, and set the registry's login." in done.stdout


def test_hosts_cluster_and_settings_go_to_the_commands_that_launch(tmp_path: Path):
    options = ("--hosts", "a,b", "--cluster", "my.yaml", "--set", "steps=5", "--name", "again")
    done = paceline("reproduce", "lambda", *options, "--dry-run", "--json", runs=tmp_path)
    commands = [shlex.split(step["command"]) for step in json.loads(done.stdout)["steps"]]
    launched = [words for words in commands if words[1] == "scale"]
    assert launched
    for number, words in enumerate(commands, 1):
        expected = ["--hosts", "a,b", "--cluster", "my.yaml", "--set", "steps=5"]
        tail = [*expected, "--name", f"again-{number}", "--tag", "again"]
        assert (words[-len(tail) :] == tail) == (words in launched)


CHEAP = Study(
    title="Cheap",
    references=("lambda-1cc",),
    guide="docs/how-to/reproduce-lambda.md",
    full=StudyPart(
        steps=(
            StudyStep(about="first", command="recipes {size}", grid={"size": ("a", "b")}),
            StudyStep(about="second", command="run opt-350m-sft-tiny"),
        )
    ),
    tiny=StudyPart(steps=(StudyStep(about="only", command="recipes"),)),
)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, int]:
    """Exit codes of commands to start by their words, instead of starting them."""
    codes: dict[str, int] = Counter()

    def run(state: Any, root: Path, lock: Any) -> int:
        calls.append(state.command)
        return codes[state.command]

    calls: list[str] = []
    monkeypatch.setattr(reproduce, "load_study", lambda name, benchmark: CHEAP)
    monkeypatch.setattr(reproduce, "_run", run)
    monkeypatch.setenv("PACELINE_RUNS", str(tmp_path))
    codes["calls"] = calls  # type: ignore[assignment]
    return codes


def call(*words: str) -> Any:
    return CliRunner().invoke(app, ["reproduce", "lambda", "--json", *words])


def test_a_failed_step_stops_and_the_same_command_resumes(started: Any):
    run = "paceline run opt-350m-sft-tiny --tag reproduce-lambda"
    started["paceline recipes b"] = 2
    first = call()
    assert first.exit_code == 4
    assert "error: step 2 failed: paceline recipes b; the same command resumes" in first.stderr
    assert started["calls"] == ["paceline recipes a", "paceline recipes b"]

    started["paceline recipes b"] = 0
    started[run] = 3  # slower than the published figure, and finished
    second = call()
    assert second.exit_code == 0
    assert started["calls"][2:] == ["paceline recipes b", run]
    assert json.loads(second.stdout)["complete"]

    assert call().exit_code == 0 and len(started["calls"]) == 4
    assert call("--name", "again").exit_code == 0 and len(started["calls"]) == 7


def test_single_steps_can_be_run(started: Any):
    assert call("--steps", "2-3").exit_code == 4
    assert started["calls"][0] == "paceline recipes b" and len(started["calls"]) == 2
    for wrong in ("4", "x", "0", "1-", "3-1", "1-20000000"):
        assert isinstance(call("--steps", wrong).exception, UserError)


def test_a_step_is_a_process_of_its_own_with_the_runs_folder(tmp_path: Path):
    with reproduce._exclusive_lock(tmp_path / "reproduce" / "x.json") as lock:
        state = reproduce.StepState(1, "listing", ("runs", "list", "--json"), "")
        assert reproduce._run(state, tmp_path, lock) == 0
        missing = reproduce.StepState(1, "none", ("runs", "show", "nothing"), "")
        assert reproduce._run(missing, tmp_path, lock) == 1


def test_a_reproduction_runs_once_at_a_time(started: Any, tmp_path: Path):
    with reproduce._exclusive_lock(tmp_path / "reproduce" / "reproduce-lambda.json"):
        fault = call().exception
    assert isinstance(fault, UserError) and "another process" in str(fault)
    assert not started["calls"] and call("--name", "again").exit_code == 0


@pytest.mark.parametrize("name", ["../../x", "a/b", "", ".x"])
def test_a_name_stays_in_the_runs_folder(started: Any, name: str):
    assert isinstance(call("--name", name).exception, UserError) or name == ""


def test_nodes_that_the_steps_state_are_not_overridden():
    done = paceline("reproduce", "nvidia", "--nodes", "8", "--dry-run")
    assert done.returncode == 1 and "--nodes: has no effect" in done.stderr


def test_an_interrupt_of_the_parent_alone_ends_the_command(tmp_path: Path):
    """SIGTERM reaches only the parent, which passes it on and waits."""
    program = (
        "import sys; from pathlib import Path; from paceline.cli import reproduce as r;"
        "from paceline.core.interrupts import install_handlers; install_handlers();"
        "root = Path(sys.argv[1]);"
        "words = ('ab', 'sleep 60', 'sleep 60', '--metric', 'seconds');"
        "context = r._exclusive_lock(root / 'x.json'); lock = context.__enter__();"
        "r._run(r.StepState(1, 'slow', words, ''), root, lock)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    child = wait_until(lambda: children(process.pid), "the command")[0]
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=60)
    assert not Path(f"/proc/{child}").exists()


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def test_an_unknown_benchmark_is_refused():
    done = paceline("reproduce", "lamda", "--dry-run")
    assert done.returncode == 1 and "did you mean 'lambda'?" in done.stderr
    with pytest.raises(UserError, match="did you mean 'flux1'"):
        load_study("mlperf", "flux")
    with pytest.raises(UserError, match="only studies of several benchmarks"):
        load_study("lambda", "flux1")


def test_each_benchmark_of_mlperf_trains_its_own_model(tmp_path: Path):
    words = ("reproduce", "mlperf", "--benchmark", "llama2-70b-lora", "--dry-run", "--json")
    told = json.loads(paceline(*words, runs=tmp_path).stdout)
    assert told["name"] == "reproduce-mlperf-llama2-70b-lora"
    last = shlex.split(told["steps"][-1]["command"])
    assert last[1:4] == ["mlperf", "run", "llama2-70b-lora"]
    assert "engine_settings.model=staged:llama2-70b-nemo" in last
    default = load_study("mlperf")
    assert default == load_study("mlperf", "llama31-8b")
    assert default.title == "MLPerf Training 5.1, Llama 3.1 8B with Lambda's published scripts"


def test_measured_runs_are_next_to_published_rows(tmp_path: Path):
    """A run of two seconds with the tag of the reproduction is enough for the table."""
    done = paceline(
        *("run", "opt-350m-sft-tiny", "--steps", 24, "--devices", 1, "--no-probe"),
        *("--set", "model.hidden_size=64", "--set", "model.ffn_size=64"),
        *("--set", "training.seq_len=32", "--tag", "reproduce-lambda-tiny"),
        runs=tmp_path,
    )
    assert done.returncode in (0, 3), done.stderr
    record = tmp_path / "reproduce/reproduce-lambda-tiny.json"
    record.parent.mkdir()
    listed = json.loads(
        paceline("reproduce", "lambda", "--tiny", "--dry-run", "--json", runs=tmp_path).stdout
    )
    commands = [step["command"] for step in listed["steps"]]
    record.write_text(json.dumps({"study": "lambda", "finished": commands}))
    shown = paceline("reproduce", "lambda", "--tiny", "--json", runs=tmp_path)
    assert shown.returncode == 0, shown.stderr
    (figure,) = json.loads(shown.stdout)["figures"]
    assert figure["metric"] == "samples_per_s" and figure["measured"] > 0
    assert (figure["published"], figure["reference"]) == (119.0, "opt-350m-1")
    assert figure["ratio"] is None  # a tiny model is shown, not compared


def test_a_score_is_compared_only_with_as_many_of_the_same_accelerators(tmp_path: Path):
    trials = ten_runs(tmp_path / "runs")
    (row,) = reproduce_report._scores(trials, tiny=False)
    assert row["measured"] == pytest.approx(10.1875) and row["n"] == 10
    # The logs do not state the accelerators, so that no published system is the same.
    assert row["ratio"] is None and "accelerator" in row["difference"]
    assert "unofficial" in row["label"].lower()

    one = submission(tmp_path / "one", [12.5])
    (row,) = reproduce_report._scores(one, tiny=True)
    assert (row["measured"], row["metric"]) == (12.5, "median minutes of trials")
    assert row["published"] > 0 and row["ratio"] is None and row["difference"] is None
