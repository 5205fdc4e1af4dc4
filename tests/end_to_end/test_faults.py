"""A job whose workers die, hang or run out of memory continues, and ends bitwise equal to an undisturbed run."""

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
    """Return the run folders of baseline and faulty run; faulty_steps.py schedules the faults."""
    settings = EXACT | {
        "data.train_batch_size": 8,
        "data.max_response_length": 400,  # some are still generating when their engine is killed
        "actor.ppo_mini_batch_size": 4,
        "trainer.total_training_steps": STEPS,
        "trainer.save_freq": 1,
        "trainer.log_samples": 1000,
        "cluster.heartbeat_s": 6,
    }
    folder = tmp_path_factory.mktemp("faults")
    return tuple(map(Path, driven("faulty_steps", folder, **settings)))


def test_the_faulty_run_has_bitwise_the_samples_metrics_and_weights_of_the_baseline(runs):
    baseline, faulty = runs
    assert differences(baseline, faulty) == []
    learned = [
        [{name: value for name, value in row.items() if name.startswith(LEARNED)} for row in rows]
        for rows in (read_metrics(run / "metrics.jsonl") for run in runs)
    ]
    assert learned[1] == learned[0] and len(learned[0]) == STEPS and len(learned[0][0]) > 10
    samples = [
        sorted((row["id"], row["reward"]) for row in map(json.loads, (run / "samples.jsonl").open())) for run in runs
    ]
    assert samples[1] == samples[0] and len(samples[0]) == STEPS * 8 * 4


def test_logs_of_workers_are_appended_to_across_restarts(runs):
    began = {path.name: path.read_text().count(": process ") for path in (runs[1] / "logs").glob("*.log")}
    assert (began["rollout-0.log"], began["rollout-1.log"]) == (
        6,
        5,
    )  # four attempts plus replacements
    assert began["trainer-0.log"] == began["trainer-1.log"] == 4 and began["reward-0.log"] == 5


def test_every_fault_is_counted_explained_and_recovered_from(runs):
    faults = json.loads((runs[1] / "summary.json").read_text())["faults"]
    assert faults.pop("samples_reissued") > 0
    assert faults == {"engines_lost": 3, "engines_replaced": 3, "reward_workers_replaced": 1, "restarts": 3}
    spans = read_events(runs[1] / "events.jsonl")
    lost = [span for span in spans if span.kind == "lost"]
    assert sorted((span.step, span.where) for span in lost) == [(1, "rollout/0"), (2, "rollout/0"), (2, "rollout/1")]
    killed, *stopped = [span.cause for span in lost]
    died = "rollout/0 died during the call to [^:]+: "
    assert re.fullmatch(f"{died}{KILLED}\nlogs: {runs[1]}/logs \\(rollout-0.log has the error\\)", killed), killed
    silent, still = sorted(stopped)
    assert re.search("rollout/0: no answer for 6 s .*; last known activity: ", silent)
    assert re.search("rollout/1.* made no progress for 6 s .* unfinished samples; .* a step of .* samples at", still)
    for span in lost:  # all of its step, and regenerated on another engine
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
    """Step 3 was lost after its responses had finished, step 4 during generation."""
    for run in runs:
        assert [row.get("fusion/draft_acceptance", 0.0) for row in read_metrics(run / "metrics.jsonl")] == [0.0] * STEPS
    stored = StoredResponses(runs[1] / FILE)
    assert stored.last_step == STEPS and stored.count >= STEPS * 8 * 4
