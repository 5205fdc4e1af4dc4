"""Checkpoints written in the background while training continues: publication order, failures and cleanup."""

import asyncio
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_journal import log_in, run_step

from rlfuse.cluster import host_memory, scratch
from rlfuse.config.schema import Config
from rlfuse.engines.trainer import rank_group, saving
from rlfuse.engines.trainer.liveness import WATCH
from rlfuse.engines.trainer.rank_group import check_written
from rlfuse.engines.trainer.saving import CheckpointWriter, StagedFiles
from rlfuse.engines.trainer.trainer_group import TrainerGroup
from rlfuse.engines.trainer.trainer_rank import TrainerRank
from rlfuse.errors import NotSaved, RlfuseError
from rlfuse.run import checkpointing
from rlfuse.run.checkpointing import Checkpointing
from rlfuse.run_folder import checkpoints
from rlfuse.samples import Reward

KIB = 1 << 10


class Rank:
    """Trainer rank that only saves checkpoints; it copies files once `disk` is set."""

    saves_in_background = True

    def __init__(self, monkeypatch):
        self.staged, self.disk, self.fails, self.other_fails = StagedFiles(), threading.Event(), False, None
        copy, make, self.folders = shutil.copyfile, scratch.make, []

        def recorded(prefix):
            folder, lock = make(prefix)
            self.folders.append(folder)
            return folder, lock

        def slow(source, target):
            assert self.disk.wait(20)
            if self.fails:
                raise OSError(28, "No space left on device")
            return copy(source, target)

        monkeypatch.setattr(saving.shutil, "copyfile", slow)
        monkeypatch.setattr(saving.scratch, "make", recorded)

    async def save(self, folder: Path, weights: bool):
        if weights:
            files = CheckpointWriter()
            with self.staged.folder(folder, KIB) as to:
                path = to / "actor" / "weights"
                files.write(path, lambda: (path.parent.mkdir(), path.write_bytes(bytes(KIB))))
            assert files.problem is None
            if self.other_fails:
                raise self.other_fails

    async def is_saving(self):
        return self.staged.is_copying()

    async def saved(self):
        check_written([self.staged.problem()])


@pytest.fixture
def rank(monkeypatch):
    monkeypatch.setattr(checkpointing, "PROMPT_S", 0.05)
    return Rank(monkeypatch)


def begin(folder, rank, total=4):
    log, alerts = log_in(folder, timeline_freq=0), []
    log.total_steps, log.loggers.alert = total, lambda step, alert: alerts.append((step, alert.text))
    config = Config()
    config.trainer.max_ckpt_to_keep = 2
    saver = Checkpointing(log, config, start=0, save=rank.save, writer=rank, state=lambda _: {}, first_bytes=KIB)
    return log, saver, alerts


async def step(log, saver, number):
    saver.remember(number)
    await saver.write(number)
    await run_step(log, number, [Reward(1.0)])
    await saver.publish_written()


def complete(folder):
    return [path.name for path in checkpoints.complete(folder)]


async def written(saver):
    for _ in range(400):
        await asyncio.sleep(0.02)
        await saver.publish_written()
        if saver._writing is None:
            return


async def test_training_continues_while_files_are_written(tmp_path, rank):
    log, saver, _ = begin(tmp_path, rank)
    await asyncio.wait_for(step(log, saver, 1), 10)
    assert complete(tmp_path) == [] and saver.step == 0, "its files are not written yet"
    (staged,) = rank.folders
    assert staged.is_dir()
    rank.disk.set()
    async with asyncio.timeout(10):
        while not complete(tmp_path):
            await asyncio.sleep(0.02)  # while the next step runs
    assert saver.step == 1 and not staged.exists()
    assert (tmp_path / "global_step_1/actor/weights").read_bytes() == bytes(KIB)
    assert {path.name for path in (tmp_path / "global_step_1").iterdir()} == {"actor", "run.json", "COMPLETE"}
    log.close()


async def test_the_next_checkpoint_and_the_end_of_the_run_wait_for_the_write(tmp_path, rank):
    log, saver, _ = begin(tmp_path, rank, total=3)
    await step(log, saver, 1)
    following = asyncio.ensure_future(step(log, saver, 2))
    await asyncio.sleep(0.2)
    assert not following.done()
    rank.disk.set()
    await asyncio.wait_for(following, 20)
    assert complete(tmp_path)[:1] == ["global_step_1"]
    await step(log, saver, 3)
    assert complete(tmp_path) == ["global_step_2", "global_step_3"]
    log.close()


async def test_a_kill_during_the_write_leaves_the_last_complete_checkpoint(tmp_path, rank):
    log, saver, _ = begin(tmp_path, rank)
    rank.disk.set()
    await step(log, saver, 1)
    await written(saver)
    rank.disk.clear()
    await step(log, saver, 2)
    assert checkpoints.find(tmp_path, "auto") == tmp_path / "global_step_1"
    assert (tmp_path / "global_step_2.partial").is_dir()
    rank.disk.set()
    await saver.settle()
    assert complete(tmp_path) == ["global_step_1", "global_step_2"]
    log.close()


