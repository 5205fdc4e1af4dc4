"""A slot of a real run is drained and restored by command: it gets no work in between, and results do not change."""

import json
from pathlib import Path

import numpy as np
import pytest
from curves import assert_same_curves
from safetensors.numpy import load_file

from rlfuse.events import read_events
from rlfuse.observe.tracking import read_metrics

STEPS = 5
WORK = ("generate", "old_log_prob", "ref", "forward", "backward")


@pytest.fixture(scope="module")
def found(driven, tmp_path_factory):
    """Return what drained_steps.py recorded, and the folders of both runs."""
    settings = {
        "fusion": "serial",  # each slot keeps its half of the samples until they finish
        "data.train_batch_size": 8,
        "data.max_response_length": 400,  # some are still generating when the commands run
        "actor.ppo_mini_batch_size": 4,
        "actor.use_kl_loss": "true",
        "actor.optim.lr": 1e-5,
        "trainer.total_training_steps": STEPS,
        "trainer.save_freq": STEPS,
        "trainer.log_samples": 1000,
    }
    folder = tmp_path_factory.mktemp("slots")
    found = driven("drained_steps", folder, **settings)
    return found | {name: folder / "runs" / "rlfuse" / name for name in ("baseline", "drained")}


def test_slot_commands_report_their_effect(found):
    drained, last, listed, restored = found["outputs"]
    assert drained.startswith("slot 1 is drained until it is restored"), drained
    assert last.startswith("refused: slot 0 is the last working slot of 2"), last
    assert restored == "slot 1 is restored\n"
    first, second = (line.split() for line in listed.splitlines()[1:])
    assert (first[0], second[0]) == ("0", "1") and "working" in first and "drained" in second, listed
    while_drained = found["table"].splitlines()[2].split()
    rate = while_drained[while_drained.index("drained") - 1]
    assert 0.1 < float(rate) < 10, "the drained slot is not probed between steps"


def test_a_drained_slot_gets_no_work_except_optimizer_steps_until_it_is_restored(found):
    spans = read_events(found["drained"] / "events.jsonl")
    own = [span for span in spans if span.where in ("rollout/1", "trainer/1") and span.kind in WORK]
    calls = [span for span in spans if span.where == "driver" and span.attributes.get("slot") == 1]
    drained, until = found["drained_at"], found["restored"]
    assert not [span for span in calls if span.kind in ("gen", *WORK, "update_actor") and drained < span.start < until]
    (step,) = [span for span in spans if span.kind == "step" and span.step == 3]
    assert drained < step.start < step.end < until
    assert not [span for span in own if step.start < span.start < step.end]
    updates = [span for span in spans if span.kind == "optimizer" and span.where == "trainer/1"]
    assert [span for span in updates if step.start < span.start < step.end]
    idle = {row["step"]: row.get("idle/drained", 0.0) for row in read_metrics(found["drained"] / "metrics.jsonl")}
    assert idle[1] == 0 < idle[3] < step.seconds and idle[STEPS] == 0
    # The policy decides which work: a probe disturbed by other processes leaves the slot few samples.
    assert [span for span in own if span.step == STEPS]


def test_samples_of_a_drained_slot_continue_elsewhere_with_their_tokens(found):
    spans = read_events(found["drained"] / "events.jsonl")
    left = {name for span in spans if span.kind == "drain" for name in span.samples}
    assert left
    ended = [span for span in spans if span.kind == "generate" and set(span.samples) & left]
    elsewhere = [span for span in ended if span.where == "rollout/0"]
    assert elsewhere and {span.samples[0] for span in ended} == left
    assert any(span.attributes["carried_tokens"] > 0 for span in elsewhere)


def test_draining_changes_no_samples_and_weights_by_rounding_only(found):
    baseline, drained = found["baseline"], found["drained"]
    assert_same_curves(baseline, drained, steps=range(1, STEPS + 1))
    samples = [
        sorted((row["id"], row["response"], row["reward"]) for row in map(json.loads, (run / "samples.jsonl").open()))
        for run in (baseline, drained)
    ]
    assert len(samples[0]) == STEPS * 8 * 4 and samples[1] == samples[0]
    weights = [
        {name: array for path in Path(folder).glob("*.safetensors") for name, array in load_file(path).items()}
        for folder in (
            *(run / f"global_step_{STEPS}/actor/huggingface" for run in (baseline, drained)),
            baseline.parent / "start/actor/huggingface",
        )
    ]
    expected, have, start = weights
    assert expected and have.keys() == expected.keys() == start.keys()
    for name, array in expected.items():
        assert have[name] == pytest.approx(array, abs=1e-6), name
    assert max(np.abs(expected[name] - start[name]).max() for name in start) > 2e-5, (
        "the weights did not change in training"
    )
