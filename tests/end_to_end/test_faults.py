"""Workers of a whole job that die, hang or get no memory: the run continues, and ends with the bits of an undisturbed
one."""

import json
import re
import sys
from pathlib import Path

import pytest
from curves import LEARNED

from rlfuse.events import read_events
from rlfuse.observe.tracking import read_metrics
from rlfuse.run_folder.response_store import FILE, StoredResponses

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from chaos import EXACT, differences

STEPS = 4
KILLED = (
    r"killed by signal 9 \(SIGKILL\); the sender is unknown\. Only that, or os\._exit, ends a process without "
    r"a message\.( Its last event: .+ with \d+ MiB in memory, \d+\.\d s ago\.)? Free memory now: .* in /dev/shm\."
)


@pytest.fixture(scope="module")
def runs(driven, tmp_path_factory):
    """(undisturbed run, faulty run); what happens when is in faulty_steps.py."""
    settings = EXACT | {
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
    """To the last bit."""
    calm, faulty = runs
    assert differences(calm, faulty) == []
    learned = [
        [{name: value for name, value in row.items() if name.startswith(LEARNED)} for row in rows]
        for rows in (read_metrics(run / "metrics.jsonl") for run in runs)
    ]
    assert learned[1] == learned[0] and len(learned[0]) == STEPS and len(learned[0][0]) > 10
    samples = [
        sorted((row["id"], row["reward"]) for row in map(json.loads, (run / "samples.jsonl").open())) for run in runs
    ]
    assert samples[1] == samples[0] and len(samples[0]) == STEPS * 8 * 4


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
    asked = "rollout/0 died during the call to [^:]+: "
    assert re.fullmatch(f"{asked}{KILLED}\nlogs: {runs[1]}/logs \\(rollout-0.log has the error\\)", killed), killed
    silent, still = sorted(stopped)
    assert re.search("rollout/0: no answer for 6 s .*; last known activity: ", silent)
    assert re.search("rollout/1.* made no progress for 6 s .* unfinished samples; .* a step of .* samples at", still)
    for span in lost:  # all of its step, and all of them generated elsewhere
        assert span.samples and all(int(name.split("/")[0]) == span.step for name in span.samples)
    hung, dead, starved = [span.cause for span in spans if span.kind == "restart" and span.where == "driver"]
    assert re.match(
        r"trainer/1 hangs in the call to update the actor: it has made no progress for \d\.\d s \(cluster\.", hung
    )
    assert re.search(r'Its stack, innermost call first:\n  File ".*faulty_steps\.py", line \d+ in asleep_for_e', hung)
    assert "Ranks waiting for it: trainer/0." in hung and "Stacks of all processes: " in hung
    assert re.match(r"trainer/[01] died during the call to", dead), dead
    assert "trainer/1" in starved and "It is out of memory. Lower actor.ppo_max" in starved
    for cause in (hung, starved):
        assert f"logs: {runs[1]}/logs (trainer-1.log has the error)" in cause
    (reward,) = [span.cause for span in spans if span.kind == "restart" and span.where == "reward/0"]
    assert re.fullmatch(f"the process of .* died while scoring this sample: {KILLED}", reward), reward
    last = read_metrics(runs[1] / "metrics.jsonl")[-1]
    assert last["fault/restarts"] == 3 and last["fault/engines_lost"] == 3
    assert not (runs[1] / "reward_failures.jsonl").exists()


def test_deterministic_steps_are_repeated_without_drafts(runs):
    """Step 3 was lost after its responses were finished, step 4 while they were generated."""
    for run in runs:
        assert [row.get("fusion/draft_acceptance", 0.0) for row in read_metrics(run / "metrics.jsonl")] == [0.0] * STEPS
    stored = StoredResponses(runs[1] / FILE)
    assert stored.last_step == STEPS and stored.count >= STEPS * 8 * 4
