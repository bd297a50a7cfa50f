"""Defaults in paceline.toml: where the file is found, what takes precedence, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.files.run_folder import runs_root
from paceline.files.user_file import user_file
from tests.command import paceline

LAB = (Path(__file__).parents[2] / "docs/examples/lab.yaml").resolve()


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.delenv("PACELINE_RUNS", raising=False)
    (tmp_path / "settings/paceline").mkdir(parents=True)


def test_without_a_file_there_are_no_defaults() -> None:
    assert user_file() is None
    assert runs_root(None) == Path("runs")


def test_the_working_directory_comes_before_the_settings_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "settings/paceline/paceline.toml").write_text('gpu = "B200"\n')
    assert (found := user_file()) is not None and found.gpu == "B200"

    (tmp_path / "paceline.toml").write_text('gpu = "H200"\n')
    assert (found := user_file()) is not None and found.gpu == "H200"


def test_the_gpu_and_the_price_are_used_unless_options_say_otherwise(tmp_path: Path) -> None:
    (tmp_path / "paceline.toml").write_text('gpu = "H200"\nprice = "$2.5"\n')

    plain = paceline("estimate", "llama31-8b", "--gpus", "8").stdout
    chosen = paceline(
        "estimate", "llama31-8b", "--gpus", "8", "--gpu", "H100", "--price", "€4"
    ).stdout

    assert "8 x H200-SXM" in plain and "$" in plain
    assert "8 x H100-SXM" in chosen and "€" in chosen and "$" not in chosen


def test_the_cluster_is_used_unless_options_describe_other_hardware(tmp_path: Path) -> None:
    (tmp_path / "lab.yaml").write_text(LAB.read_text())
    (tmp_path / "paceline.toml").write_text('cluster = "lab.yaml"\ngpu = "B200"\n')

    assert "32 x H100-SXM" in paceline("estimate", "llama31-8b").stdout
    assert "8 x H200" in paceline("estimate", "llama31-8b", "--gpus", "8", "--gpu", "H200").stdout


def test_a_default_is_no_fact_about_a_log(tmp_path: Path) -> None:
    log = LAB.parent / "train.log"
    without = paceline("parse", log, "--json").stdout

    (tmp_path / "paceline.toml").write_text('gpu = "B200"\ncluster = "lab.yaml"\n')

    assert paceline("parse", log, "--json").stdout == without


def test_the_folder_of_runs_is_relative_to_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "settings/paceline/paceline.toml").write_text('runs_dir = "mine"\n')

    assert runs_root(None) == tmp_path / "settings/paceline/mine"
    monkeypatch.setenv("PACELINE_RUNS", "elsewhere")
    assert runs_root(None) == Path("elsewhere")
    assert runs_root(Path("option")) == Path("option")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpus = 8\n", "unknown key 'gpus'; allowed: cluster, gpu, price, runs_dir; did you mean"),
        ("gpu = 100\n", "paceline.toml: gpu: 100 is not a device"),
        ("price = true\n", "paceline.toml: price: True is not money"),
        ('runs_dir = ""\n', "paceline.toml: runs_dir: '' is not the path of a folder"),
        ("gpu = H100\n", "is not TOML"),
    ],
)
def test_a_wrong_file_is_one_clear_error(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "paceline.toml").write_text(text)

    with pytest.raises(UserError) as caught:
        user_file()

    assert message in str(caught.value)


def test_all_errors_are_shown_at_once(tmp_path: Path) -> None:
    (tmp_path / "paceline.toml").write_text("prise = 3\ngpu = 4\n")

    done = paceline("estimate", "llama31-8b", "--gpus", "8")

    assert done.returncode == 1
    assert "'prise'" in done.stderr and "gpu: 4" in done.stderr


def test_a_wrong_price_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "paceline.toml").write_text('price = "cheap"\ngpu = "H100"\n')

    done = paceline("estimate", "llama31-8b", "--gpus", "8")

    assert done.returncode == 1
    assert "paceline.toml: price: 'cheap' is not a quantity" in done.stderr
