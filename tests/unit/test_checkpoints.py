"""Checkpoints are written atomically, found by step, and pruned."""

import errno
import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlfuse.errors import ConfigError, NotSaved, WorkerLost
from rlfuse.files import write_atomically
from rlfuse.run_folder import checkpoints


async def fill(folder):
    (folder / "actor").mkdir()
    (folder / "actor" / "weights").write_text("w")


async def save(run, step, state, fill, keep):
    await checkpoints.write(run, step, state, fill)
    checkpoints.publish(run, step, keep)


async def test_checkpoints_are_complete_found_and_pruned(tmp_path):
    for step in (2, 4, 10):
        await save(tmp_path, step, {"kl": step / 10}, fill, keep=2)
    assert [path.name for path in checkpoints.complete(tmp_path)] == ["global_step_4", "global_step_10"]
    assert (tmp_path / checkpoints.LATEST).read_text() == "10"
    newest = checkpoints.find(tmp_path, "auto")
    assert checkpoints.read_state(newest) == {"step": 10, "kl": 1.0}
    assert (newest / "actor" / "weights").read_text() == "w"
    assert checkpoints.find(tmp_path, "disable") is None
    assert checkpoints.find(tmp_path, str(tmp_path / "global_step_4")).name == "global_step_4"


@pytest.mark.parametrize(
    ("writing", "free"), [(None, 7000 + 600), (3, 7000 - 900 + 1400), (4, 7000 - 1000 + 600 + 1400)]
)
def test_free_space_counts_stale_files_as_free_and_files_in_progress_as_complete(tmp_path, monkeypatch, writing, free):
    """Write checkpoints of 400 and 1000 bytes, and a third with 600 bytes of a killed run or 100 bytes in progress."""
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda _: SimpleNamespace(free=7000))
    for name, size in (("1", 400), ("2", 1000), ("3.partial", 100 if writing == 3 else 600)):
        (tmp_path / f"global_step_{name}").mkdir()
        (tmp_path / f"global_step_{name}" / "weights").write_bytes(bytes(size))
        (tmp_path / f"global_step_{name}" / checkpoints.MARKER).touch()
    assert checkpoints.disk_space(tmp_path, 2, 2 if writing else 3, 0, writing) == (1000, free)


async def test_a_failed_write_keeps_the_previous_checkpoint(tmp_path):
    await save(tmp_path, 1, {}, fill, keep=None)

    async def fails(folder):
        await fill(folder)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    message = (
        r"step 2 .*No space.* 0\.0 MiB \(like global_step_1\) needed, .* MiB free .* The last checkpoint is .*_1\."
    )
    with pytest.raises(NotSaved, match=message):
        await checkpoints.write(tmp_path, 2, {}, fails)
    assert [path.name for path in tmp_path.glob("global_step_*")] == ["global_step_1"]
    (tmp_path / "global_step_7.partial").mkdir()  # left by a killed run
    await checkpoints.write(tmp_path, 2, {}, fill)
    assert [path.name for path in checkpoints.complete(tmp_path)] == ["global_step_1"], "step 2 is not published yet"
    checkpoints.publish(tmp_path, 2, keep=1)
    assert [path.name for path in tmp_path.glob("global_step_*")] == ["global_step_2"]


CAUSES = {
    "a library refuses": (
        ValueError("It is invalid:\n- `top_p`: unset it"),
        "ValueError: It is invalid: - `top_p`: unset",
    ),
    "the folder is read-only": (PermissionError(errno.EACCES, "Permission denied", "x"), "Permission denied: 'x'"),
    "a rank could not write": (NotSaved("trainer/1: x: TypeError: no"), "trainer/1: x: TypeError: no"),
}


@pytest.mark.parametrize("case", CAUSES)
async def test_other_write_errors_are_not_reported_as_a_full_disk(tmp_path, case):
    error, message = CAUSES[case]

    async def fails(folder):
        raise error

    for attempt in (checkpoints.write(tmp_path, 2, {}, fails), checkpoints.write_trial(tmp_path, {}, fails)):
        with pytest.raises(NotSaved, match=message) as found:
            await attempt
        assert "MiB" not in str(found.value) and "\n" not in str(found.value)
    assert not list(tmp_path.iterdir())


