"""Runs on disks that are full: on a real file system of a few MiB."""

import errno
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rlfuse.config.schema import Config
from rlfuse.errors import FAILED
from rlfuse.events import Span, read_events
from rlfuse.observe.run_log import RunLog
from rlfuse.run.checkpointing import Checkpointing, first_bytes
from rlfuse.run.restarts import recovered
from rlfuse.run_folder import checkpoints, status
from rlfuse.train import reported

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
    """Leave so many bytes free."""
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


def any_other(log: RunLog) -> None:
    (log.folder / "data").write_bytes(bytes(9000))


class FullSink:
    """Has no room for its own files either."""

    def failure(self, *_) -> None:
        pass

    def close(self, exit_code: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("writes", "told"),
    [
        (rows, r"events.jsonl: .* bytes could not be added \(.*MiB free. Free disk space there and rerun"),
        (small_file, r"iteration.txt: the file could not be written \(.*MiB free. Free disk space there"),
        (any_other, r"A file could not be written: No space left on device. Free disk space where runs"),
    ],
)
def test_a_run_on_a_full_disk_ends_in_order(disk, config, capsys, writes, told):
    """Its status says how it ended, its last rows are written, and the first message is the one that is shown."""

    def attempt(job):
        log = job.begin(8)
        log.loggers._sinks.append(FullSink())
        (log.folder / "global_step_2.partial").mkdir()

        async def work():
            with log.journal.recorder.span("step", step=3):
                fill(disk)
                writes(log)

        job.carry_out(work(), log)

    try:
        assert reported(lambda: recovered(config, attempt)) == FAILED
    finally:
        (disk / "filler").unlink()
    said, found = capsys.readouterr().err, status.read(config.run_folder)
    assert re.search(told, said) and "Traceback" not in said
    assert found.state == "failed" and found.ended and "No space left on device" in found.error
    (span,) = [span for span in read_events(config.run_folder / "events.jsonl") if span.kind == "step"]
    assert "error" in span.attributes, "written in the space that was reserved"
    assert not (config.run_folder / status.RESERVED).exists()


def test_no_run_begins_where_its_end_would_find_no_room(disk, config, capsys):
    config.run_folder.mkdir(parents=True)
    fill(disk, left=status.RESERVED_BYTES // 2)
    try:
        assert reported(lambda: recovered(config, lambda job: job.begin(8))) == FAILED
    finally:
        (disk / "filler").unlink()
    assert "the space to end the run could not be reserved" in capsys.readouterr().err
    assert status.read(config.run_folder) is None and not (config.run_folder / status.RESERVED).exists()


async def test_room_for_a_checkpoint_is_compared_when_its_save_interval_begins(disk, config):
    """By what is known of a first one, then by the last; not behind the last step, and not where none is written."""
    told, folder = [], config.run_folder
    folder.mkdir(parents=True)

    async def save(partial, weights):
        (partial / "weights").write_bytes(bytes(MIB))

    def checkpointing(parameters, save_freq=2):
        config.trainer.save_freq = save_freq
        first = first_bytes(config, parameters)
        return Checkpointing(log, start=0, keep=None, save=save, state=lambda _: {}, first_bytes=first)

    with closing(RunLog(config, {}, folder, total_steps=6, start=0)) as log:
        log.loggers.alert = lambda step, alert: told.append((step, alert.text))
        checkpointing(parameters=MIB, save_freq=0)
        made = checkpointing(parameters=1000)
        assert told == []
        checkpointing(parameters=MIB)
        assert [step for step, _ in told] == [0] and "will not fit: 14.0 MiB needed, " in told[0][1]
        for step in (2, 4, 6):
            made.remember(step)
            await made.write(step)
            fill(disk, left=MIB // 2)
            made.publish()
            made.publish()
            (disk / "filler").unlink()
    assert [step for step, _ in told] == [0, 2, 4]
    assert "will not fit: 1.0 MiB needed, 0.5 MiB free" in told[1][1] and "steps after 2 may be lost" in told[1][1]
