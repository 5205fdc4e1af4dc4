"""A judge and a pooled reward model in one real pool, each on vLLM in a separate process, against transformers."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen2ForSequenceClassification

from rlfuse.config.rewards import RewardConfig
from rlfuse.rewards.api.items import item_of_sample
from rlfuse.rewards.models.classifier import Classifier
from rlfuse.rewards.workers.pool import RewardPool
from rlfuse.samples import Prompt, Response, RewardFailure, Sample
from rlfuse.tasks.judging import TEMPLATE, VERDICTS, compare_rows, entry
from rlfuse.tasks.settings import WarmStart
from rlfuse.tasks.vocabulary import build_tokenizer
from rlfuse.tasks.warm_start import build_model

ROWS = compare_rows(40, seed=2)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return (judge, classifier): random, with weights large enough that scores vary."""
    folder = tmp_path_factory.mktemp("judges")
    torch.manual_seed(3)
    tokenizer = build_tokenizer(("A", "B", "?"))
    model = build_model(WarmStart(hidden_size=64, intermediate_size=128), tokenizer)
    config = AutoConfig.for_model(**model.config.to_dict() | {"num_labels": 1})
    classifier = Qwen2ForSequenceClassification(config)
    for made, name in ((model, "judge"), (classifier, "classifier")):
        with torch.no_grad():
            for weight in made.parameters():
                if weight.dim() > 1:
                    weight.normal_(0, 0.15)
        if made is classifier:  # its conversations then end with padding
            tokenizer.pad_token = tokenizer.eos_token
            made.config.pad_token_id = tokenizer.pad_token_id
        made.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder / "judge", folder / "classifier"


def sample(number, row, **changed):
    columns = {"reference": row["reference"]}
    [message] = row["prompt"]
    prompt = Prompt(number, np.array([3], np.int32), message["content"], (message,), "remainder", "", columns)
    response = Response(np.array([5], np.int32), np.zeros(1, np.float32), "stop", 0, f" {row['response']}")
    return Sample(replace(prompt, **changed), 1, 0, number, response)


def probabilities(folder, first, second):
    """Return P(A) / (P(A) + P(B)) after the two responses, and P(A) + P(B), by transformers."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    verdicts = [tokenizer.convert_tokens_to_ids(verdict) for verdict in VERDICTS]
    found = []
    for row, a, b in zip(ROWS, first, second, strict=True):
        text = " " + TEMPLATE.format(prompt=row["prompt"][0]["content"], a=a, b=b)
        with torch.no_grad():
            both = model(torch.tensor([tokenizer(text).input_ids])).logits[0, -1].softmax(-1)[verdicts]
        found.append([(both[0] / both.sum()).item(), both.sum().item()])
    return np.array(found).T


async def test_judge_and_pooled_model_score_as_transformers_for_any_batching(ray_cluster, models):
    judge, classifier = models
    settings = RewardConfig([entry(judge)], [1.0, 0.0], str(classifier), model_backend="vllm", batch_age_s=0.2)
    pool = RewardPool(settings, engine_timeout_s=300)
    batch = [sample(number, row) for number, row in enumerate(ROWS)]
    lacking, longest = sample(90, ROWS[0], columns={}), sample(91, ROWS[0], columns={"reference": "7 - 7 = 0 , " * 200})
    await pool.start()
    try:
        one_by_one = await asyncio.gather(*(pool.score([each]) for each in batch))
        spans = await pool.drain()
        results = await pool.score([*batch, lacking, longest])
    finally:
        await pool.close()
    rewards = results[: len(batch)]
    responses, references = ([row[name] for row in ROWS] for name in ("response", "reference"))
    first, mass = probabilities(judge, responses, references)
    second, mass_too = probabilities(judge, references, responses)
    expected = {
        "judge": (first + 1 - second) / 2,
        "judge/position": (first + second) / 2,
        "judge/verdict_mass": (mass + mass_too) / 2,
        "judge/consistency": (first > 0.5) == (second < 0.5),
    }
    assert expected["judge"].std() > 0.01 and 0 < expected["judge/consistency"].mean() < 1
    for name, values in expected.items():
        np.testing.assert_allclose(values_of(rewards, name), values, atol=1e-4)
    direct = Classifier(str(classifier))
    direct.start()
    logits = direct.score([item_of_sample(each) for each in batch])
    assert np.std(logits) > 0.01
    np.testing.assert_allclose([reward.parts["reward_model"] for reward in rewards], logits, atol=1e-4)
    # Requests of one sample share calls to each model, and scores do not depend on the batch.
    for name in expected:
        np.testing.assert_allclose([one.parts[name] for [one] in one_by_one], values_of(rewards, name), atol=1e-5)
    for where in ("reward/judge", "reward/model"):
        sizes = [len(span.samples) for span in spans if span.where == where]
        assert sum(sizes) == len(batch) and len(sizes) <= 4 and max(sizes) == 32
    for failure, words in zip(results[len(batch) :], ("no column 'reference'", "accepts 1023"), strict=True):
        assert isinstance(failure, RewardFailure) and failure.function == "judge" and words in failure.message


def values_of(rewards, name):
    return [reward.parts[name] for reward in rewards]
