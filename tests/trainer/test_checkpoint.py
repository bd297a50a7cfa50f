"""What a checkpoint keeps, which ones are refused, and what an interrupted write leaves behind.

Ranks that save together are connected as far as they exchange something.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from paceline.trainer import checkpoint
from paceline.trainer.checkpoint import find_checkpoint
from paceline.trainer.config import ConfigError, LossScaleConfig, parse_config
from paceline.trainer.measure.clock import HostClock, StepClock, background, watch_waits
from paceline.trainer.measure.event_log import EventLog
from paceline.trainer.measure.outcome import CheckpointError, outcome
from paceline.trainer.parallel.mesh import Mesh, join_world
from paceline.trainer.replica.assembly import make_replica
from paceline.trainer.trainer import Trainer
from tests import forks
from tests.trainer.example import lines, log, places, settings, start, steps
from tests.trainer.example import train as run

ENDLESS = 10**6


def kept(every: int | None = None, resume: Path | None = None, asynchronous: bool = True) -> Any:
    return {"every": every, "resume": resume and str(resume), "asynchronous": asynchronous}


def trainer(
    folder: Path, raw: dict[str, Any], num_windows: int | None = None
) -> tuple[Trainer, int]:
    """A single process's trainer with its checkpoint loaded, and the steps it has behind it."""
    config, world, clock = parse_config(raw), join_world("cpu"), StepClock(HostClock())
    replica = make_replica(config, world, Mesh(), clock)
    made = Trainer(config, replica, world, clock, EventLog(str(folder / "steps"), 0))
    return made, made.restore(num_windows, nullcontext)


def batches(raw: dict[str, Any]) -> Iterator[Any]:
    from paceline.trainer.data.batches import Loader, Sampler
    from paceline.trainer.data.corpus import load_corpus

    config = parse_config(raw)
    corpus = load_corpus(config)
    sampler = Sampler(corpus.num_windows, config.training.global_batch, 1, config.training.seed)
    loader = Loader(corpus, sampler, config, Mesh(), pin=False)
    try:
        while True:
            yield loader.next()[0]
    finally:
        loader.close()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a checkpoint after step 2 of 4."""
    monkeypatch.chdir(tmp_path)
    raw = settings(steps=4, source="synthetic", checkpoint=kept(every=2))
    made, _ = trainer(tmp_path, raw)
    made.step(next(batches(raw)))
    made._save(2, torch.ones(2), skipped=False)
    made.finish_checkpoint()
    return tmp_path / "checkpoints" / "step-000002"


def refusal(folder: Path, resume: Path, **changes: Any) -> str:
    """Why a training cannot resume from a checkpoint."""
    raw = settings(**{"steps": 4, "source": "synthetic", **changes}, checkpoint=kept(resume=resume))
    with pytest.raises(ConfigError) as error:
        trainer(folder, raw)
    assert "\n" not in str(error.value)
    return str(error.value).removeprefix(f"checkpoint.resume {resume}: ")


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """What a disk without room does to writers: this process can write no longer files."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_run_saves_every_n_steps_and_at_the_end_and_goes_on_alone(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    raw = settings(2, 5, source="stdlib", checkpoint=kept(2))
    assert run(first, raw) == 0, log(first)

    folder = first / "checkpoints"
    assert names(folder) == ["latest", "step-000004", "step-000005"]
    assert (folder / "latest").read_text() == "step-000005\n"
    for rank in range(2):
        waited = {row["step"]: row.get("checkpoint_s") for row in steps(first, rank)}
        assert [step for step, s in waited.items() if s is not None] == [2, 4, 5]
        for row in steps(first, rank):
            parts = row["busy_time_s"], row["comm_wait_s"], row.get("checkpoint_s", 0.0)
            assert sum(parts) == pytest.approx(row["step_time_s"])

    raw = settings(1, 5, source="stdlib", global_batch=8, num_microbatches=2)
    raw["checkpoint"] = kept(resume=folder / "step-000004")
    assert run(second, raw) == 0, log(second)
    assert lines(second)[0]["first_step"] == 5
    (last,) = steps(second)
    assert last["step"] == 5
    whole = [steps(first, rank)[-1]["loss"] for rank in range(2)]
    assert last["loss"] == pytest.approx(sum(whole) / 2, rel=1e-5)
    assert not (second / "checkpoints").exists()


