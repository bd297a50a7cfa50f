"""`paceline check` measures this machine, keeps what it found, and judges the next check by it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli.check import check
from paceline.cli.options import with_option_groups
from paceline.core.errors import UserError
from paceline.scaling.check import preflight
from paceline.scaling.check.fitness import CheckReport, Reading

app = typer.Typer()
app.command("check")(with_option_groups(check))


def run(*arguments: str) -> Any:
    settings = ("--fast", "--time-limit", "180", "--device", "cpu", "--json")
    result = CliRunner().invoke(app, [*arguments, *settings])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs with one check of this machine."""
    root = tmp_path_factory.mktemp("runs of mine")
    result = run("--runs-dir", str(root))
    (root / "printed.json").write_text(result.stdout)
    return root


def report_of(root: Path) -> CheckReport:
    (file,) = (root / "checks").glob("*/check.json")
    return CheckReport.model_validate_json(file.read_text())


def test_one_machine_is_measured_and_not_judged(runs: Path):
    printed = json.loads((runs / "printed.json").read_text())
    (host,) = printed["hosts"]
    assert set(host["figures"]) == {"gemm", "memory", "collective"}
    assert all(
        figure["by"] == "nothing" and figure["n"] >= 1 for figure in host["figures"].values()
    )
    assert printed["measures"]["gemm"]["smallest_fault"] is None
    assert "too few to judge" in printed["sentences"][1]
    assert report_of(runs).hosts[0].facts["num_cores"] >= 1


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let repeats of a rate agree: on a busy machine they differ too much for any verdict."""
    readings = preflight.host_readings

    def steady_readings(*arguments: Any) -> list[Reading]:
        return [
            replace(reading, rates={what: [median(v)] * 3 for what, v in reading.rates.items()})
            for reading in readings(*arguments)
        ]

    monkeypatch.setattr(preflight, "host_readings", steady_readings)


def earlier(root: Path, factor: float, number: int, like: CheckReport) -> None:
    """Checks of this machine in which it was `factor` times as fast."""
    (host,) = like.hosts
    figures = {
        what: figure.model_copy(update={"value": factor * figure.value * (1 + 0.01 * number)})
        for what, figure in host.figures.items()
    }
    host = host.model_copy(update={"figures": figures, "verdict": "fit"})
    changed = like.model_copy(update={"hosts": (host,)})
    (root / "checks" / f"old-{number}").mkdir(parents=True)
    (root / "checks" / f"old-{number}" / "check.json").write_text(changed.model_dump_json())


@pytest.mark.usefixtures("steady")
def test_a_machine_far_below_its_own_past_is_to_be_drained(runs: Path, tmp_path: Path):
    for number in range(3):
        earlier(tmp_path, 100.0, number, report_of(runs))
    result = run("--runs-dir", str(tmp_path), "--fail-on-findings", "--max-parallel", "1")
    document = json.loads(result.stdout)
    assert result.exit_code == 3 and len(document["drain"]) == 1, document["hosts"]
    assert "below its own history" in document["hosts"][0]["evidence"][0]
    assert Path(document["folder"], "check.json").is_file()


def test_a_check_of_another_kind_is_no_measure(runs: Path, tmp_path: Path):
    other = report_of(runs).model_copy(update={"identity": {"device": "H100"}})
    (tmp_path / "check.json").write_text(other.model_dump_json())
    with pytest.raises(UserError, match="is a different kind of check: device H100"):
        run("--runs-dir", str(tmp_path / "runs"), "--against", str(tmp_path))


@pytest.mark.skipif(not shutil.which("ssh"), reason="OpenSSH's client is absent")
def test_hosts_of_which_none_answers_are_not_drained(tmp_path: Path):
    config, drain = tmp_path / "config", tmp_path / "drain.txt"
    config.write_text("Host *\n HostName 127.0.0.1\n Port 1\n")
    hosts = ("--hosts", "n[1-2]", "--ssh-config", str(config), "--runs-dir", str(tmp_path))
    drain.write_text("n9\n")
    result = run(*hosts, "--drain-file", str(drain), "--fail-on-findings")
    document = json.loads(result.stdout)
    assert result.exit_code == 4 and document["drain"] == [] and document["measures"] == {}
    assert {host["verdict"] for host in document["hosts"]} == {"not reached"}
    assert document["hosts"][0]["evidence"] == ["no ssh server is listening"]
    assert "this machine, its network or name resolution" in document["drain_withheld"]
    assert drain.read_text() == "n9\n" and "drain.txt is not written" in result.stderr


def test_a_check_of_this_machine_that_ran_out_of_time_drains_nothing(tmp_path: Path):
    drain = tmp_path / "drain.txt"
    arguments = ["--device=cpu", "--json", "--time-limit=1", f"--drain-file={drain}"]
    result = CliRunner().invoke(app, [*arguments, f"--runs-dir={tmp_path}"])
    document = json.loads(result.stdout)
    assert result.exit_code == 4 and document["drain"] == [] and not drain.exists()
    assert "raise --time-limit" in document["drain_withheld"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--hosts", "a;b"), "is not a host name"),
        (("--launcher", "ssh"), "needs hosts"),
        (("--against", "/nowhere/check.json"), "/nowhere"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_measured(
    arguments: tuple[str, ...], message: str, tmp_path: Path
):
    with pytest.raises(UserError, match=message):
        run("--runs-dir", str(tmp_path), *arguments)
    assert not list(tmp_path.glob("checks/*/check/*"))


def test_a_quick_check_measures_each_device_by_itself(tmp_path: Path):
    drain = tmp_path / "drain.txt"
    result = CliRunner().invoke(
        app,
        [
            "--devices-only",
            "--device=cpu",
            "--json",
            f"--drain-file={drain}",
            f"--runs-dir={tmp_path}",
        ],
    )
    assert result.exit_code == 0, result.output
    (host,) = json.loads(result.stdout)["hosts"]
    assert set(host["figures"]) == {"gemm", "memory"} and host["verdict"] == "fit"
    assert drain.read_text() == ""


def test_a_quick_check_has_nothing_in_turn():
    with pytest.raises(UserError, match="cannot be combined with --fast or --max-parallel"):
        run("--devices-only")


@pytest.mark.usefixtures("steady")
def test_a_node_check_prints_one_line_and_ignores_the_job_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")  # as in a prolog, where no step can be started
    arguments = ["--node", "--device=cpu", "--time-limit=120", f"--runs-dir={tmp_path}"]

    result = CliRunner().invoke(app, arguments)

    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    assert ": fit: " in line and "gemm" in line and result.stderr == ""

    report = report_of(tmp_path)
    for number in range(3):
        earlier(tmp_path / "past", 100.0, number, report)
    slow = CliRunner().invoke(app, [*arguments[:-1], f"--runs-dir={tmp_path / 'past'}"])
    (line,) = slow.stdout.splitlines()
    assert slow.exit_code == 3 and "below its own history" in line


def test_a_node_check_that_cannot_finish_exits_with_4(tmp_path: Path):
    (tmp_path / "checks").write_text("in the way")
    tail = ["--node", "--device=cpu"]

    late = CliRunner().invoke(app, [*tail, "--time-limit=1", f"--runs-dir={tmp_path / 'new'}"])
    broken = CliRunner().invoke(app, [*tail, f"--runs-dir={tmp_path}"])

    for result in (late, broken):
        assert result.exit_code == 4, result.output
        (line,) = result.stdout.splitlines()
        assert "not finished: " in line


def test_a_node_check_takes_no_other_hosts(tmp_path: Path):
    with pytest.raises(UserError, match="checks this host alone"):
        run("--node", "--hosts", "n1", "--runs-dir", str(tmp_path))
