"""Reward functions that succeed, raise, hang and crash in real processes, and a reward model against direct scores."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import textwrap
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    Qwen2Tokenizer,
)

from rlfuse.config.custom_modules import load_module
from rlfuse.config.rewards import RewardConfig
from rlfuse.errors import EngineError, RewardError
from rlfuse.observe.metrics import latency_metrics
from rlfuse.observe.tracking import failure_row, write_failures
from rlfuse.rewards.api.items import item_of_row, item_of_sample
from rlfuse.rewards.models.classifier import Classifier
from rlfuse.rewards.workers.pool import RewardPool
from rlfuse.samples import Prompt, Response, Reward, RewardFailure, Sample
from rlfuse.tools.evaluation.reward_table import score_items

UNIT = Path(__file__).parents[1] / "unit"
hostile, async_rewards = (load_module(UNIT / f"{kind}_rewards.py") for kind in ("hostile", "async"))

# The response selects what to do; `pattern` hangs inside a C call that never releases the GIL.
FUNCTIONS = """
import asyncio, math, os, re, signal, subprocess, time

def act(text):
    if text == "crash":
        os._exit(7)
    if text == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if text == "hang":
        time.sleep(600)
    if text == "pattern":
        re.match("(a+)+$", "a" * 40 + "b")
    if text == "status":
        return subprocess.run(["sh", "-c", "exit 3"]).returncode
    if text == "raise":
        raise KeyError("what the user wrote")
    if text == "hog":
        return len(bytearray(10 * 2**30))
    if text == "chatter":
        for _ in range(100):
            print("x" * 2**20)
    odd = {"nan": math.nan, "none": None, "dict": {"reward": 1.0}}
    return odd[text] if text in odd else float(len(text))

def single(solution_str):
    return act(solution_str)

def short(completions):
    return [1.0] * (len(completions) - 1)

def gate(samples):
    return [0.0 if sample.response.startswith("no") else 1.0 for sample in samples]

def batched(prompts, completions, **columns):
    return [act(completion[0]["content"]) for completion in completions]

async def judge(solution_str):
    if solution_str == "slow":
        await asyncio.sleep(600)
    await asyncio.sleep(0.3)
    return act(solution_str)

def alarmed(solution_str):
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(1)
    signal.alarm(0)
    return asyncio.run(asyncio.sleep(0, 1.0))
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(textwrap.dedent(FUNCTIONS))
    return path


def samples(*texts, columns=None):
    question = {"role": "user", "content": "w3 w4 w5 "}
    prompt = Prompt(4, np.array([3, 4, 5], np.int32), question["content"], (question,), "", "", columns or {})
    return [
        Sample(prompt, 2, k, k, Response(np.array([6, 1], np.int32), np.zeros(2, np.float32), "stop", 0, text))
        for k, text in enumerate(texts)
    ]


async def scored(pool, *texts):
    await pool.start()
    try:
        return await pool.score(samples(*texts)), await pool.drain()
    finally:
        await pool.close()


async def test_each_failure_is_limited_to_its_sample(ray_cluster, functions):
    pool = RewardPool(RewardConfig([f"{functions}:single"], num_workers=2, timeout_s=6))
    texts = ["good", "crash", "raise", "hang", "pattern", "segfault", "status", "good again"]
    results, spans = await scored(pool, *texts)
    assert [result.value for result in (results[0], *results[6:])] == [4.0, 3.0, 10.0]
    failures = dict(zip(texts, results, strict=True))
    for text in ("crash", "segfault"):
        assert isinstance(failures[text], RewardFailure) and failures[text].function == "single"
        assert "the process of single died" in failures[text].message
    for text in ("hang", "pattern"):
        assert failures[text].message == "single took longer than 6 s (reward.timeout_s) and was stopped"
    assert failures["raise"].message == "KeyError: 'what the user wrote'"
    assert 'raise KeyError("what the user wrote")' in failures["raise"].traceback
    calls = [span for span in spans if span.kind == "reward"]
    assert {sample for span in calls for sample in span.samples} == {f"2/4/{k}" for k in range(8)}
    assert {span.where for span in calls} == {"reward/0", "reward/1"}
    assert all(span.step == 2 and 0 <= span.seconds < 60 and span.tokens == 2 * len(span.samples) for span in calls)
    assert latency_metrics(spans)["reward/latency_s/single/max"] == max(span.seconds for span in calls)


