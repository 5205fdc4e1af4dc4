"""The summary at the end of a run: label, selection of data, held-out metric."""

import json
import math
from contextlib import closing

import pytest

from rlfuse.algorithms.corrections import LOG_PROBS_DIFF_MAX
from rlfuse.config.schema import Config
from rlfuse.observe.run_log import RunLog
from rlfuse.observe.summary import summarise
from rlfuse.run_folder import status
from rlfuse.tools import listing

ROWS = {"o": "fusion/off-policy", "e": "fusion/exact", "m": "fusion/mismatched", "r": "fusion/reordered"}


@pytest.mark.parametrize(
    ("steps", "before", "expected"),
    [
        ("ee", "exact", "exact"),
        ("ooee", "exact", "off-policy"),
        ("ere", "exact", "reordered"),
        ("eroemo", "exact", "mismatched"),
        ("ee", "off-policy", "off-policy"),  # resumed from a checkpoint in the folder of another run
    ],
)
def test_a_run_has_the_weakest_label_of_its_steps(steps, before, expected, tmp_path):
    config = Config()
    config.trainer.logger = []
    rows = [{"step": number, ROWS[each]: 1.0} for number, each in enumerate(steps, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with closing(RunLog(config, {}, tmp_path, total_steps=9, start=len(steps), label=before)) as log:
        assert log.metrics.label_so_far() == expected, "label of a checkpoint"
        log.metrics.add({LOG_PROBS_DIFF_MAX: 1e3})
        assert log.metrics.label_so_far() == "mismatched", "includes the step that is about to be saved"
    assert summarise(tmp_path, config, 1.0, label_before=before)["label"] == expected
    status.begin(tmp_path, "p/x", 0.0, 9, before)
    assert listing.read(tmp_path).label == expected, "label of a running run"


def test_the_last_lines_report_the_data_selection_of_each_part_of_the_run(tmp_path, capsys):
    config = Config()
    config.fusion.policy, config.fusion.data = "adaptive", "partial_rollout"
    rows = [{"step": step, "critic/score/mean": 0.5, "fusion/prompts_set_aside": 3} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summarise(tmp_path, config, 1.0)
    output = capsys.readouterr().out
    assert "fusion=partial_rollout (off-policy)" in output and "3 prompts that were not drawn again" in output
    config.fusion.data = "exact"
    changes = {"step": 1, "key": "fusion.data", "was": "over_sampling", "is": "exact"}
    (tmp_path / "changes.jsonl").write_text(json.dumps(changes) + "\n")
    assert summarise(tmp_path, config, 1.0)["fusion"] == "over_sampling, then adaptive"


def test_a_run_without_rewards_shows_the_kl_to_its_teacher(tmp_path, capsys):
    rows = [{"step": step, "actor/teacher_kl": 1 / step} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summarise(tmp_path, Config(), 1.0)
    printed = capsys.readouterr().out
    assert "kl to teacher 1.000 -> 0.500   (first and last step)" in printed and "mean reward" not in printed
    assert "results       learning_curve.png, metrics.jsonl" in printed
    assert (tmp_path / "learning_curve.png").stat().st_size > 1000 and not (tmp_path / "reward_curve.png").exists()


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (
            [
                {"step": 0, "val-core/s/acc/mean@1": 0.0, "val-core/s/reward/mean@1": 0.0},
                {"step": 2, "val-core/s/acc/mean@1": 0.25},
            ],
            ("val-core/s/acc/mean@1", 0.0, 0.25),
        ),
        (
            [
                {"step": 0, "val-core/s/acc/mean@1": 0.0, "val-core/s/reward/mean@1": 0.0},
                {"step": 2, "val-core/s/reward/mean@1": 0.25},
            ],
            ("val-core/s/reward/mean@1", 0.0, 0.25),
        ),
        (
            [{"step": 0, "val-core/s/acc/mean@1": 0.5}, {"step": 2, "val-core/s/acc/mean@1": math.nan}],
            ("val-core/s/acc/mean@1", 0.5, None),
        ),
    ],
)
def test_the_summary_compares_one_held_out_metric(rows, expected, tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = summarise(tmp_path, Config(), 1.0)
    assert (summary["val_name"], summary["val_before"], summary["val_after"]) == expected