def test_loading_makes_the_state_that_adamw_would_make(saved: Path, tmp_path: Path) -> None:
    raw = settings(steps=4, source="synthetic", checkpoint=kept(resume=saved))
    loaded, done = trainer(tmp_path, raw)
    fresh, _ = trainer(tmp_path, settings(steps=4, source="synthetic"))
    fresh.step(next(batches(raw)))

    assert done == 2
    pairs = zip(loaded.replica.named_parameters(), fresh.replica.named_parameters(), strict=True)
    for (_, mine), (_, theirs) in pairs:
        one, other = loaded.optimizer.state[mine], fresh.optimizer.state[theirs]
        assert list(one) == list(other)
        for key, value in other.items():
            assert torch.equal(one[key], value) and one[key].dtype == value.dtype
        assert torch.equal(mine, theirs)


def test_the_loss_scale_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    raw = settings(steps=4, source="synthetic", dtype="fp16", checkpoint=kept(every=1))
    made, _ = trainer(tmp_path, raw)
    assert made.scaler is not None
    made.scaler.accept(float("inf"))
    made.scaler.accept(1.0)
    made.step(next(batches(raw)))
    made._save(1, torch.ones(2), skipped=False)
    made.finish_checkpoint()
    wanted = made.scaler.state()
    raw["checkpoint"] = kept(resume=tmp_path)
    loaded, _ = trainer(tmp_path, raw)

    assert loaded.scaler is not None and loaded.scaler.state() == wanted
    assert wanted["scale"] == LossScaleConfig().initial / 2