async def test_two_hundred_invalid_rewards_are_as_many_named_failures(ray_cluster, functions, tmp_path):
    """The other failures, and all of the unit tests: none becomes a number on retry or affects another sample.

    The process continues unless its code is broken.
    """
    entries = [{"path": f"{functions}:{name}", "sources": ["plain"]} for name in ("single", "short")]
    entries.append({"path": f"{hostile.__file__}:later", "sources": ["hostile"]})
    pool = RewardPool(RewardConfig(entries, timeout_s=20, memory_mb=500))
    expected = {
        "nan": "returned nan; a reward must be finite",
        "none": "returned None (NoneType); a reward must be a number",
        "dict": "returned a dict with the keys ['reward']; the key `score` is required, "
        "or else `token_rewards` or `step_rewards`",
        "hog": "MemoryError: (no message)",
    }
    ways = [text for number in range(len(hostile.WAYS)) for text in (f"way {number}", "good")]
    ways += [text for number in range(len(hostile.LATE)) for text in (f"late {number}", "good")]
    batch = samples(*expected, "chatter", "break", *ways)
    for sample in batch:
        source = "plain" if sample.response.text in (*expected, "chatter") else "hostile"
        sample.prompt = replace(sample.prompt, data_source=source)
    await pool.start()
    results = await pool.score(batch)
    restarts = [span for span in await pool.drain() if span.kind == "restart"]
    await pool.close()
    for (text, message), failure in zip(expected.items(), results, strict=False):
        assert isinstance(failure, RewardFailure) and failure.message == f"{message} (also failed: short)", text
    assert "bytearray(10 * 2**30)" in results[3].traceback
    assert results[4].function == "short" and results[4].message.startswith("returned 0 rewards for 1 samples")
    assert len(restarts) == 1 and "the function left the process unusable" in restarts[0].cause
    failed = [(s, r) for s, r in zip(batch[5:], results[5:], strict=True) if s.response.text not in ("good", "break")]
    assert len(failed) > 200 and sum(getattr(result, "value", None) == 1.0 for result in results) == len(failed) + 1
    write_failures(tmp_path / "reward_failures.jsonl", [failure_row(*each) for each in failed])
    rows = [json.loads(line) for line in (tmp_path / "reward_failures.jsonl").read_text().splitlines()]
    assert [row["response"] for row in rows] == [text for text in ways if text != "good"]
    assert all(row["function"] == "later" and row["message"] for row in rows)
    assert all(f'File "{hostile.__file__}", line' in row["traceback"] for row in rows)


async def test_gates_sources_and_answer_only_limit_the_calls(ray_cluster, functions):
    def shown(solution_str):
        return {"score": len(solution_str), "seen": solution_str}

    entries = [
        {"path": f"{functions}:gate", "gate": True},
        {"path": f"{functions}:single", "sources": ["sums"], "weight": 0.5},
        {"path": shown, "sources": ["ch*"], "answer_only": True, "name": "judge"},
    ]
    pool = RewardPool(RewardConfig(entries, num_workers=2, timeout_s=10))
    batch = samples("no hang", "<think>so</think>yes", "hang", "fine")
    for sample, source in zip(batch, ("sums", "chat", "chat", "sums"), strict=True):
        sample.prompt = replace(sample.prompt, data_source=source)
    await pool.start()
    gated, chat, also, sums = await pool.score(batch)
    calls = [(s.attributes["function"], s.samples) for s in await pool.drain()]
    await pool.close()
    assert gated == Reward(0.0, {"gate": 0.0}, None, {"single": 0.0}, "gate")
    assert (chat.value, chat.text) == (3.0, "judge/seen: yes") and also.parts == {"gate": 1.0, "judge": 4.0}
    assert sums == Reward(2.0, {"gate": 1.0, "single": 4.0}, None, {"single": 4.0})
    assert ("gate", tuple(s.id for s in batch)) == calls[0]
    assert {s for name, ids in calls[1:] if name == "single" for s in ids} == {"2/4/3"}


async def test_a_batch_that_raises_or_crashes_is_repeated_sample_by_sample(ray_cluster, functions):
    results, spans = await scored(RewardPool(RewardConfig([f"{functions}:batched"])), "good", "raise", "crash", "fine")
    assert results[0] == results[3] == Reward(4.0, {"batched": 4.0}, None, {"batched": 4.0})
    assert "KeyError" in results[1].message and "died" in results[2].message
    # The sample whose process died is called twice, because the process may have been killed from outside.
    assert [len(span.samples) for span in spans if span.kind == "reward"] == [4, 1, 1, 1, 1, 1]


async def test_a_batch_that_hangs_fails_as_a_whole_and_the_next_is_scored(ray_cluster, functions):
    pool = RewardPool(RewardConfig([f"{functions}:batched"], timeout_s=4))
    await pool.start()
    late = await pool.score(samples("good", "hang"))
    assert [result.message for result in late] == [
        "batched took longer than 4 s (reward.timeout_s) and was stopped"
    ] * 2
    first, second = await asyncio.gather(pool.score(samples("good")), pool.score(samples("fine!")))
    assert (first[0].value, second[0].value) == (4.0, 5.0)
    await pool.close()
    with pytest.raises(EngineError, match="between start"):
        await pool.score(samples("good"))


