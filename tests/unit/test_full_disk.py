"""Runs on a full disk, with a real file system of a few MiB."""

import errno
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from math import inf
from pathlib import Path

import pytest
from test_journal import Writer

from rlfuse.application import run_command
from rlfuse.config.schema import Config
from rlfuse.errors import FAILED, NotSaved
from rlfuse.events import Span, read_events
from rlfuse.observe.run_log import RunLog
from rlfuse.run.checkpointing import Checkpointing, next_save
from rlfuse.run.job import run_with_restarts
from rlfuse.run_folder import checkpoints, status

MIB = 1 << 20
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")


@pytest.fixture(scope="module")
def disk(tmp_path_factory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("small")
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    if (made := subprocess.run(mount, capture_output=True, text=True)).returncode != 0:
        pytest.skip(f"no file system can be mounted: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def config(disk, request) -> Config:
    config = Config()
    config.trainer.default_local_dir, config.trainer.experiment_name = str(disk), request.node.name
    config.model.path, config.trainer.logger = "somewhere", []
    return config


def fill(folder: Path, left: int = 0) -> Path:
    """Fill the disk up to `left` free bytes."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(65536))
        except OSError as error:
            assert error.errno == errno.ENOSPC
    os.truncate(filler, filler.stat().st_size - left)
    return filler


def rows(log: RunLog) -> None:
    log.journal._file.write([Span("generate", "rollout/0", 1.0, 2.0, cause="x" * 9000)])


def small_file(log: RunLog) -> None:
    checkpoints.publish(log.folder, 2, None)


def other_file(log: RunLog) -> None:
    (log.folder / "data").write_bytes(bytes(9000))


class FullSink:
    """Logger whose files do not fit on the disk either."""

    def failure(self, *_) -> None:
        pass

    def close(self, exit_code: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("writes", "message"),
    [
        (rows, r"events.jsonl: .* bytes could not be added \(.*MiB free. Free disk space there and rerun"),
        (small_file, r"iteration.txt: the file could not be written \(.*MiB free. Free disk space there"),
        (other_file, r"A file could not be written: No space left on device. Free disk space where runs"),
    ],
)
def test_a_run_on_a_full_disk_ends_with_status_and_message(disk, config, capsys, writes, message):
    """Check that the status has the error, the last rows are written, and the first error is printed."""

    def attempt(job):
        log = job.begin(8)
        log.loggers._sinks.append(FullSink())
        (log.folder / "global_step_2.partial").mkdir()

        async def work():
            with log.journal.recorder.span("step", step=3):
                fill(disk)
                writes(log)

        job.run_until_done(work(), log)

    try:
        assert run_command(lambda: run_with_restarts(config, attempt)) == FAILED
    finally:
        (disk / "filler").unlink()
    output, found = capsys.readouterr().err, status.read(config.run_folder)
    assert re.search(message, output) and "Traceback" not in output
    assert found.state == "failed" and found.ended and "No space left on device" in found.error
    (span,) = [span for span in read_events(config.run_folder / "events.jsonl") if span.kind == "step"]
    assert "error" in span.attributes, "written to the reserved space"
    assert not (config.run_folder / status.RESERVED).exists()


def test_a_run_without_space_for_its_end_does_not_start(disk, config, capsys):
    config.run_folder.mkdir(parents=True)
    fill(disk, left=status.RESERVED_BYTES // 2)
    try:
        assert run_command(lambda: run_with_restarts(config, lambda job: job.begin(8))) == FAILED
    finally:
        (disk / "filler").unlink()
    assert "reserving disk space for the end of the run failed" in capsys.readouterr().err
    assert status.read(config.run_folder) is None and not (config.run_folder / status.RESERVED).exists()


class Disk:
    """Run of 9 steps with checkpoints of 1 MiB every fourth step, on a disk whose free space is set per step."""

    def __init__(self, config: Config, log: RunLog):
        self.log, self.told = log, []
        config.trainer.save_freq = 4
        log.loggers.alert = lambda step, alert: self.told.append((step, alert.text))
        self.checkpointing = Checkpointing(
            log,
            config,
            start=0,
            save=self.save,
            writer=Writer(),
            state=lambda _: {},
            first_bytes=MIB,
        )

    async def save(self, partial: Path, weights: bool) -> None:
        (partial / "weights").write_bytes(bytes(MIB if weights else 0))

    async def step(self, step: int, free: float = inf) -> bool:
        """End a step with at most `free` MiB of disk space; return whether it was saved."""
        self.checkpointing.check_disk_space(step - 1)
        (self.log.folder / "filler").unlink(missing_ok=True)
        if free < inf:
            fill(self.log.folder, left=int(free * MIB))
        self.checkpointing.remember(step)
        if is_due := self.checkpointing.is_due(step):
            await self.checkpointing.write(step)
        self.checkpointing.publish()
        return is_due and self.checkpointing.step == step

    @property
    def saved(self) -> list[str]:
        return [path.name for path in checkpoints.complete(self.log.folder)]


@pytest.fixture
def run(disk, config) -> Iterator[Disk]:
    config.run_folder.mkdir(parents=True)
    with closing(RunLog(config, {}, config.run_folder, total_steps=9, start=0)) as log:
        yield Disk(config, log)
    shutil.rmtree(config.run_folder)


@pytest.mark.parametrize(
    ("needed", "free", "taken", "is_saved", "missed", "expected"),
    [
        (100, 100, 0, True, False, "wait"),
        (100, 99, 0, True, False, "end"),  # the last step is saved
        (100, 99, 0, False, False, "alert"),  # the current step cannot be saved
        (100, 150, 25, False, False, "wait"),
        (100, 149, 25, False, False, "save"),  # the last step at which a checkpoint fits
        (100, 149, 25, True, False, "wait"),
        (100, 500, 0, False, True, "save"),  # retry as soon as it fits
    ],
)
def test_conditions_for_an_early_checkpoint(needed, free, taken, is_saved, missed, expected):
    assert next_save(needed, free, taken, is_saved=is_saved, missed=missed) == expected


async def test_a_run_whose_first_checkpoint_will_not_fit_does_not_start(run, config):
    fill(run.log.folder, left=MIB // 2)
    with pytest.raises(
        NotSaved, match=r"will not fit: 1\.0 MiB needed, 0\.5 MiB free.*ends after step 0.*save_freq=-1"
    ):
        await run.checkpointing.write_trial()
    run.checkpointing._every = 0
    await run.checkpointing.write_trial()


async def test_a_run_ends_after_a_saved_step_if_the_next_checkpoint_will_not_fit(run):
    run.checkpointing._keep = None
    assert [await run.step(step) for step in (1, 2, 3)] == [False] * 3
    assert await run.step(4, free=1.5)
    with pytest.raises(NotSaved, match=r"1\.0 MiB needed, 0\.5 MiB free.*ends after step 4"):
        await run.step(5)
    assert run.saved == ["global_step_4"] and run.told == []


async def test_the_oldest_checkpoint_is_removed_to_fit_the_next(run):
    assert await run.step(4) and await run.step(8)
    await run.step(9, free=0.5)
    assert run.saved == ["global_step_8", "global_step_9"] and run.told == []


async def test_a_checkpoint_is_written_early_if_the_disk_fills_up(run):
    assert not await run.step(1, free=3)
    assert not await run.step(2, free=2.6)
    assert await run.step(3, free=1.8), "at 0.8 MiB per step, none fits two steps later"
    assert run.saved == ["global_step_3"]


async def test_a_failed_checkpoint_is_retried_once_it_fits(run):
    assert await run.step(4)
    assert not await run.step(5, free=0.5) and run.told == []
    assert not await run.step(6, free=0.6)
    [(step, text)] = run.told
    assert step == 5 and "1.0 MiB needed, 0.5 MiB free" in text and "steps after 4 may be lost" in text
    assert await run.step(7) and len(run.told) == 1