async def test_an_error_in_a_later_step_does_not_lose_the_checkpoint(tmp_path, rank):
    log, saver, _ = begin(tmp_path, rank)

    async def steps():
        await step(log, saver, 1)
        saver.remember(2)
        asyncio.get_running_loop().call_later(0.2, rank.disk.set)
        raise RlfuseError("the second step")

    with pytest.raises(RlfuseError, match="the second step"):
        await saver.settle_after(steps())
    assert complete(tmp_path) == ["global_step_1"]
    log.close()


@pytest.mark.parametrize("error", [NotSaved("another rank could not write"), OSError("the tokenizer was not saved")])
async def test_no_file_is_written_after_another_rank_has_failed(tmp_path, rank, error):
    log, saver, alerts = begin(tmp_path, rank)
    rank.other_fails = error
    asyncio.get_running_loop().call_later(0.2, rank.disk.set)
    await step(log, saver, 1)
    assert str(error) in alerts[0][1] and not rank.staged.is_copying()
    assert not [*tmp_path.glob("global_step_*")] and not rank.folders[0].exists()
    log.close()


@pytest.mark.parametrize("written", [0.0, 0.5, 1.0])
async def test_partially_written_files_do_not_count_as_growth_of_the_run(tmp_path, rank, monkeypatch, written):
    log, saver, alerts = begin(tmp_path, rank, total=9)
    saver._every = 4
    used = lambda: sum(path.stat().st_size for path in tmp_path.glob("global_step_*/**/*") if path.is_file())  # noqa: E731
    usage = lambda _: SimpleNamespace(free=int(3.5 * KIB) - used())  # noqa: E731
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", usage)
    assert not saver.is_due(3)
    await step(log, saver, 4)
    saver.check_disk_space(4)
    (tmp_path / "global_step_4.partial" / "part").write_bytes(bytes(int(written * KIB)))
    assert not saver.is_due(5) and alerts == [], "another checkpoint of 1 KiB fits in addition"
    rank.disk.set()
    await saver.settle()
    assert complete(tmp_path) == ["global_step_4"]
    log.close()


async def test_ranks_report_the_state_of_their_files_while_a_slot_computes(monkeypatch):
    ends = asyncio.Event()

    async def call(reference, *_):
        return await reference if asyncio.iscoroutine(reference) else reference

    def answers(value):
        return SimpleNamespace(remote=lambda: value() if callable(value) else value)

    stub_rank = SimpleNamespace(make_room=answers(ends.wait), is_saving=answers(True), saved=answers(None))
    monkeypatch.setattr(rank_group, "call", call)
    group = TrainerGroup(Config(), [stub_rank, stub_rank])
    computing = asyncio.ensure_future(group.make_room(0))
    async with asyncio.timeout(5):
        assert await group.is_saving()
        await group.saved()
        assert not computing.done()
        ends.set()
        await computing
    for method in (TrainerRank.is_saving, TrainerRank.saved):
        assert method.__ray_concurrency_group__ == WATCH, "not queued after the call that runs"


async def test_a_failed_write_raises_an_alert_and_an_error_at_the_last_step(tmp_path, rank):
    log, saver, alerts = begin(tmp_path, rank, total=2)
    rank.fails = True
    rank.disk.set()
    await step(log, saver, 1)
    await written(saver)
    ((number, text),) = alerts
    assert number == 1 and "No space left on device" in text and complete(tmp_path) == []
    saver.remember(2)
    with pytest.raises(NotSaved, match="No space left on device"):
        await saver.write(2)
    assert len(rank.folders) == 2 and not any(folder.exists() for folder in rank.folders)
    log.close()


async def test_a_write_timeout_raises_an_alert(tmp_path, rank):
    log, saver, alerts = begin(tmp_path, rank)
    saver._limit_s = 0.1
    await step(log, saver, 1)
    async with asyncio.timeout(10):
        await saver.settle()
    assert "were not written within cluster.timeout_s=0.1 s; raise it for a slow disk" in alerts[0][1]
    rank.disk.set()
    assert "FileNotFoundError" in rank.staged.problem()
    assert not [*tmp_path.glob("global_step_*")], "the removed folder is not recreated"
    log.close()


async def test_without_free_memory_files_are_written_synchronously(tmp_path, rank, monkeypatch):
    stale, lock = scratch.make(scratch.CHECKPOINT)
    lock.close()  # left by a killed rank
    monkeypatch.setattr(host_memory, "free_bytes", lambda: KIB)
    log, saver, _ = begin(tmp_path, rank)
    await step(log, saver, 1)
    assert not rank.staged.is_copying() and not stale.exists()
    await saver.settle()
    assert complete(tmp_path) == ["global_step_1"]
    log.close()