async def test_async_samples_share_a_call_and_a_slow_one_fails_alone(ray_cluster, functions):
    pool = RewardPool(RewardConfig([f"{functions}:judge", f"{functions}:alarmed"], [1.0, 0.5], timeout_s=5))
    results, spans = await scored(pool, *["good"] * 10, "slow", "raise")
    parts = {"judge": 4.0, "alarmed": 1.0}
    assert results[:10] == [Reward(4.5, parts, None, parts)] * 10
    assert results[10].message.startswith("judge took longer than 5 s") and "KeyError" in results[11].message
    [together] = [span for span in spans if span.attributes["function"] == "judge"]
    assert len(together.samples) == 12 and together.seconds < 60


async def test_async_functions_of_every_kind_share_calls_and_time_out_without_retry(ray_cluster):
    reward = RewardConfig([f"{async_rewards.__file__}:{name}" for name in async_rewards.NAMES], timeout_s=2)
    (good, calls), (late, bounded) = [await scored(RewardPool(reward), *texts) for texts in (["good"] * 40, ["hang"])]
    assert [result.value for result in good] == [4.0 * len(async_rewards.NAMES)] * 40
    assert "took longer than 2 s (reward.timeout_s)" in late[0].message
    count = Counter(span.attributes["function"] for span in calls)
    assert count["trl"] == 1 and count["verl"] == 2 and count["returns_awaitable"] < 10  # the first call has one sample
    assert sorted(one.attributes["function"] for one in bounded if one.kind == "reward") == sorted(async_rewards.NAMES)


async def test_a_lambda_scores_many_samples(ray_cluster):
    offset = 0.25
    results, _ = await scored(
        RewardPool(RewardConfig([lambda solution_str: len(solution_str) + offset], num_workers=2)), *["abc"] * 300
    )
    assert [result.value for result in results] == [3.25] * 300


async def test_verifiers_run_in_reward_processes(ray_cluster, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from rlfuse.rewards.verifiers import code, json_schema\n"
        "def runs(solution_str):\n"
        "    return code.score('', solution_str, {'inputs': [''], 'outputs': ['1']})\n"
        "def is_json(solution_str):\n"
        "    return json_schema.score('', solution_str, '{}')\n"
    )
    pool = RewardPool(RewardConfig([f"{path}:runs", f"{path}:is_json"]))
    results, _ = await scored(pool, "print(1)", "1", "import os\nos.kill(os.getppid(), 9)")
    assert [result.value for result in results] == [1.0, 1.0, 0.0]
    assert results[0].parts["runs/acc"] == 1.0 and results[1].parts["is_json"] == 1.0
    assert "PermissionError" in results[2].text or results[2].parts["runs/isolated"] == 0.0


async def test_call_sizes_change_no_reward_and_grow_with_throughput(ray_cluster):
    def measured(solution_str):
        return {"score": sum(map(ord, solution_str)) / 7, "length": len(solution_str)}

    texts = [f"{k * k % 101} and {k}" for k in range(2000)]
    alone = score_items(measured, [item_of_row({"prompt": "p", "response": text}) for text in texts])
    pool = RewardPool(RewardConfig([measured], num_workers=2))
    await pool.start()
    forward = await pool.score(samples(*texts))
    backward = await pool.score(samples(*texts)[::-1])
    spans = await pool.drain()
    await pool.close()
    assert [reward.value for reward in forward] == [reward.value for reward in alone]
    assert forward == backward[::-1]
    assert sum(len(span.samples) for span in spans) == 4000 and len(spans) < 400


async def test_start_and_restart_failures_show_the_users_traceback(ray_cluster, tmp_path):
    path = tmp_path / "moved.py"
    good = "import os\ndef f(solution_str):\n    os._exit(1) if solution_str == 'crash' else None\n    return 1.0\n"
    path.write_text(good)
    pool = RewardPool(RewardConfig([f"{path}:f"]))
    path.write_text("raise RuntimeError('not here')\n")
    with pytest.raises(EngineError, match=r"(?s)reward/0 could not start.*moved.py.*RuntimeError: not here") as caught:
        await pool.start()
    assert "ray::" not in str(caught.value)
    path.write_text(good)
    await pool.start()
    path.write_text("raise RuntimeError('gone')\n")
    for texts in (["crash"], ["good"] * 9, ["good"] * 9):
        with pytest.raises(EngineError, match="RuntimeError: gone"):
            await pool.score(samples(*texts))
    await pool.close()