async def test_a_lost_worker_is_not_reported_as_a_checkpoint_error(tmp_path):
    async def fails(folder):
        raise WorkerLost("trainer/1 died")

    for attempt in (checkpoints.write(tmp_path, 2, {}, fails), checkpoints.write_trial(tmp_path, {}, fails)):
        with pytest.raises(WorkerLost):
            await attempt


async def test_a_trial_write_leaves_no_files_and_finds_unserializable_state(tmp_path):
    await save(tmp_path, 1, {}, fill, keep=None)
    await checkpoints.write_trial(tmp_path, {"kl": 0.1}, fill)
    with pytest.raises(NotSaved, match=r"at startup.*weights|TypeError: Object of type set"):
        await checkpoints.write_trial(tmp_path, {"rewards": {1}}, fill)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_1", checkpoints.LATEST]


async def test_files_are_synced_before_the_marker_and_the_marker_before_pruning(tmp_path, monkeypatch):
    """Record fsyncs, renames and removals in order, in `seen`."""
    seen, fsync, rename, rmtree = [], os.fsync, checkpoints.Path.rename, checkpoints.shutil.rmtree

    def record_fsync(descriptor):
        fsync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        names = " ".join(sorted(each.name for each in path.iterdir())) if path.is_dir() else path.read_text()
        seen.append((str(path.relative_to(tmp_path)), names))

    def record_rename(path, target):
        seen.append("renamed")
        return rename(path, target)

    def record_removal(path, **options):
        seen.append(f"removed {path.name}")
        rmtree(path, **options)

    await save(tmp_path, 1, {}, fill, keep=1)
    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(checkpoints.Path, "rename", record_rename)
    monkeypatch.setattr(checkpoints.shutil, "rmtree", record_removal)
    await save(tmp_path, 2, {}, fill, keep=1)
    partial = "global_step_2.partial"
    content = {f"{partial}/actor": "weights", f"{partial}/actor/weights": "w", f"{partial}/run.json": '{"step": 2}'}
    marked, renamed, moved, removed = (
        seen.index(each)
        for each in (
            (partial, f"{checkpoints.MARKER} actor run.json"),
            "renamed",
            (".", f"global_step_1 global_step_2 {checkpoints.LATEST}"),
            "removed global_step_1",
        )
    )
    assert {*content.items(), (partial, "actor run.json")} <= set(seen[:marked])
    assert marked < renamed < moved < removed


@pytest.mark.parametrize("keep", [None, 1, 2])
async def test_resuming_an_older_checkpoint_abandons_later_ones_once_another_is_published(tmp_path, keep):
    for step in (2, 4, 6):
        await save(tmp_path, step, {}, fill, keep=None)
    assert [path.name for path in checkpoints.later(tmp_path, 2)] == ["global_step_4", "global_step_6"]
    await checkpoints.write(tmp_path, 3, {}, fill)
    assert len(checkpoints.complete(tmp_path)) == 3, "later checkpoints are kept until publication"
    checkpoints.publish(tmp_path, 3, keep)
    assert checkpoints.find(tmp_path, "auto").name == "global_step_3"
    assert len(checkpoints.complete(tmp_path)) == (1 if keep == 1 else 2)


def test_an_atomic_write_without_space_keeps_the_previous_content(tmp_path):
    """Use a limit on the file size in place of a full disk."""
    path = tmp_path / "config.yaml"
    write_atomically(path, "before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_atomically(path, "after" * 10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_an_incomplete_checkpoint_is_reported_with_the_complete_ones(tmp_path):
    (tmp_path / "global_step_3").mkdir()
    (tmp_path / "global_step_2").mkdir()
    (tmp_path / "global_step_2" / checkpoints.MARKER).touch()
    with pytest.raises(ConfigError, match=r"global_step_3.*complete ones.*global_step_2"):
        checkpoints.find(tmp_path, str(tmp_path / "global_step_3"))
