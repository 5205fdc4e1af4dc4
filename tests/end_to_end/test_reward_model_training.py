"""Training of a reward model from pairs on real DeepSpeed ranks: gradients, resuming, and use in the reward pool."""

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from trainer_probe import Probe, distance
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlfuse.config.reward_labels import ONLY_LABEL
from rlfuse.config.rewards import RewardConfig
from rlfuse.config.schema import Config
from rlfuse.data.preferences import load_preferences
from rlfuse.data.tokenizers import load_tokenizer
from rlfuse.engines.trainer.offline_trainer import OfflineTrainer
from rlfuse.observe.tracking import sample_of_row
from rlfuse.rewards.api.items import item_of_row
from rlfuse.rewards.models.classifier import Classifier
from rlfuse.rewards.workers.pool import RewardPool
from rlfuse.run.offline.reward_model import rows_of

MODEL = "reward_model"


class Pairs(OfflineTrainer, Probe):
    """Trainer whose gradients can be read."""

    labels = (ONLY_LABEL,)

    async def learn(self, pairs):
        return await super().learn(rows_of(pairs, self.labels))

    async def scores(self, pairs):
        return await super().scores(rows_of(pairs, self.labels))


@pytest.fixture(scope="module")
def config(tiny_model, tmp_path_factory):
    """Write pairs whose chosen response ends with a small number; two of three have a margin."""
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = []
    for i in range(48):
        low, high = rng.integers(3, 90), rng.integers(110, 199)
        middle = " ".join(f"w{n}" for n in rng.integers(3, 199, rng.integers(1, 9)))
        rows.append(
            {"prompt": f"w{i + 3}", "chosen": f" {middle} w{low}", "rejected": f" w{high}", "margin": i % 3 / 4}
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config()
    config.trainer.task, config.model.path, config.model.dtype = MODEL, str(tiny_model), "float32"
    config.data.train_files, config.trainer.n_gpus_per_node, config.cluster.timeout_s = [str(path)], 2, 300
    config.actor.optim.lr, config.actor.optim.weight_decay, config.actor.grad_clip = 3e-3, 0.0, 0.0
    config.actor.ppo_max_token_len_per_gpu = 64
    return config


@pytest.fixture(scope="module")
def pairs(config):
    return load_preferences(config.data.train_files, load_tokenizer(config.model), config.data)[0]


@pytest.fixture(scope="module")
async def trainer(config, slots):
    return (await Pairs.start(config, slots, 0, [ONLY_LABEL]))[0]


async def fresh(trainer, stage):
    """Reload the model in the same processes under another ZeRO stage."""

    def reload(rank, stage):
        rank.config.actor.zero_stage = stage
        rank.setup(0, [ONLY_LABEL])

    trainer.config.actor.zero_stage = stage
    await asyncio.gather(*(rank.__ray_call__.remote(reload, stage) for rank in trainer.ranks))


def direct(folder, sequences):
    """Return the classifier's scores by transformers, one sequence at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, num_labels=1, pad_token_id=0
    )
    return model, [model(torch.tensor(ids.astype(np.int64))[None]).logits[0, 0] for ids in sequences]


def sequences(pairs):
    return [np.concatenate([p.shared_ids, ids]) for p in pairs for ids in (p.chosen_ids, p.rejected_ids)]


@pytest.mark.parametrize("stage", [1, 3])
async def test_a_reward_model_learns_resumes_and_loads_into_the_reward_pool(trainer, config, pairs, stage, tmp_path):
    await fresh(trainer, stage)
    first = await trainer.learn(pairs[:32])
    assert first["reward_model/loss"] > np.log(2) - 1e-6, (
        "a new head scores 0, so the loss exceeds log 2 by the margins"
    )
    await trainer.save(tmp_path)
    continued = [await trainer.learn(pairs[start : start + 5]) for start in range(0, 40, 5)]
    await trainer.load(tmp_path)
    assert [await trainer.learn(pairs[start : start + 5]) for start in range(0, 40, 5)] == continued
    scores = await trainer.scores(pairs)
    assert (scores[:, 0] > scores[:, 1]).mean() > 0.8
    await trainer.save(tmp_path)
    folder = tmp_path / MODEL / "huggingface"
    _, expected = direct(folder, sequences(pairs))
    np.testing.assert_allclose(scores.flatten(), [float(score.detach()) for score in expected], atol=1e-4)
    AutoTokenizer.from_pretrained(config.model.path).save_pretrained(folder)
    model = Classifier(str(folder))
    model.start()
    rows = [json.loads(line) for line in Path(config.data.train_files[0]).read_text().splitlines()]
    items = [
        item_of_row({"prompt": row["prompt"], "response": row[side]}) for row in rows for side in ("chosen", "rejected")
    ]
    np.testing.assert_allclose(model.score(items), scores.flatten(), atol=1e-4)
    if stage == 1:
        await _gradients_are_plain_torchs(trainer, config, pairs[:7], folder)


async def _gradients_are_plain_torchs(trainer, config, pairs, folder):
    """Compare gradients for a head that is not 0: two ranks, several micro-batches, and a rank without rows."""

    def start_from(rank, path):
        rank.config.model.path = path
        rank.setup(0, [ONLY_LABEL])

    for some in (pairs, pairs[:1]):
        await asyncio.gather(*(rank.__ray_call__.remote(start_from, str(folder)) for rank in trainer.ranks))
        metrics = await trainer.learn(some)
        model, scores = direct(folder, sequences(some))
        gaps = torch.stack(scores[::2]) - torch.stack(scores[1::2])
        margins = torch.tensor([pair.margin for pair in some])
        loss = -torch.nn.functional.logsigmoid(gaps - margins).mean()
        loss.backward()
        assert metrics["reward_model/loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
        expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert distance(await trainer.gradients(MODEL), expected) < 1e-4
    await asyncio.gather(*(rank.__ray_call__.remote(start_from, config.model.path) for rank in trainer.ranks))


CLASS = """\
import torch
from transformers import Qwen2ForSequenceClassification

class TwoLayers(Qwen2ForSequenceClassification):
    def __init__(self, config):
        super().__init__(config)
        self.score = torch.nn.Sequential(torch.nn.Linear(128, 16), torch.nn.GELU(), torch.nn.Linear(16, 2, bias=False))
        self.post_init()
"""


@pytest.fixture
def own_class(tiny_model, tmp_path):
    """Return a model folder: the tiny model's trunk, and the code of a custom class with two labels."""
    folder = tmp_path / "own"
    shutil.copytree(tiny_model, folder)
    (folder / "two_layers.py").write_text(CLASS)
    config = json.loads((folder / "config.json").read_text())
    config |= {"auto_map": {"AutoModelForSequenceClassification": "two_layers.TwoLayers"}}
    (folder / "config.json").write_text(json.dumps(config | {"id2label": {0: "small", 1: "large"}}))
    return folder


async def test_a_custom_class_learns_two_dimensions_and_is_served(trainer, config, pairs, own_class, tmp_path):
    """Each response of a pair is preferred in one dimension, so only a model that separates dimensions learns them."""

    def start_from(rank, path):
        rank.config.model.path, rank.config.model.trust_remote_code, rank.config.actor.zero_stage = path, True, 3
        return rank.setup(0, ["small", "large"])

    await asyncio.gather(*(rank.__ray_call__.remote(start_from, str(own_class)) for rank in trainer.ranks))
    trainer.labels, trainer.config.actor.zero_stage = ["small", "large"], 3
    trainer._buckets.clear()  # of the previous model; only this test changes it
    small = [replace(pair, dimension="small") for pair in pairs]
    large = [
        replace(pair, chosen_ids=pair.rejected_ids, rejected_ids=pair.chosen_ids, dimension="large") for pair in pairs
    ]
    for start in [*range(0, 40, 5)] * 2:
        await trainer.learn([*small[start : start + 5], *large[start : start + 5]])
    scores = await trainer.scores([*small, *large])
    assert (scores[:, 0] > scores[:, 1]).mean() > 0.8
    await trainer.save(tmp_path)
    folder = tmp_path / MODEL / "huggingface"
    AutoTokenizer.from_pretrained(config.model.path).save_pretrained(folder)
    assert (folder / "two_layers.py").read_text() == CLASS
    entries = ["reward_model:large", {"path": "reward_model:small", "weight": 0.5}]
    pool = RewardPool(RewardConfig(entries, model_path=str(folder)), trust_remote_code=True)
    await pool.start()
    rows = [json.loads(line) for line in Path(config.data.train_files[0]).read_text().splitlines()]
    answers = [sample_of(number, row["prompt"], row["chosen"]) for number, row in enumerate(rows)]
    rewards = await pool.score(answers)
    await pool.close()
    found = [[reward.parts[f"{MODEL}/{label}"] for label in ("small", "large")] for reward in rewards]
    np.testing.assert_allclose(found, np.stack([scores[:48, 0], scores[48:, 1]], 1), atol=1e-4)
    assert [reward.value for reward in rewards] == pytest.approx([0.5 * small + large for small, large in found])


def sample_of(number, prompt, response):
    """Return a finished sample with these texts."""
    row = {"prompt": prompt, "data_source": "pairs", "ground_truth": None, "columns": {}, "finish": "stop"}
    return sample_of_row(row | {"id": f"1/{number}/0", "response": response})
