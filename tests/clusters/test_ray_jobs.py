"""Jobs submitted to the dashboard of a real Ray cluster of two nodes on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from paceline.engines import engine
from paceline.files.run_folder import STEPS_FOLDER, read_record
from paceline.machines import ray
from tests.clusters.bed.needs import skip_or_fail
from tests.clusters.ray_bed import TOKEN, RayBed, ray_bed
from tests.clusters.test_ray import FOREVER, NODES, finish, rank_pids, train
from tests.runs.test_flow import only_run, result_of
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def bed() -> Iterator[RayBed]:
    """Two nodes and a dashboard that demands a token, which the user has set."""
    missing = None if find_spec("aiohttp_cors") else "not installed: ray[default]"
    skip_or_fail(missing)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in TOKEN.items():
            patch.setenv(name, value)
        with ray_bed(2, {}, dashboard=True) as cluster:
            yield cluster


def settings(bed: RayBed) -> str:
    return f'{{address: "{bed.dashboard}"}}'


def test_a_submitted_job_ends_well_and_sends_its_files_back(bed: RayBed, tmp_path: Path) -> None:
    hosts = f"[{NODES[1]}, {NODES[0]}]"
    process = train(bed, tmp_path, "--set", "steps=20", ray=settings(bed), hosts=hosts)
    errors = finish(process, 240)
    assert process.returncode == 0, errors
    result, folder = result_of(tmp_path), only_run(tmp_path)
    steps = [p.read_text().count('{"event": "step"') for p in (folder / STEPS_FOLDER).iterdir()]
    assert result["status"] == "ok" and steps == [20, 20]
    assert [rank["host"] for rank in result["ranks"]] == [NODES[1], NODES[0]]
    assert not list(folder.rglob("driver_program.py"))
    token = TOKEN["RAY_AUTH_TOKEN"].encode()
    assert token.decode() not in errors
    assert not [path for path in folder.rglob("*") if path.is_file() and token in path.read_bytes()]


def test_a_job_without_its_controller_is_followed_and_ended(bed: RayBed, tmp_path: Path) -> None:
    process = train(bed, tmp_path, *FOREVER, ray=settings(bed))
    try:
        wait_until(lambda: rank_pids(tmp_path) or process.poll() is not None, "steps", 180)
        assert process.poll() is None, process.communicate()
        pids = rank_pids(tmp_path)
    finally:
        process.kill()
        process.communicate()
    folder = only_run(tmp_path)
    spec = read_record(folder).spec
    assert spec is not None and all(map(psutil.pid_exists, pids))
    handle = ray.attach(engine(spec.engine).job(spec, spec.recipe), folder)
    assert handle is not None
    wait_until(lambda: handle.poll() is None and not handle.waiting, "the nodes", 60)
    assert handle.phase.startswith("running on ") and ray.ended_code(folder) is None
    assert ray.cancel_orphan(folder) and ray.cancel_orphan(folder) is None
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), "the end of the ranks", 90)


@pytest.mark.parametrize("token", ["", "b" * 40], ids=["none", "wrong"])
def test_a_user_without_the_token_is_told_which_variable_to_set(
    bed: RayBed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    process = train(bed, tmp_path, ray=settings(bed), hosts=f"[{NODES[0]}, {NODES[1]}]")
    errors = finish(process, 240)
    assert process.returncode == 2 and "set RAY_AUTH_TOKEN" in errors, errors


@pytest.mark.nightly
def test_a_request_that_ray_cannot_serve_is_refused(bed: RayBed, tmp_path: Path) -> None:
    process = train(bed, tmp_path, ray=settings(bed), hosts="[127.0.0.2, 127.0.0.99]")
    errors = finish(process, 240)
    assert process.returncode == 2 and "127.0.0.99" in errors, errors


def test_a_dashboard_that_does_not_answer_is_an_error(bed: RayBed, tmp_path: Path) -> None:
    process = train(bed, tmp_path, ray='{address: "http://127.0.0.1:1"}', hosts="[127.0.0.2, b]")
    errors = finish(process, 240)
    assert process.returncode == 2 and "dashboard does not answer" in errors, errors
