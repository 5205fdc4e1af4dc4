"""Batching of model calls by size and age, placement of models, and verdicts of a judge."""

import asyncio
import math

import pytest

from rlfuse.cluster.cuda import REWARD_SHARE, reward_place
from rlfuse.cluster.placement import reward_device, reward_options
from rlfuse.config.compose import compose_job, to_config
from rlfuse.config.facts import Facts
from rlfuse.config.prepared import FOLDERS
from rlfuse.config.rewards import map_judge_paths
from rlfuse.errors import ConfigError, EngineError, RewardError
from rlfuse.rewards.api.items import Score
from rlfuse.rewards.models.judge import Judge, verdict
from rlfuse.rewards.workers import reward_worker_handle
from rlfuse.rewards.workers.pool import ModelCallQueue
from rlfuse.rewards.workers.reward_worker_handle import Call, ProcessLost, RewardWorkerHandle
from rlfuse.samples import RewardFailure
from rlfuse.tasks.judging import entry
from rlfuse.tasks.vocabulary import build_tokenizer

HOUR = 3600.0


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    """Create actors locally, without a Ray head."""

    async def create_locally(create):
        return create()

    monkeypatch.setattr(reward_worker_handle, "from_head", create_locally)


def call(item):
    return Call("judge", [item], [0], 1.0, 1.0, is_batched=True)


async def test_a_batch_is_complete_by_size_or_age():
    batches, calls = ModelCallQueue(3, HOUR), [call(k) for k in range(5)]
    for each in calls[:2]:
        await batches.put(each)
    waiting = asyncio.create_task(batches.get())
    await asyncio.sleep(0)
    assert not waiting.done()
    for each in calls[2:]:
        await batches.put(each)
    merged = await waiting
    assert merged.items == [0, 1, 2]
    merged.answer.set_result(["a", "b", "c"])
    assert [await each.answer for each in calls[:3]] == [["a"], ["b"], ["c"]]
    for age in (0.0, 0.001):  # the calls available by then; no wait for a third
        batches = ModelCallQueue(3, age)
        pair = [call(k) for k in range(2)]
        for each in pair:
            await batches.put(each)
        assert (await batches.get()).items == [0, 1]


class ScriptedHandle(RewardWorkerHandle):
    """Handle whose processes end as listed in `ends`, one word per attempt; `requested` has the items per attempt."""

    def __init__(self, ends):
        super().__init__("reward/0", None, None, 1.0)
        self.ends, self.requested = ends.split(), []

    async def start(self):
        self._is_fresh = True

    async def _attempt(self, call):
        if self._restart:
            await self._restart
        self.requested.append(len(call.items))
        if (end := self.ends.pop(0)) == "scores":
            self._is_fresh = False
            return [Score(1.0)] * len(call.items)
        lost = [RewardFailure("f", end)] * len(call.items)
        raise ProcessLost(lost, end, is_timeout=end == "late", is_memory_exhausted=end == "full")


@pytest.mark.parametrize(
    ("ends", "is_batched", "items", "requested", "failed"),
    [
        ("scores full scores", False, 1, [1, 1, 1], 0),
        ("full", False, 1, [1], 1),  # a new process has all its memory available
        ("scores full full", False, 1, [1, 1, 1], 1),
        ("full scores scores full scores", False, 3, [3, 1, 1, 1, 1], 0),
        ("crash scores", False, 1, [1, 1], 0),
        ("crash crash", False, 1, [1, 1], 1),
        ("scores crash crash", False, 1, [1, 1, 1], 1),
        ("crash scores crash scores", False, 2, [2, 1, 1, 1], 0),  # the first call had used up the memory
        ("scores full scores", True, 3, [1, 3, 3], 0),
        ("scores full full scores scores scores", True, 3, [1, 3, 3, 1, 1, 1], 0),
        ("late", True, 3, [3], 3),
    ],
)
async def test_a_sample_fails_only_if_a_fresh_process_is_lost(ends, is_batched, items, requested, failed):
    handle = ScriptedHandle(ends)
    if ends.startswith("scores"):
        await handle._outcomes(call(9))
    found = await handle._outcomes(Call("f", list(range(items)), list(range(items)), 1.0, 1.0, is_batched))
    assert sum(isinstance(outcome, RewardFailure) for outcome in found) == failed and len(found) == items
    assert handle.requested == requested