async def test_closing_and_cancelling_end_all_pending_calls(ray_cluster, functions):
    pool = RewardPool(RewardConfig([f"{functions}:single"]))
    await pool.start()
    given_up = asyncio.create_task(pool.score(samples("hang", *["good"] * 20)))
    waiting = [asyncio.create_task(pool.score(samples(*["good"] * 20))) for _ in range(3)]
    await asyncio.sleep(0.5)
    given_up.cancel()
    start = time.monotonic()
    await pool.close()
    for result in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(result, EngineError)
    assert given_up.cancelled() and time.monotonic() - start < 200


# ---- reward model --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    """Save a random sequence classifier with one label, a byte-level tokenizer, and a context of 128 tokens."""
    folder = tmp_path_factory.mktemp("reward_models") / "rm"
    torch.manual_seed(1)
    sizes = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    special = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0, "dtype": "float32"}
    config = Qwen2Config(**sizes, **heads, **special, initializer_range=0.3, num_labels=1)
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    words = ["<pad>", "<eos>", *sorted(ByteLevel.alphabet())]
    vocabulary = {word: number for number, word in enumerate(words)}
    names = {"unk_token": "<eos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    Qwen2Tokenizer(vocab=vocabulary, merges=[], **names).save_pretrained(folder)
    return folder


def direct_scores(folder, texts):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [model(torch.tensor([tokenizer(text).input_ids])).logits.item() for text in texts]


async def test_reward_model_equals_direct_scores(ray_cluster, functions, reward_model):
    texts = [" ".join(f"w{3 + (7 * k + i) % 190}" for i in range(1 + 5 * k % 23)) for k in range(40)]
    too_long = "w" * 120
    pool = RewardPool(RewardConfig([f"{functions}:single"], [0.0, 2.0], model_path=str(reward_model)))
    results, spans = await scored(pool, *[f"<think>w9 w{k}</think>{text}" for k, text in enumerate(texts)], too_long)
    expected = direct_scores(reward_model, ["w3 w4 w5 " + text for text in texts])
    assert np.std(expected) > 0.1
    np.testing.assert_allclose([result.parts["reward_model"] for result in results[:-1]], expected, atol=1e-5)
    np.testing.assert_allclose([result.value for result in results[:-1]], 2 * np.array(expected), atol=2e-5)
    assert (
        results[-1].function == "reward_model" and "129 tokens" in results[-1].message and "128" in results[-1].message
    )
    assert sorted(len(span.samples) for span in spans if span.where == "reward/model") == [9, 32]


async def test_a_reward_model_that_is_killed_while_it_scores_is_replaced(ray_cluster, functions, reward_model):
    texts = [f"w{3 + k % 190} w{3 + 7 * k % 190}" for k in range(400)]
    pool = RewardPool(RewardConfig([f"{functions}:single"], [0.0, 2.0], model_path=str(reward_model)))
    await pool.start()
    try:
        model = next(handle for handle in pool._handles if handle.where == "reward/model")
        victim = await model._actor.__ray_call__.remote(lambda _: os.getpid())
        scoring = asyncio.ensure_future(pool.score(samples(*texts)))
        while not model.recorder.open:
            await asyncio.sleep(0.001)
        os.kill(victim, signal.SIGKILL)
        results = await scoring
        restarts = [span for span in await pool.drain() if span.kind == "restart"]
    finally:
        await pool.close()
    assert [span.where for span in restarts] == ["reward/model"]
    expected = direct_scores(reward_model, ["w3 w4 w5 " + text for text in texts])
    np.testing.assert_allclose([result.parts["reward_model"] for result in results], expected, atol=1e-5)


def test_reward_model_uses_its_own_chat_template(reward_model, tmp_path):
    folder = tmp_path / "rm_chat"
    shutil.copytree(reward_model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'w100 ' if m.role == 'user' else 'w101 ' }}{{ m.content }} {% endfor %}"
    )
    tokenizer.save_pretrained(folder)
    model = Classifier(str(folder))
    model.start()
    scores = model.score([item_of_sample(one) for one in samples("w8 w9", "w10")])
    expected = direct_scores(folder, ["w100 w3 w4 w5  w101 w8 w9 ", "w100 w3 w4 w5  w101 w10 "])
    np.testing.assert_allclose(scores, expected, atol=1e-5)


async def test_a_model_without_a_classification_head_is_refused(ray_cluster, tiny_model, tmp_path):
    with pytest.raises(RewardError, match="does not exist"):
        RewardPool(RewardConfig(model_path=str(tmp_path / "absent")))
    headless = tmp_path / "headless"
    shutil.copytree(tiny_model, headless)
    AutoConfig.from_pretrained(headless, num_labels=1).save_pretrained(headless)
    with pytest.raises(RewardError, match=r"\['score.weight'\], so they would be random"):
        Classifier(str(headless)).start()
    with pytest.raises(
        EngineError, match=r"reward/model could not start(.|\n)*2 labels. Select those to use as rewards"
    ):
        await RewardPool(RewardConfig(model_path=str(tiny_model))).start()