def test_weights_that_are_lost_are_not_saved(saved: Path, tmp_path: Path) -> None:
    raw = settings(steps=4, source="synthetic", checkpoint=kept(every=1))
    made, _ = trainer(tmp_path, raw)
    made._save(3, torch.tensor([1.0, float("nan")]), skipped=False)
    made.finish_checkpoint()

    assert find_checkpoint(tmp_path) == saved


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"ffn_size": 96},
            "model.ffn_size is 64 in the checkpoint, but 96 in this run; use the same value",
        ),
        ({"seed": 5}, "training.seed is 1234 in the checkpoint, but 5"),
        ({"global_batch": 8}, "training.global_batch is 4 in the checkpoint, but 8"),
        ({"seq_len": 16}, "training.seq_len is 32 in the checkpoint, but 16"),
        ({"source": "stdlib"}, "data.source is synthetic in the checkpoint, but stdlib"),
        ({"steps": 2}, "was saved after step 2, but training.steps 2 includes those steps"),
    ],
)
def test_another_training_is_refused(
    saved: Path, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    assert refusal(tmp_path, saved, **changes).startswith(reason)


def test_another_text_is_refused_and_more_of_the_same_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made, _ = trainer(tmp_path, settings(steps=4, checkpoint=kept(every=2)), num_windows=100)
    made._save(2, torch.ones(2), skipped=False)
    made.finish_checkpoint()

    again = kept(resume=tmp_path)
    assert trainer(tmp_path, settings(steps=8, checkpoint=again), num_windows=200)[1] == 2
    with pytest.raises(
        ConfigError, match=r"data\.windows is 100 in the checkpoint, but 99 in this run"
    ):
        trainer(tmp_path, settings(steps=4, checkpoint=again), num_windows=99)


def test_another_padding_of_the_vocabulary_is_refused_with_its_remedy(
    saved: Path, tmp_path: Path
) -> None:
    raw = settings(steps=4, source="synthetic", checkpoint=kept(resume=saved))
    raw["model"]["padded_vocab"] = 384
    for count in ("expected_parameters", "expected_trainable"):
        raw[count] += 2 * 64 * 32
    with pytest.raises(
        ConfigError, match=r"padded_vocab is 320 in the checkpoint, but 384 in this run; .*multiple"
    ):
        trainer(tmp_path, raw)


def test_what_is_no_checkpoint_is_refused(saved: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()

    assert "is missing; set it to a run's folder" in refusal(tmp_path, tmp_path / "nowhere")
    assert "has no complete checkpoint" in refusal(tmp_path, empty)
    shutil.copytree(saved, tmp_path / "half", ignore=shutil.ignore_patterns("state.json"))
    assert "has no complete checkpoint" in refusal(tmp_path, tmp_path / "half")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 2}', '{"schema": 1, "step": "a"}'])
def test_a_broken_state_file_is_refused(saved: Path, tmp_path: Path, text: str) -> None:
    (saved / "state.json").write_text(text)

    assert "state.json is corrupt or has another version" in refusal(tmp_path, saved)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("harm", ["gone", "cut", "empty"])
def test_a_broken_data_file_is_refused(saved: Path, tmp_path: Path, name: str, harm: str) -> None:
    file = saved / name
    whole = file.read_bytes()
    file.unlink()
    if harm != "gone":
        file.write_bytes(whole[: len(whole) // 2] if harm == "cut" else b"")

    assert re.match("is corrupt: rank 0: .+; resume from another", refusal(tmp_path, saved))


def test_a_marker_whose_checkpoint_is_gone_is_refused(saved: Path, tmp_path: Path) -> None:
    shutil.rmtree(saved)

    assert "No such file or directory" in refusal(tmp_path, tmp_path)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_disk_without_room_fails_in_one_sentence_and_keeps_the_one_before(
    saved: Path, tmp_path: Path, asynchronous: bool
) -> None:
    raw = settings(steps=4, source="synthetic", checkpoint=kept(1, asynchronous=asynchronous))
    made, _ = trainer(tmp_path, raw)
    made.step(next(batches(raw)))
    with files_of_at_most(4096), pytest.raises(CheckpointError) as error:
        made._save(3, torch.ones(2), skipped=False)
        made.finish_checkpoint()

    status, reason, _ = outcome(error.value)
    assert status == "failed" and "\n" not in reason
    assert "step-000003: cannot be written: rank 0: " in reason and "File too large" in reason
    assert names(saved.parent) == ["latest", "step-000002"]
    assert find_checkpoint(tmp_path) == saved


def test_a_checkpoint_is_copied_before_training_goes_on(saved: Path, tmp_path: Path) -> None:
    raw = settings(steps=4, source="synthetic", checkpoint=kept(every=1))
    made, _ = trainer(tmp_path, raw)
    made._save(3, torch.ones(2), skipped=False)
    before = {name: p.detach().clone() for name, p in made.replica.named_parameters()}
    with torch.no_grad():
        for _, parameter in made.replica.named_parameters():
            parameter.fill_(7)
    made.finish_checkpoint()
    raw["checkpoint"] = kept(resume=tmp_path)
    loaded, _ = trainer(tmp_path, raw)

    assert all(torch.equal(p, before[name]) for name, p in loaded.replica.named_parameters())


def test_a_killed_training_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    raw = settings(1, ENDLESS, source="synthetic", checkpoint=kept(every=1))
    process = start(tmp_path, raw)
    while len(list(tmp_path.glob("checkpoints/step-*"))) < 2:
        assert process.poll() is None, log(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.communicate()

    raw["checkpoint"] = kept(resume=tmp_path)
    _, done = trainer(tmp_path / "again", raw)
    whole = [path.name for path in tmp_path.glob("checkpoints/step-*")]
    assert f"step-{done:06d}" in whole
    raw["checkpoint"] = kept(resume=tmp_path / "checkpoints" / min(whole))
    assert trainer(tmp_path / "again", raw)[1] > 0


def test_what_a_killed_training_left_is_removed_by_the_next_write(
    saved: Path, tmp_path: Path
) -> None:
    left = saved.parent / ".step-000003"
    shutil.copytree(saved, left)
    made, _ = trainer(tmp_path, settings(steps=4, source="synthetic", checkpoint=kept(every=1)))
    made._save(4, torch.ones(2), skipped=False)
    made._save(2, torch.ones(2), skipped=False)
    made.finish_checkpoint()

    assert names(saved.parent) == ["latest", "step-000002", "step-000004"]
    assert (saved.parent / "latest").read_text() == "step-000002\n"


def test_the_last_written_two_are_kept(saved: Path, tmp_path: Path) -> None:
    made, _ = trainer(tmp_path, settings(steps=9, source="synthetic", checkpoint=kept(every=1)))
    for step in (7, 3, 4):
        made._save(step, torch.ones(2), skipped=False)
    made.finish_checkpoint()

    assert names(saved.parent) == ["latest", "step-000003", "step-000004"]
    assert checkpoint.MAX_CHECKPOINTS == 2


class Slow:
    """In the place of a collective that goes on."""

    def wait(self) -> Tensor:
        return torch.ones(())


def test_the_writers_waits_are_none_of_the_trainings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist.Work, "wait", Slow.wait)
    clock = StepClock(HostClock())
    undo = watch_waits(clock)
    counted: list[int] = []

    def wait(writes: bool) -> None:
        background.active = writes
        clock.start()
        dist.Work.wait(Slow())  # type: ignore[arg-type]
        counted.append(len(clock.lap().waits))

    try:
        for writes in (False, True):
            thread = threading.Thread(target=wait, args=(writes,))
            thread.start()
            thread.join()
        wait(writes=False)
    finally:
        undo()

    assert counted == [1, 0, 1]


def test_checkpoints_cost_a_training_without_them_nothing(tmp_path: Path) -> None:
    made, done = trainer(tmp_path, settings(steps=4, source="synthetic"))

    assert done == 0 and made.checkpoints is None
    assert made._save(1, torch.ones(2), skipped=False) is None


def test_later_saves_send_no_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    raw = settings(steps=4, source="synthetic", checkpoint=kept(every=1))
    made, _ = trainer(tmp_path, raw)
    sent: list[bool] = []
    create = DefaultSavePlanner.create_local_plan

    def watched(self: DefaultSavePlanner) -> SavePlan:
        plan = create(self)
        sent.append(plan.usable)
        return plan

    monkeypatch.setattr(DefaultSavePlanner, "create_local_plan", watched)
    for step in (1, 2, 3):
        made._save(step, torch.ones(2), skipped=False)
    made.finish_checkpoint()

    assert sent[1:] == [False, False]
    folder = tmp_path / "checkpoints"
    assert names(folder) == ["latest", "step-000002", "step-000003"]
    loaded, done = trainer(tmp_path, {**raw, "checkpoint": kept(resume=folder)})
    pairs = zip(loaded.replica.named_parameters(), made.replica.named_parameters(), strict=True)
    assert done == 3 and all(torch.equal(mine, theirs) for (_, mine), (_, theirs) in pairs)


def test_the_checkpoint_group_connects_ranks_that_exchange_something_alone(tmp_path: Path) -> None:
    """Each rank with the first and a few more, not all with all: its plans go by a tree."""
    ranks = 8
    envs = [{**os.environ, **place} for place in places(ranks)]
    words = ["tests.trainer.group_driver", str(tmp_path)]
    code = forks.run("tests.trainer.example", words, envs, tmp_path, [os.devnull] * 3, 240)

    assert code == 0
    counts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    made = [after - before for before, after, _ in counts]
    used = [after - before for before, _, after in counts]
    assert max(made) <= 2, "all sockets at once would be 7"
    assert sum(used) < 0.8 * ranks * (ranks - 1)