async def test_merged_calls_share_results_errors_and_cancellation():
    async def batch(*calls):
        batches = ModelCallQueue(len(calls), HOUR)
        for each in calls:
            await batches.put(each)
        return await batches.get()

    one, two, cancelled = call(1), call(2), call(3)
    cancelled.answer.cancel()
    batches = ModelCallQueue(3, HOUR)
    for each in (cancelled, one, two):
        await batches.put(each)
    merged = await batches.get()
    assert merged.items == [1, 2]
    merged.answer.set_result([10, 20])
    assert (await one.answer, await two.answer) == ([10], [20])

    one, two = call(1), call(2)
    merged = await batch(one, two)
    merged.fail(EngineError("the model is gone"))
    for each in (one, two):
        with pytest.raises(EngineError, match="gone"):
            await each.answer

    one, two = call(1), call(2)
    merged = await batch(one, two)
    one.answer.cancel()
    await asyncio.sleep(0)
    assert not merged.answer.done()
    two.answer.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert merged.answer.cancelled()


async def test_put_blocks_while_full_and_a_closed_handle_fails_its_calls():
    batches, first = ModelCallQueue(2, HOUR), call(0)
    await batches.put(first)
    waiting = asyncio.create_task(batches.get())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(EngineError, match="closed"):
        await first.answer
    for k in range(4):
        await batches.put(call(k))
    full = asyncio.create_task(batches.put(call(4)))
    await asyncio.sleep(0)
    assert not full.done() and batches.get_nowait().items == [0]
    await full


def test_models_share_the_remaining_gpu_fraction():
    assert reward_place(0, 1, 4) == (3, REWARD_SHARE)
    places = [reward_place(i, 3, 2) for i in range(3)]
    assert [slot for slot, _ in places] == [1, 0, 1]
    for slot in (0, 1):
        assert sum(share for where, share in places if where == slot) <= REWARD_SHARE
    assert [reward_device("auto", slots) for slots in ("cpu", "cuda")] == ["cpu", "cuda"]
    assert reward_device("cpu", "cuda") == "cpu"
    with pytest.raises(EngineError, match=r"reward\.device=cuda"):
        reward_device("cuda", "cpu")
    options = reward_options(0, 1, None, "cpu", {"A": "b"})
    assert options["num_cpus"] == 0 and "num_gpus" not in options
    assert options["runtime_env"]["env_vars"].items() >= {"A": "b", "CUDA_VISIBLE_DEVICES": ""}.items()


def test_a_verdict_must_be_one_known_token(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RewardError, match=r"template: \{b\} is missing"):
        Judge(str(tmp_path), template="{prompt} {a}")
    with pytest.raises(RewardError, match="two different texts"):
        Judge(str(tmp_path), verdicts=["A", "A"])
    judge = Judge(str(tmp_path))
    judge._tokenizer = build_tokenizer(("A",))
    assert judge._token(" A") > 0
    for wrong in (" A A", " B"):
        with pytest.raises(RewardError, match="must be one token in its vocabulary"):
            judge._token(wrong)


@pytest.mark.slow
def test_the_experiment_uses_the_judge_of_the_task():
    [judge, _] = to_config(compose_job(["experiment=judge"]), lambda _: Facts()).reward.functions
    assert judge == entry(FOLDERS["judge"] / "model")
    assert map_judge_paths([judge, "a.py:f"], str.upper)[0]["kwargs"]["model"] == ".CACHE/RLFUSE/JUDGE/MODEL"
    with pytest.raises(ConfigError, match=r"reward\.device=cuda.*set (reward\.device=)?auto"):
        to_config(compose_job(["experiment=judge", "reward.device=cuda"]), lambda _: Facts(cuda=False))


def log_probs(*probabilities):
    return [math.log(p) for p in probabilities]


def test_averaging_both_orders_cancels_position_bias():
    clear = verdict(log_probs(0.72, 0.08), log_probs(0.1, 0.7))
    assert clear.value == pytest.approx((0.9 + 0.875) / 2)
    assert clear.parts == pytest.approx({"consistency": 1.0, "position": (0.9 + 0.125) / 2, "verdict_mass": 0.8})
    biased = verdict(log_probs(0.9, 0.1), log_probs(0.9, 0.1))
    assert biased.value == pytest.approx(0.5) and biased.parts["consistency"] == 0
    assert biased.parts["position"] == pytest.approx(0.9)
    mirrored = [
        verdict(*pair).value
        for pair in ((log_probs(0.6, 0.2), log_probs(0.3, 0.5)), (log_probs(0.3, 0.5), log_probs(0.6, 0.2)))
    ]
    assert sum(mirrored) == pytest.approx(1)
    extreme = verdict([0.0, -2000.0], [-2000.0, 0.0])
    assert extreme.value == 1.0


@pytest.mark.parametrize("invalid", [[math.nan, -1.0], [-math.inf, -math.inf]])
def test_invalid_probabilities_are_failures(invalid):
    failure = verdict(invalid, log_probs(0.5, 0.5))
    assert isinstance(failure, RewardFailure) and "log-probs of the verdicts" in failure.message
