"""For tests of trainer ranks: small configurations, ragged rows, and a group whose gradients can be read."""

import asyncio

import numpy as np
import torch

from rlfuse.config.schema import Config
from rlfuse.engines.trainer.trainer_group import TrainerGroup
from rlfuse.samples import Row

VOCABULARY, LR, BETA = 60, 1e-3, 0.9


def make_rows(count=7, seed=3):
    """Ragged rows with everything that the two losses read."""
    rng = np.random.default_rng(seed)

    def row(i):
        prompt, response = (rng.integers(3, VOCABULARY, rng.integers(2, most)).astype(np.int32) for most in (8, 24))
        draw = lambda loc: rng.normal(loc, 0.3, len(response)).astype(np.float32)  # noqa: E731
        tensors = {"old_log_probs": draw(-4), "advantages": draw(0), "ref_log_probs": draw(-4)}
        return Row(prompt, response, tensors | {"values": draw(0), "returns": draw(0.2)}, id=str(i))

    return [row(i) for i in range(count)]


def lengths(rows):
    return [len(row.response_ids) for row in rows]


def settings(folder, zero_stage=1, mode="token-mean", dtype="float32", budget=64, clip=0.0, alone=False):
    """`alone`: the actor has no critic beside it, whose start is a third of a configuration's."""
    config = Config()
    config.algorithm.adv_estimator = "grpo" if alone else "gae"
    config.model.path, config.model.dtype = folder, dtype
    config.data.max_response_length = 32
    config.trainer.n_gpus_per_node = 2
    config.cluster.timeout_s = 300
    actor = config.actor
    actor.strategy = "fsdp2" if zero_stage == "fsdp2" else "deepspeed"
    actor.zero_stage, actor.loss_agg_mode = 1 if zero_stage == "fsdp2" else zero_stage, mode
    actor.grad_clip, actor.ppo_max_token_len_per_gpu = clip, budget
    actor.optim.lr = config.critic.optim.lr = LR
    config.critic.optim.weight_decay = 0.0
    actor.optim.weight_decay, actor.use_kl_loss, actor.kl_loss_coef, actor.entropy_coeff = 0.0, True, 0.1, 0.01
    return config


class Probe(TrainerGroup):
    """Reads the gradient of the first AdamW step out of its first moment: (1 - beta1) * gradient, at any ZeRO stage."""

    async def gradients(self, model="actor"):
        def read(rank, model):
            from deepspeed.utils import safe_get_full_optimizer_state

            sharded = rank.engines[model]
            if rank.config.actor.strategy == "fsdp2":
                moments = ((n, sharded.optimizer.state[p]["exp_avg"]) for n, p in sharded.module.named_parameters())
                return {name: moment.full_tensor() / (1 - BETA) for name, moment in moments}
            engine = sharded.engine
            state = engine.optimizer.state if not hasattr(engine.optimizer, "bit16_groups") else None
            names = dict(engine.module.named_parameters())
            if rank.config.actor.zero_stage == 0:
                return {name: state[p]["exp_avg"] / (1 - BETA) for name, p in names.items()}
            return {name: safe_get_full_optimizer_state(p, "exp_avg") / (1 - BETA) for name, p in names.items()}

        calls = [rank.__ray_call__.remote(read, model) for rank in self.ranks]
        return (await asyncio.gather(*calls))[0]

    @classmethod
    async def of(cls, ranks, config):
        """What `start` gives, of ranks that are there."""
        group = cls(config, ranks)
        await group.meet(config)
        facts = (await group._all("setup", "load its models", None))[0]
        group.shares_prompts = facts["shares_prompts"]
        return group

    async def meet(self, config):
        """The ranks share layers and sequences in groups of other degrees."""

        def regroup(rank, config):
            rank.config = config
            rank.meet_groups()

        await asyncio.gather(*(rank.__ray_call__.remote(regroup, config) for rank in self.ranks))

    async def take(self, config):
        """Load fresh models under another configuration, in the same processes: starting those is what costs."""

        def reload(rank, config):
            rank.config = config
            rank.setup()

        self.config = config
        self._accumulated = {"actor": [], "critic": []} if config.uses_critic else {"actor": []}
        self._buckets = {}
        await asyncio.gather(*(rank.__ray_call__.remote(reload, config) for rank in self.ranks))
        return self

    async def update(self, model, rows):
        await self.accumulate((model,), rows)
        return await self.step(model, lengths(rows))


def distance(found, expected):
    """Of two gradients, relative to the second one's norm."""
    assert found.keys() == expected.keys()
    one, other = (torch.cat([tensors[name].flatten() for name in expected]) for tensors in (found, expected))
    return float((one - other).norm() / other.norm())


async def scores_of(trainer, model, rows, slot=None):
    """Of each row: log-probs, or values."""
    return (await trainer.score((model,), rows, slot))[model].arrays
