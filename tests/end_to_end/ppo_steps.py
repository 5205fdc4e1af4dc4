"""Loss curve of twenty PPO steps on seeded rollouts, for any trainer."""

from itertools import zip_longest

import numpy as np
import torch
from single_process import Whole, make_rows
from trainer_probe import scores_of

from rlfuse.algorithms.advantages import gae, place_at_end, whiten
from rlfuse.engines.trainer.model_inputs import collate
from rlfuse.protocols import PassResult

STEPS = 20


class OneProcess:
    """Actor, critic and reference in this process."""

    def __init__(self, config):
        kinds = {"actor": "actor", "critic": "critic", "ref": "actor"}
        self.models = {name: Whole(config, kind) for name, kind in kinds.items()}

    async def score(self, models, rows, slot=None):
        return {model: PassResult(self.models[model].score(rows), 0.0) for model in models}

    async def train(self, rows):
        return self.models["actor"].step(rows)[1] | self.models["critic"].step(rows)[1]


async def loss_curve(trainer):
    """Return the metrics of every step. Rollouts are scored one update earlier, so that ratios differ from 1."""
    rollouts = [make_rows(8, seed=100 + step) for step in range(STEPS)]
    flat = [row for rows in rollouts for row in rows]
    for row, reference in zip(flat, await scores_of(trainer, "ref", flat), strict=True):
        row.tensors["ref_log_probs"] = reference
    curve = []
    await score(trainer, rollouts[0])
    for rows, following in zip_longest(rollouts, rollouts[1:]):
        if following:
            await score(trainer, following)
        estimate(rows)
        curve.append(await trainer.train(rows))
    return curve


async def score(trainer, rows):
    old, values = await scores_of(trainer, "actor", rows), await scores_of(trainer, "critic", rows)
    for row, *scores in zip(rows, old, values, strict=True):
        row.tensors.update(zip(("old_log_probs", "values"), scores, strict=True))


def estimate(rows):
    """Add advantages and returns; the reward is the share of response tokens below 20."""
    batch = collate(rows, packed=True)
    scores = torch.tensor([float(np.mean(row.response_ids < 20)) for row in rows])
    advantages, returns = gae(place_at_end(scores, batch.mask), batch.tensors["values"], batch.mask, 1.0, 0.95)
    for name, matrix in (("advantages", whiten(advantages, batch.mask)), ("returns", returns)):
        for row, part in zip(rows, batch.split(matrix[batch.mask]), strict=True):
            row.tensors[name] = part
