"""Events, metrics and logs of constructed samples and spans."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from rlfuse.events import EventLog, Recorder, Span, read_events
from rlfuse.observe.metrics import (
    balance_metrics,
    covered,
    failure_metrics,
    fusion_metrics,
    latency_metrics,
    repetition,
    sample_metrics,
    time_metrics,
    utilisation,
    validation_metrics,
)
from rlfuse.observe.tracking import failure_row, write_failures
from rlfuse.samples import Group, Partial, Prompt, Response, Reward, RewardFailure, Sample


def sample(index, rollout_index, tokens, reward, finish="stop", source="sums"):
    prompt = Prompt(index, np.arange(4, dtype=np.int32), "p", (), source, "1")
    response = Response(np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.float32), finish, 0, "r")
    return Sample(prompt, 1, rollout_index, 0, response, reward)


def group(*samples):
    return Group(samples[0].prompt, list(samples))


def test_sample_metrics():
    a = sample(0, 0, 2, Reward(1.0, {"exact": 1.0}))
    b = sample(0, 1, 6, Reward(0.0, {"exact": 0.0}), finish="length")
    c = sample(1, 0, 4, Reward(0.5), finish="abort")
    d = sample(1, 1, 4, Reward(0.5))
    for s, values in ((a, [0.5, 1.0]), (b, [0.0] * 6), (c, [0.5] * 4), (d, [0.5] * 4)):
        s.tensors = {
            "values": np.array(values, np.float32),
            "returns": np.full(len(values), s.reward.value, np.float32),
            "advantages": np.ones(len(values), np.float32),
            "token_rewards": np.array([0.0] * (len(values) - 1) + [s.reward.value], np.float32),
        }
    groups = [group(a, b), group(c, d)]
    metrics = sample_metrics(groups, groups, n=2, max_prompt=4, max_response=6, ranks=2)
    assert metrics["critic/score/mean"] == 0.5 and metrics["critic/score/max"] == 1.0
    assert metrics["critic/rewards/mean"] == 0.5
    assert metrics["response_length/mean"] == 4.0 and metrics["response_length/clip_ratio"] == 0.25
    assert metrics["prompt_length/clip_ratio"] == 1.0
    assert metrics["reward/frac_reward_zero_std"] == 0.5
    assert metrics["rewards/exact/mean"] == 0.5 and metrics["rewards/exact/std"] == 0.5
    assert metrics["global_seqlen/max"] == 16 and metrics["global_seqlen/balanced_max"] == 16
    returns = np.array([1, 1] + [0] * 6 + [0.5] * 8)
    errors = np.array([0.5, 0] + [0] * 6 + [0] * 8)
    assert metrics["critic/vf_explained_var"] == pytest.approx(1 - errors.var() / returns.var())


def test_metrics_of_gates_and_reward_dimensions():
    a = sample(0, 0, 2, Reward(1.0, {"gate": 1.0, "exact": 1.0}, None, {"exact": 1.0, "style": 0.5}))
    b = sample(0, 1, 2, Reward(0.0, {"gate": 0.0}, "no thought", {"exact": 0.0, "style": 0.0}, "gate"))
    c = sample(1, 0, 2, Reward(0.5, {"style": 0.5}, None, {"style": 0.5}))
    d = sample(1, 1, 2, Reward(0.5, {"style": 0.5}, None, {"style": 0.5}))
    groups = [group(a, b), group(c, d)]
    metrics = sample_metrics(groups, groups, n=2, max_prompt=8, max_response=8, ranks=1)
    found = {name: value for name, value in metrics.items() if name.startswith(("reward/", "rewards/"))}
    assert found == {
        "reward/frac_reward_zero_std": 0.5,
        "reward/frac_reward_zero_std/exact": 0.0,
        "reward/groups_with_one_reward": 0.0,
        "reward/frac_reward_zero_std/style": 0.5,
        "reward/frac_gated": 0.25,
        "rewards/gate/mean": 0.5,
        "rewards/gate/std": 0.5,
        "rewards/gate/coverage": 0.5,
        "rewards/exact/mean": 0.5,  # 0 where the gate closed
        "rewards/exact/std": 0.5,
        "rewards/exact/coverage": 0.25,
        "rewards/style/mean": 0.25,
        "rewards/style/std": 0.25,
        "rewards/style/coverage": 0.5,
    }


def test_reward_latency_is_measured_per_call():
    calls = [Span("reward", "reward/0", t, t + s, attributes={"function": "f"}) for t, s in ((0, 1), (1, 3))]
    spans = [*calls, Span("reward", "driver", 0, 9)]
    assert latency_metrics(spans) == {"reward/latency_s/f/mean": 2.0, "reward/latency_s/f/max": 3.0}


def test_failures_are_saved_with_their_traceback(tmp_path):
    path = tmp_path / "reward_failures.jsonl"
    for message in ("first", "second"):
        write_failures(path, [failure_row(sample(3, 1, 2, None), RewardFailure("f", message, "Traceback ..."))])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["message"] for row in rows] == ["first", "second"]
    assert (rows[0]["sample"], rows[0]["data_source"], rows[0]["traceback"]) == ("1/3/1", "sums", "Traceback ...")


def test_repeated_prompt_computation_is_measured():
    samples = {each.id: each for each in (sample(0, 0, 2, None), sample(0, 1, 6, None), sample(1, 0, 4, None))}
    assert repetition([Span("ref", "driver", 0, 1, samples=tuple(samples))], samples) == {}

    def ran(kind, run, *names, where="trainer/0"):
        return Span(kind, where, 0, 1, samples=names, attributes={"run": run})

    once = [ran("ref", 12, "1/0/0", "1/0/1"), ran("ref", 8, "1/1/0"), ran("values", 8, "1/1/0")]
    assert repetition(once, samples) == {"perf/computed_over_unique_tokens": 1.0}
    slices = [ran("ref", 6, "1/0/0", "1/0/1", where=f"trainer/{rank}") for rank in (0, 1)]
    assert repetition(slices, samples) == {"perf/computed_over_unique_tokens": 1.0}
    again = [ran("ref", 6, "1/0/0"), ran("ref", 10, "1/0/1")]
    assert repetition(again, samples) == {"perf/computed_over_unique_tokens": 16 / 12}


def test_balance_is_relative_to_the_lower_bound():
    def planned(**attributes):
        return Span("plan", "trainer", 0, 1, attributes=attributes)

    passes = [planned(makespan=6.0, even=4.0, longest=5.0), planned(makespan=8.0, even=8.0, longest=2.0), planned()]
    assert balance_metrics(passes) == {
        "balance/makespan_over_bound/mean": 1.1,
        "balance/makespan_over_bound/max": 1.2,
        "balance/makespan_over_bound/min": 1.0,
        "balance/frac_limited_by_longest": 0.5,
    }
    assert balance_metrics(passes[2:]) == {}


def test_validation_prefers_acc_and_separates_data_sources():
    groups = [
        group(sample(0, 0, 2, Reward(1.0, {"fn/acc": 1.0, "fn/format": 1.0}))),
        group(sample(1, 0, 2, Reward(0.2, {"fn/acc": 0.0, "fn/format": 1.0}))),
        group(sample(2, 0, 3, Reward(0.7), source="chat")),
    ]
    metrics = validation_metrics(groups)
    assert metrics["val-core/sums/acc/mean@1"] == 0.5
    assert metrics["val-aux/sums/reward/mean@1"] == pytest.approx(0.6)
    assert metrics["val-core/chat/reward/mean@1"] == 0.7


ACC, NO_ACC = Reward(1.0, {"fn/acc": 1.0}), Reward(0.0, {"fn/note": 0.0})
GATED = Reward(0.0, {"gate": 0.0}, None, {"fn": 0.0}, "gate")
FAILED = RewardFailure("fn", "timed out")


@pytest.mark.parametrize(
    ("rewards", "mean", "coverage"),
    [
        ([ACC, NO_ACC, NO_ACC, NO_ACC], 0.25, 0.25),
        ([ACC] * 17 + [Reward(0.0, {"fn/acc": 0.0})] * 22 + [GATED] * 25, 17 / 64, 39 / 64),
        ([ACC, ACC, FAILED, FAILED], 1.0, 0.5),
        ([Reward(1.0, {"f/acc": 1.0, "g/acc": 0.0}), NO_ACC], 0.25, 0.5),
    ],
)
def test_validation_accuracy_covers_all_responses_with_a_reward(rewards, mean, coverage):
    metrics = validation_metrics([group(sample(n, 0, 2, reward)) for n, reward in enumerate(rewards)])
    assert metrics["val-core/sums/acc/mean@1"] == pytest.approx(mean)
    assert metrics["val-aux/sums/acc/coverage@1"] == coverage
    assert [name for name in metrics if name.startswith("val-core/")] == ["val-core/sums/acc/mean@1"]


@pytest.mark.parametrize(
    ("validations", "expected"),
    [
        ([[ACC, GATED], [GATED, GATED], [NO_ACC, GATED]], {"acc": [0.5, 0.0, 0.0]}),
        ([[GATED, GATED], [ACC, GATED], [GATED, GATED]], {"acc": [0.0, 0.5, 0.0]}),
        ([[GATED, GATED], [NO_ACC, GATED], [ACC, GATED]], {"reward": [0.0, 0.0, 0.5]}),
        ([[NO_ACC], [ACC], [GATED]], {"reward": [0.0, 1.0, 0.0]}),
    ],
)
def test_validation_metrics_keep_their_names_for_the_whole_run(validations, expected):
    rows = []
    for rewards in validations:
        groups = [group(sample(n, 0, 2, reward)) for n, reward in enumerate(rewards)]
        rows.append(validation_metrics(groups, rows[-1] if rows else ()))
    core = [name for name in rows[-1] if name.startswith("val-core/")]
    assert {name.split("/")[2]: [row[name] for row in rows] for name in core} == expected
    for before, after in pairwise(rows[1:]):
        assert before.keys() <= after.keys()


@pytest.mark.parametrize("logged", [(), ("fn", "fn/acc")])
def test_reward_parts_are_0_for_closed_gates_and_omitted_for_inapplicable_functions(logged):
    scored = Reward(1.0, {"gate": 1.0, "fn": 1.0, "fn/acc": 1.0}, None, {"fn": 1.0})
    other = Reward(0.5, {"gate": 1.0, "chat": 0.5}, None, {"chat": 0.5})
    groups = [group(sample(0, 0, 2, scored), sample(0, 1, 2, GATED)), group(sample(1, 0, 2, other))]
    metrics = sample_metrics(groups, groups, n=2, max_prompt=8, max_response=8, ranks=1, logged=logged)
    assert [metrics[f"rewards/fn/acc/{kind}"] for kind in ("mean", "std", "coverage")] == [0.5, 0.5, 1 / 3]
    assert metrics["rewards/chat/mean"] == 0.5 and metrics["rewards/chat/coverage"] == 1 / 3
    closed = [group(sample(0, 0, 2, GATED), sample(0, 1, 2, GATED))]
    metrics = sample_metrics(closed, closed, n=2, max_prompt=8, max_response=8, ranks=1, logged=logged)
    found = {name: value for name, value in metrics.items() if name.startswith("rewards/fn/")}
    assert found == {f"rewards/{part}/{kind}": 0.0 for part in logged for kind in ("mean", "std", "coverage")}


def test_statistics_cover_generated_samples_and_advantages_cover_trained_samples():
    right = [[1.0] * 4] * 6 + [[1.0, 1.0, 0.0, 0.0], [0.0] * 4]
    groups = [
        group(*(sample(n, k, 2 + k, Reward(value)) for k, value in enumerate(values))) for n, values in enumerate(right)
    ]
    cut = group(sample(8, 0, 9, None), sample(8, 1, 0, None), sample(8, 2, 0, None), sample(8, 3, 0, None))
    partials = {each.id: Partial(np.arange(6), np.zeros(6), 0) for each in cut.samples[1:3]}
    for each in cut.samples[1:]:
        each.response = None
    for each in groups[6].samples:
        each.tensors = {
            name: np.ones(len(each.response.token_ids)) for name in ("advantages", "returns", "token_rewards")
        }
    limits = {"n": 4, "max_prompt": 8, "max_response": 9, "ranks": 1}
    metrics = sample_metrics([*groups, cut], [groups[6]], **limits, partials=partials)
    assert metrics["critic/score/mean"] == 26 / 32 and metrics["reward/frac_reward_zero_std"] == 7 / 8
    assert metrics["response/aborted_ratio"] == 3 / 36
    assert metrics["response_length/mean"] == (8 * 14 + 9 + 6 + 6 + 0) / 36 and metrics["response_length/min"] == 0
    assert metrics["response_length_non_aborted/mean"] == (8 * 14 + 9) / 33
    assert metrics["response_length_non_aborted/clip_ratio"] == 1 / 33
    assert metrics["critic/advantages/mean"] == 1.0 and metrics["global_seqlen/mean"] == 4 * 4 + 14
    nothing = sample_metrics([*groups, cut], [], **limits)
    assert nothing["reward/frac_reward_zero_std"] == 7 / 8 and "critic/advantages/mean" not in nothing


def test_entropy_is_estimated_from_all_responses():
    long, short = sample(0, 0, 4, Reward(1.0)), sample(0, 1, 1, None)
    long.response = replace(long.response, log_probs=np.full(4, -0.5, np.float32))
    short.response = replace(short.response, log_probs=np.full(1, -3.0, np.float32))
    metrics = sample_metrics([group(long, short)], [], n=2, max_prompt=8, max_response=8, ranks=1)
    assert metrics["response/entropy"] == 1.0


def test_utilisation_counts_executed_flops():
    samples = {each.id: each for each in (sample(0, 0, 6, None), sample(0, 1, 6, None), sample(1, 0, 6, None))}
    decode = {"batch": 2, "prefill_tokens": 8}
    spans = [
        Span("gen", "driver", 0, 4),
        Span("gen", "driver", 20, 24, cause="testing"),
        Span("decode", "rollout/0", 0, 3, tokens=18, attributes=decode),
        Span("decode", "rollout/0", 20, 23, tokens=99, attributes=decode),
        Span("old_log_prob", "driver", 3, 5, samples=("1/0/0", "1/1/0")),
        Span("update_actor", "driver", 4, 5, samples=("1/0/0", "1/0/1")),
        Span("update_actor", "driver", 4.5, 6, attributes={"step": True}),
        Span("update_critic", "driver", 6, 7, samples=("1/0/0",)),
    ]
    facts = {"parameters": {"actor": (10, 5), "critic": (10, 0)}, "peak_flops": 1000.0}
    assert utilisation(spans, facts, samples) == {
        "perf/mfu/actor": 6 * (10 * (4 + 12) + 5 * 12) / (2 * 1000),
        "perf/mfu/critic": 6 * 10 * (4 + 6) / 1000,
        "perf/mfu/actor_infer": 2 * (10 * (8 + 12) + 5 * 12) / (2 * 1000),
        "perf/mfu/rollout": 2 * (10 * (8 + 18) + 5 * 18) / (4 * 1000),
    }
    assert "perf/mfu/rollout" not in utilisation(spans, facts, samples, quantized=True)
    assert utilisation(spans, {"parameters": facts["parameters"]}, samples) == {}


def test_failures_are_counted_per_function_and_excluded_from_means():
    failed = sample(0, 1, 2, RewardFailure("judge", "timed out"))
    assert failure_metrics([(failed, failed.reward)]) == {"reward/failures/judge": 1.0}
    assert validation_metrics([group(sample(0, 0, 2, Reward(1.0)), failed)])["val-core/sums/reward/mean@2"] == 1.0


def test_times_are_the_union_of_driver_spans():
    spans = [
        Span("gen", "driver", 0, 4),
        Span("gen", "driver", 1, 6),
        Span("gen", "rollout/0", 0, 100),
        Span("reward", "driver", 5, 7, samples=("a", "b")),
        Span("reward", "driver", 6.5, 7.5, samples=("c",)),
        Span("step", "driver", 0, 10),
    ]
    assert covered(spans[:2]) == 6
    metrics = time_metrics(spans, {"gen": 300, "step": 1000}, slots=2)
    assert metrics["timing_s/gen"] == 6 and metrics["timing_s/reward"] == 2.5
    assert metrics["timing_per_token_ms/gen"] == 20
    assert metrics["perf/throughput"] == 50


def test_fusion_metrics_count_overlapped_samples_and_the_idle_share():
    spans = [
        Span("step", "driver", 0, 10),
        Span("gen", "driver", 0, 6),
        Span("reward", "driver", 5, 7, samples=("a", "b")),
        Span("old_log_prob", "driver", 4, 5, samples=("a",)),
        Span("reward", "driver", 6.5, 7.5, samples=("c",)),
        Span("update_actor", "driver", 5, 6, samples=("a",)),
        Span("move", "driver", 3, 3.5, samples=("b", "c")),
        Span("decode", "rollout/0", 0, 6),  # slot 0: 6 s, then its ranks 0 and 1 concurrently for 2 s
        Span("backward", "trainer/0", 6, 8),
        Span("backward", "trainer/1", 6, 8),
        Span("decode", "rollout/1", 0, 4, attributes={"drafted": 8, "accepted": 6}),  # slot 1: 4 s
        Span("decode", "rollout/1", 12, 14),  # after this step
    ]
    assert fusion_metrics(spans, slots=2, width=2) == {
        "fusion/samples_overlapped": 2.0,
        "fusion/samples_trained_in_tail": 1.0,
        "fusion/samples_moved": 2.0,
        "fusion/draft_acceptance": 0.75,
        "fusion/idle_share": pytest.approx(1 - 12 / 20),
    }
    assert fusion_metrics(spans[:1], slots=2) == {}, "a step without generation"


def test_events_round_trip_through_the_file_and_record_errors(tmp_path):
    recorder = Recorder("driver")
    with recorder.span("gen", samples=("1/2/3",), tokens=7, cause="test"):
        pass
    with pytest.raises(KeyError), recorder.span("reward"):
        raise KeyError("x")
    spans = recorder.drain()
    assert not recorder.drain()
    log = EventLog(tmp_path / "events.jsonl")
    log.write(spans)
    log.close()
    assert read_events(tmp_path / "events.jsonl") == spans
    assert spans[1].attributes["error"] == "KeyError('x')"
