"""Jobs that are killed after any stage, run on a full disk, or whose workers hang, lose at most the current step."""

import subprocess

import pytest
from curves import LEARNED


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """Mount a file system of 160 MB; yield its folder."""
    folder = tmp_path_factory.mktemp("disk")
    command = ["mount", "-t", "tmpfs", "-o", "size=160m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("small file systems can't be mounted here: not root, or not allowed to")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(scope="module")
def found(driven, disk):
    """Return what interrupted_steps.py recorded."""
    settings = {
        "algorithm": "ppo",
        "data.val_files": f"[{disk}/val.jsonl]",
        "data.max_response_length": 32,
        "data.train_batch_size": 8,
        "actor.ppo_mini_batch_size": 4,
        "actor.ppo_max_token_len_per_gpu": 128,
        "critic.optim.lr": 1e-3,
        "rollout.n": 2,
        "algorithm.use_kl_in_reward": "true",
        "ref.sync_ref_model": "true",
        "ref.ref_model_sync_steps": 1,
        "reward.functions": f"[{{path: {disk}/reward.py:even, normalise: true}}]",
        "fusion": "serial",
        "trainer.deterministic": "true",
        "trainer.total_training_steps": 3,
        "trainer.save_freq": 1,
        "trainer.test_freq": 2,
        "trainer.max_ckpt_to_keep": "null",
        "trainer.val_before_train": "false",
    }
    return driven("interrupted_steps", disk, **settings)


def learned(rows):
    return [{name: value for name, value in row.items() if name.startswith(LEARNED)} for row in rows]


def test_runs_of_the_same_configuration_are_bitwise_equal(found):
    rows = found["rows"]
    assert [row["step"] for row in rows["whole"]] == [1, 2, 3] and len(learned(rows["whole"])[1]) > 20
    assert learned(rows["again"]) == learned(rows["whole"])


def test_a_run_killed_after_any_stage_resumes_bitwise(found):
    rows = found["rows"]
    expected = learned(rows["whole"])[1:]
    for case in set(rows) - {"whole", "again", "adaptive"}:
        assert learned(rows[case]) == expected, case


def test_a_checkpoint_that_cannot_be_written_is_an_error_at_startup(found):
    error, on_disk = found["refused at startup"]
    assert (
        error.startswith("Checkpoints can't be written in ") and "trainer/1: PermissionError" in error and not on_disk
    )


def test_rewards_that_end_the_run_leave_a_checkpoint_of_the_last_complete_step(found):
    """That it resumes bitwise is checked with the other cases."""
    error, on_disk = found["ended by rewards"]
    assert (
        "third step" in error and on_disk == ["global_step_1", "global_step_2"] and "ended by rewards" in found["rows"]
    )


def test_adaptive_fusion_differs_from_serial_by_rounding_only(found):
    rows = found["rows"]
    for have, want in zip(learned(rows["adaptive"]), learned(rows["whole"]), strict=True):
        assert have == pytest.approx(want, rel=2e-4, abs=1e-5)


def test_a_full_disk_skips_a_checkpoint_and_the_run_continues(found):
    alert, on_disk, later = found["full disk alerts"]
    assert "step 2 could not be written" in alert and "global_step_2.partial" in alert and "MiB free" in alert
    assert "global_step_1. Free disk space" in alert and "The run continues" in alert
    assert on_disk == ["global_step_1"] and later == ["global_step_1", "global_step_3"]


def test_a_hung_worker_is_reported_with_its_last_event_and_all_stacks(found):
    early, error, requested = found["stopped rank messages"]
    for text in (early, error):
        assert "trainer/0: last event: " in text and "time fixed work" in text and "/stacks/" in text
    assert "stopped" in early and "did not time fixed work within 3 s" in error and "SIGUSR1" in requested
    hung, _, whole = "".join(found["stacks"]).partition("requested by SIGUSR1")
    assert hung.index("== trainer/0") < hung.index("== driver") and "no answer" in hung
    for where in ("trainer/0", "trainer/1", "rollout/0", "rollout/1", "reward/0", "driver"):
        assert f"== {where} (process " in whole
    assert "no answer" not in whole and "interrupted_steps.py" in whole and "waiting for trainer/0" in hung
