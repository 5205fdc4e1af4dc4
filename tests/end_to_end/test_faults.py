"""Workers of a whole job that die, hang or get no memory: the run goes on, and learns what it would have learned."""

import json
import re
from pathlib import Path

import pytest
from curves import assert_same_curves
from safetensors.numpy import load_file

from rlfuse.events import read_events
from rlfuse.observe.tracking import read_metrics

STEPS = 4
KILLED = (
    r"killed by signal 9 \(SIGKILL\); by whom is not known\. Only that, or os\._exit, ends one without a word\."
    r"( The last that it told: .+ with \d+ MiB in memory, \d+\.\d s ago\.)? Free memory now: .* in /dev/shm\."
)


@pytest.fixture(scope="module")
def runs(driven, tmp_path_factory):
    """(undisturbed run, faulty run); what happens when is in faulty_steps.py."""
    settings = {
        "data.train_batch_size": 8,
        "data.max_response_length": 400,  # some are long, and go on while their engine is killed
        "actor.ppo_mini_batch_size": 4,
        "trainer.total_training_steps": STEPS,
        "trainer.save_freq": 1,
        "trainer.log_samples": 1000,
        "cluster.heartbeat_s": 6,
    }
    folder = tmp_path_factory.mktemp("faults")
    return tuple(map(Path, driven("faulty_steps", folder, **settings)))


def test_the_run_ends_with_the_samples_numbers_and_weights_of_an_undisturbed_one(runs):
    """Sums in another order differ in the last bits, which Adam's division makes 4e-5 after some updates of 1e-3."""
    calm, faulty = runs
    assert_same_curves(calm, faulty, steps=range(1, STEPS + 1))
    samples = [
        [(row["id"], row["response"], row["reward"]) for row in map(json.loads, (run / "samples.jsonl").open())]
        for run in runs
    ]
    assert len(samples[0]) == STEPS * 8 * 4 and len({name for name, *_ in samples[1]}) == len(samples[1])
    assert sorted(samples[1]) == sorted(samples[0])
    folder = f"global_step_{STEPS}/actor/huggingface/*.safetensors"
    expected, found = (
        {name: array for path in run.glob(folder) for name, array in load_file(path).items()} for run in runs
    )
    assert expected and found.keys() == expected.keys()
    for name, weights in expected.items():
        assert found[name] == pytest.approx(weights, abs=2e-4), name


def test_each_process_keeps_what_it_writes_over_restarts(runs):
    began = {path.name: path.read_text().count(": process ") for path in (runs[1] / "logs").glob("*.log")}
    assert (began["rollout-0.log"], began["rollout-1.log"]) == (
        6,
        5,
    )  # in four attempts, and in the places of lost ones
    assert began["trainer-0.log"] == began["trainer-1.log"] == 4 and began["reward-0.log"] == 5


def test_every_loss_is_counted_explained_and_repaired(runs):
    faults = json.loads((runs[1] / "summary.json").read_text())["faults"]
    assert faults.pop("samples_reissued") > 0
    assert faults == {"engines_lost": 3, "engines_replaced": 3, "reward_workers_replaced": 1, "restarts": 3}
    spans = read_events(runs[1] / "events.jsonl")
    lost = [span for span in spans if span.kind == "lost"]
    assert sorted((span.step, span.where) for span in lost) == [(1, "rollout/0"), (2, "rollout/0"), (2, "rollout/1")]
    killed, *stopped = [span.cause for span in lost]
    asked = "rollout/0 died while it was asked to [^:]+: "
    assert re.fullmatch(f"{asked}{KILLED}\nlogs: {runs[1]}/logs \\(rollout-0.log has the error\\)", killed), killed
    silent, still = sorted(stopped)
    assert re.search("rollout/0: it did not answer for 6 s .*; the last that was heard of it is", silent)
    assert re.search("rollout/1.* stood still for 6 s .* samples at hand; .* a step of .* samples at", still)
    for span in lost:  # all of its step, and all of them generated elsewhere
        assert span.samples and all(int(name.split("/")[0]) == span.step for name in span.samples)
    hung, dead, starved = [span.cause for span in spans if span.kind == "restart" and span.where == "driver"]
    assert re.match(r"trainer/1 hangs: asked to update the actor it has stood still for \d\.\d s \(cluster\.", hung)
    assert re.search(
        r'It stands in, the innermost call first:\n  File ".*faulty_steps\.py", line \d+ in asleep_for_e', hung
    )
    assert "For it trainer/0 waited." in hung and "Stacks of all processes: " in hung
    assert re.match(r"trainer/[01] died while it was asked to", dead), dead
    assert "trainer/1" in starved and "It is out of memory. Lower actor.ppo_max" in starved
    for cause in (hung, starved):
        assert f"logs: {runs[1]}/logs (trainer-1.log has the error)" in cause
    (reward,) = [span.cause for span in spans if span.kind == "restart" and span.where == "reward/0"]
    assert re.fullmatch(f"the process of .* ended while it scored this sample: {KILLED}", reward), reward
    last = read_metrics(runs[1] / "metrics.jsonl")[-1]
    assert last["fault/restarts"] == 3 and last["fault/engines_lost"] == 3
    assert not (runs[1] / "reward_failures.jsonl").exists()
